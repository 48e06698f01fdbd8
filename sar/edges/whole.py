"""The edges of a rank between its rows and those of one table of all ranks' rows."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm import Group
from sar.edges.relation import EdgeArrays, Relation
from sar.kernels import Csc, compress


class TableEdges(NamedTuple):
    """Edges whose other ends are rows of a table: those of rank 0 come first, then of rank 1, ..

    Attributes:
        edges: by the owned row; a row's edges are in the order of their ids, and of their ranks.
        first: where the rank's rows begin in a table of the other side's kind.
        num_rows: rows of that table.
    """

    edges: Csc
    first: int
    num_rows: int


class WholeEdges(NamedTuple):
    """All edges of a rank, at both of their ends.

    Attributes:
        into: into owned rows, out of a table of sources; with ``order`` local positions.
        out_of: out of owned rows, which end in rows of a table of destinations; with ``order``
            positions in what :meth:`at_sources` returns.
        eid: local positions by the rank of the source; ``None`` without ``order``.
        told, heard: how many edges of each rank end here, and how many that start here end there.
    """

    into: TableEdges
    out_of: TableEdges
    eid: Tensor | None
    told: list[int]
    heard: list[int]

    def at_sources(self, group: Group, numbers: Tensor) -> Tensor:
        """Of one number per local edge, [num_edges], those of edges out of owned rows; collective,
        needs ``order``."""
        sent = numbers.detach() if self.eid is None else numbers.detach()[self.eid]
        return group.all_to_all(sent, self.told, self.heard)


def edges_of_table(relation: Relation, ordered: bool = False) -> WholeEdges:
    """:func:`table_edges`, made at first need and kept; those with ``order`` take the place of
    those without. Collective."""
    ordered = ordered or ("edges of a table", True) in relation.known
    found = relation.derived(("edges of a table", ordered), lambda: table_edges(relation, ordered))
    if ordered:
        relation.known.pop(("edges of a table", False), None)
    return found


def table_edges(relation: Relation, ordered: bool) -> WholeEdges:
    """All edges of a rank. Collective: those out of owned rows come from where they end."""
    group, arrays = relation.group, relation.arrays()
    sizes = group.all_gather(torch.tensor([relation.num_src, relation.num_dst]))
    src_starts, dst_starts = (
        [*accumulate(side, initial=0)] for side in torch.stack(sizes).t().tolist()
    )
    first_src, first_dst = src_starts[group.rank], dst_starts[group.rank]
    src, eid = _sources_at_home(relation, arrays), arrays.eid.int() if ordered else None
    lengths = [high - low for low, high in pairwise(arrays.offsets)]
    starts = torch.tensor(src_starts[:-1]).repeat_interleave(torch.tensor(lengths)).int()
    order = torch.argsort(arrays.eid)
    into = compress(
        arrays.dst[order], (src + starts)[order], relation.num_dst, compact=False,
        order=False if eid is None else eid[order],
    )  # fmt: skip
    heard = group.all_to_all(torch.tensor(lengths), [1] * group.size, [1] * group.size).tolist()
    ends = torch.stack([src, arrays.dst + first_dst], dim=1)
    del src, starts, order, arrays
    owned, dst = group.all_to_all(ends, lengths, heard).t()
    out_of = compress(owned, dst, relation.num_src, compact=False, order=ordered)
    return WholeEdges(
        TableEdges(into, first_src, src_starts[-1]), TableEdges(out_of, first_dst, dst_starts[-1]),
        eid, lengths, heard,
    )  # fmt: skip


def _sources_at_home(relation: Relation, arrays: EdgeArrays) -> Tensor:
    """The source of each edge as its owner numbers it, int32 [num_edges]; collective."""
    plan, peers = relation.plan, range(relation.group.size)
    told = [plan.rows_for(peer) for peer in peers if peer != relation.group.rank]
    sent = torch.cat([arrays.src[:0], *told])
    heard = relation.group.all_to_all(sent, plan.send_counts, plan.recv_counts)
    src = arrays.src.clone()
    for (low, high), rows in zip(pairwise(arrays.offsets), heard.split(plan.recv_counts)):
        if len(rows):
            src[low:high] = rows[src[low:high]]
    return src
