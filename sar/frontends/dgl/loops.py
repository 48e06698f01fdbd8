"""``dgl.add_self_loop`` of a sharded graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sar.ops.aggregate import REDUCTIONS
from sar.partition.book import EType


def add_self_loop(
    graph: Any,
    edge_feat_names: Iterable[str] | None = None,
    fill_data: float | str = 1.0,
    etype: str | EType | None = None,
) -> Any:
    """A graph with an edge from every node to itself, each on the rank of its node; collective.

    Args:
        edge_feat_names: columns of edges that loops get a value in, 0 in others; by default all
            that can have it: sums and means are for floating point.
        fill_data: the value, or ``"sum"``, ``"mean"``, ``"max"`` or ``"min"`` over a node's
            in-edges.
    """
    if isinstance(fill_data, str) and fill_data not in REDUCTIONS:
        known = ", ".join(REDUCTIONS)
        raise ValueError(f"fill_data: got {fill_data!r}, expected a number or one of {known}")
    canonical = graph.to_canonical_etype(etype)
    columns, names = graph.edges[canonical].data, [*(edge_feat_names or ())]
    if edge_feat_names is None:
        kinds = {name: columns.info(name)[0] for name in columns}
        is_number = not isinstance(fill_data, str)
        names = [name for name, kind in kinds.items() if is_number or kind.is_floating_point]
    rows = {name: _rows_of_loops(graph, canonical, name, fill_data) for name in names}
    return graph.add_self_loop(canonical, rows)


def _rows_of_loops(graph: Any, etype: EType, name: str, fill: float | str) -> Tensor:
    """[num_nodes, ...] values of the loops in a column."""
    if isinstance(fill, str):
        import dgl.function as fn

        with graph.local_scope():
            graph.update_all(
                fn.copy_e(name, "_sum"), getattr(fn, fill)("_sum", "_sum"), etype=etype
            )
            reduced: Tensor = graph.dstnodes[etype[2]].data["_sum"]
            return reduced
    dtype, shape = graph.edges[etype].data.info(name)
    row = torch.full((1, *shape[1:]), fill, dtype=dtype, device=graph.device)
    return row.expand(graph.num_nodes(etype[2]), *shape[1:])
