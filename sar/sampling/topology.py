"""Edges with the weights and times that draws need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sar.comm import Group
from sar.kernels.sampling import Csc
from sar.partition.book import EType, PartitionBook
from sar.partition.load import PartitionData
from sar.sampling.features import FeatureTables
from sar.sampling.structure import (
    Ids,
    edge_weights,
    in_edges,
    node_ids,
    out_edges,
    source_ids,
)
from sar.sampling.swap import Swap

ALWAYS, NEVER = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Topology:
    """Edges that draws are made from.

    Attributes:
        book: of the partitioning.
        edges: per relation that is followed, the in-edges of this rank's nodes; their out-edges
            where ``is_out``.
        keys: per node type, what names this rank's nodes in random numbers.
        ids: per node type, which rank has the edges of which nodes.
    """

    book: PartitionBook
    edges: dict[EType, Csc]
    keys: dict[str, Tensor]
    ids: dict[str, Ids]
    is_out: bool = False

    @property
    def ends(self) -> tuple[int, int]:
        """Where in a relation's name the type of the nodes stands whose edges these are, and where
        that of their neighbors."""
        return (0, 2) if self.is_out else (2, 0)


def topology(
    data: PartitionData,
    swap: Swap,
    etypes: Iterable[EType],
    weight_attr: str | None = None,
    time_attr: str | None = None,
    direction: str = "in",
) -> Topology:
    """The edges of this part's nodes, of some relations; collective.

    Args:
        weight_attr: the edge feature that chances are in proportion to.
        time_attr: the feature that says when a node or an edge came. An edge came when it says so
            itself, else with its source; one that neither says anything about was always there.
        direction: ``"in"`` or ``"out"``.

    Raises ``ValueError`` on every rank for weights and times that do not fit.
    """
    etypes, edges, error = list(etypes), dict[EType, Csc](), None
    times, weights = dict[EType, Tensor](), dict[EType, Tensor]()
    if time_attr is not None:
        times = _times(data, swap, etypes, time_attr)
    try:
        if weight_attr is not None:
            weights = {etype: edge_weights(data, etype, weight_attr) for etype in etypes}
        if direction == "in":
            edges = {e: in_edges(data, e, weights.get(e), times.get(e)) for e in etypes}
    except Exception as caught:  # any, too little memory as well: the others would wait
        error = caught
    swap.group.agree(error, "loader")
    if direction == "out":
        edges = {e: out_edges(data, e, swap, weights.get(e), times.get(e)) for e in etypes}
    keys = {ntype: data.keys.nodes(ntype) for ntype in data.book.ntypes}
    ids = {ntype: node_ids(data.book, ntype) for ntype in data.book.ntypes}
    return Topology(data.book, edges, keys, ids, direction == "out")


def replicated(own: Topology, group: Group) -> Topology:
    """The edges of all nodes, on every rank; collective."""
    edges = dict[EType, Csc]()
    for etype, csc in own.edges.items():
        degrees = _gathered(csc.indptr.diff(), group)
        indptr = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
        edges[etype] = Csc(indptr, *(_gathered(one, group) for one in csc[1:]))
    keys = {ntype: _gathered(one, group) for ntype, one in own.keys.items()}
    ids = {n: Ids(torch.tensor([0, one.total])) for n, one in own.ids.items()}
    return replace(own, edges=edges, keys=keys, ids=ids)


def _gathered(rows: Tensor, group: Group) -> Tensor:
    """The rows of all ranks, which may have int32 and int64 ones."""
    told = torch.tensor([len(rows), rows.element_size()])
    counts, sizes = torch.stack(group.all_gather(told)).unbind(1)
    is_wide = rows.dtype == torch.int32 and bool((sizes > rows.element_size()).any())
    rows = rows.long() if is_wide else rows
    out = rows.new_empty((int(counts.sum()), *rows.shape[1:]))
    for rank, part in enumerate(out.split(counts.tolist())):
        if rank == group.rank:
            part.copy_(rows)
        if len(part):
            group.broadcast(part, rank)
    return out


def own_times(data: PartitionData, ntype: str, time_attr: str) -> Tensor | None:
    """int64 [n] when this part's nodes of a type came; ``None`` where nodes do not say."""
    name = f"{ntype}/{time_attr}"
    return integers(data.node_features[name], name) if name in data.node_features else None


def _times(
    data: PartitionData, swap: Swap, etypes: list[EType], time_attr: str
) -> dict[EType, Tensor]:
    """int64 [E] per relation, by ascending id; those of sources are fetched."""
    aged = [n for n in data.book.ntypes if f"{n}/{time_attr}" in data.node_features]
    found, error, wanted = dict[EType, Tensor](), None, dict[EType, Tensor]()
    try:
        for ntype in aged:
            own_times(data, ntype, time_attr)
        for etype in etypes:
            name = f"{':'.join(etype)}/{time_attr}"
            if name in data.edge_features:
                found[etype] = integers(data.edge_features[name], name)
            elif etype[0] in aged:
                wanted[etype] = source_ids(data, etype)
            else:
                found[etype] = torch.full((data.num_edges(etype),), ALWAYS)
        if not aged and all(bool((one == ALWAYS).all()) for one in found.values()):
            raise ValueError(f"time_attr: got {time_attr!r}, which neither nodes nor edges have")
    except Exception as caught:  # any, too little memory as well: the others would wait
        error = caught
    swap.group.agree(error, "loader")
    tables = FeatureTables(data, swap, {ntype: [time_attr] for ntype in aged})
    for etype in etypes:
        if etype[0] in aged and etype not in found:
            rows = tables.fetch({etype[0]: wanted[etype]})
            found[etype] = rows[etype[0]][time_attr].long()
    return found


def integers(times: Tensor, name: str) -> Tensor:
    """int64 of a column of times. Raises ``ValueError`` for what is none."""
    if times.dim() != 1 or times.is_floating_point() or times.dtype == torch.bool:
        raise ValueError(
            f"time_attr: {name!r} is {times.dtype} {list(times.shape)}, expected integers, one each"
        )
    return times.long()
