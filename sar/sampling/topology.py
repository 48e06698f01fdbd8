"""Edges of each part's nodes, in an order that no cut changes, with weights and times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sar.comm import Group
from sar.kernels.sampling import Csc, split
from sar.partition.book import EType, PartitionBook
from sar.partition.load import PartitionData
from sar.sampling.exchange import Exchange, Kind, id_bounds
from sar.sampling.features import FeatureTables, column_of, columns_of

ALWAYS, NEVER = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
_INT32 = torch.iinfo(torch.int32).max
_NO_WEIGHTS = torch.empty(0, dtype=torch.float64)
_NO_TIMES = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Topology:
    """Edges that draws are made from: in-edges of this rank's nodes, or out-edges if ``is_out``.

    Attributes:
        keys: per node type, what names this rank's nodes in random numbers.
        bounds: per node type, int64 [P + 1], which rank has the edges of which nodes.
    """

    book: PartitionBook
    edges: dict[EType, Csc]
    keys: dict[str, Tensor]
    bounds: dict[str, Tensor]
    is_out: bool = False


def topology(
    data: PartitionData,
    exchange: Exchange,
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

    Raises ``ValueError`` on every rank for weights and times that do not fit.
    """
    etypes, edges = list(etypes), dict[EType, Csc]()
    times, weights = dict[EType, Tensor](), dict[EType, Tensor]()
    if time_attr is not None:
        times = _edge_times(data, exchange, etypes, time_attr)
    with exchange.group.agreed("loader"):
        if weight_attr is not None:
            weights = {
                etype: weights_of(data, etype, weight_attr, "weight_attr: got") for etype in etypes
            }
        if direction == "in":
            edges = {e: _in_edges(data, e, weights.get(e), times.get(e)) for e in etypes}
    if direction == "out":
        edges = {e: _out_edges(data, e, exchange, weights.get(e), times.get(e)) for e in etypes}
    keys = {ntype: data.keys.nodes(ntype) for ntype in data.book.ntypes}
    bounds = {ntype: id_bounds(data.book, ntype) for ntype in data.book.ntypes}
    return Topology(data.book, edges, keys, bounds, direction == "out")


def replicated(own: Topology, group: Group) -> Topology:
    """The edges of all nodes, on every rank; collective."""
    edges = dict[EType, Csc]()
    for etype, csc in own.edges.items():
        degrees = _gathered(csc.indptr.diff(), group)
        indptr = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
        edges[etype] = Csc(indptr, *(_gathered(one, group) for one in csc[1:]))
    keys = {ntype: _gathered(one, group) for ntype, one in own.keys.items()}
    bounds = {ntype: torch.tensor([0, int(one[-1])]) for ntype, one in own.bounds.items()}
    return replace(own, edges=edges, keys=keys, bounds=bounds)


def _gathered(rows: Tensor, group: Group) -> Tensor:
    """The rows of all ranks, int64 where any rank's are."""
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


# ---------------------------------------------------------------- edges by node


def id_dtype(book: PartitionBook) -> torch.dtype:
    """int32 where all ids of nodes and edges fit, else int64: the same on all ranks."""
    kinds: list[Kind] = [*book.ntypes, *book.canonical_etypes]
    most = max(int(id_bounds(book, kind)[-1]) for kind in kinds)
    return torch.int32 if most <= _INT32 else torch.int64


def source_ids(data: PartitionData, etype: EType) -> Tensor:
    """int64 [E] sources of a part's edges, by ascending id of the edge."""
    stored = _stored_sources(data, etype, torch.int64)
    return torch.empty_like(stored).index_copy_(0, data.edges[etype].eid.cpu().long(), stored)


def target_ids(data: PartitionData, etype: EType) -> Tensor:
    """int64 [E] destinations of a part's edges, by ascending id of the edge."""
    shard, first = data.edges[etype], int(id_bounds(data.book, etype[2])[data.part_id])
    stored = shard.dst.cpu().long() + first
    return torch.empty_like(stored).index_copy_(0, shard.eid.cpu().long(), stored)


def _stored_sources(data: PartitionData, etype: EType, dtype: torch.dtype) -> Tensor:
    """[E] sources of a part's edges, as they are stored: those of part 0 first."""
    shard, bounds = data.edges[etype], id_bounds(data.book, etype[0])
    first = bounds[:-1].to(dtype).repeat_interleave(torch.tensor(shard.offsets).diff())
    return first.add_(shard.src.cpu().to(dtype))


def _in_edges(data: PartitionData, etype: EType, weight: Tensor | None, time: Tensor | None) -> Csc:
    """The in-edges of this part's nodes, by destination; local.

    The edges of a node are in the order of their times and of their original ids where the
    partitions hold them, so that a draw by position does not depend on the cut. Needs 8 bytes an
    edge and 16 while it runs, 4 more each with int64 ids, 8 more with weights and with times, which
    are by ascending id.
    """
    shard, dtype = data.edges[etype], id_dtype(data.book)
    rows, dst = shard.eid.cpu().long(), shard.dst.cpu()
    when = None if time is None else time[rows]
    order = _order(dst, when, data.keys.edges(etype)[rows])
    return Csc(
        _starts(dst, data.num_nodes(etype[2])),
        _stored_sources(data, etype, dtype)[order],
        rows[order].to(dtype) + int(id_bounds(data.book, etype)[data.part_id]),
        _NO_WEIGHTS if weight is None else weight[rows[order]],
        _NO_TIMES if when is None else when[order],
    )


def _out_edges(
    data: PartitionData,
    etype: EType,
    exchange: Exchange,
    weight: Tensor | None,
    time: Tensor | None,
) -> Csc:
    """As :func:`_in_edges`, the out-edges of this part's nodes, by source; collective.

    The owners of destinations send them: 48 bytes an edge while it runs.
    """
    count, dtype = data.num_edges(etype), id_dtype(data.book)
    order, rows, sizes = split(source_ids(data, etype), id_bounds(data.book, etype[0]))
    columns = [
        target_ids(data, etype),
        torch.arange(count) + int(id_bounds(data.book, etype)[data.part_id]),
        data.keys.edges(etype).long(),
        torch.zeros(count, dtype=torch.int64) if time is None else time,
        torch.zeros(count, dtype=torch.int64) if weight is None else weight.view(torch.int64),
    ]
    at = order.long()
    sent = torch.stack([rows.long(), *(one[at] for one in columns)], dim=1)
    src, dst, eid, key, when, weights = exchange.deliver(sent, sizes)[0].unbind(1)
    order = _order(src, None if time is None else when, key)
    return Csc(
        _starts(src, data.num_nodes(etype[0])),
        dst[order].to(dtype),
        eid[order].to(dtype),
        _NO_WEIGHTS if weight is None else weights[order].view(torch.float64),
        _NO_TIMES if time is None else when[order],
    )


def _order(rows: Tensor, time: Tensor | None, key: Tensor) -> Tensor:
    """int64 [E]: positions of edges by row, those of one by time, then by key."""
    order = torch.argsort(key, stable=True)
    if time is not None:
        order = order[torch.argsort(time[order], stable=True)]
    return order[torch.argsort(rows[order], stable=True)]


def _starts(rows: Tensor, count: int) -> Tensor:
    counts = torch.bincount(rows, minlength=count)
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


# ---------------------------------------------------------------- weights and times


def weights_of(data: PartitionData, kind: Kind, name: str, told: str) -> Tensor:
    """float64 [n] weights of nodes, or edges by ascending id; raises unless finite, 0 or more."""
    column, full = column_of(data, kind, name, f"{told} {name!r}")
    weights = column.double()
    wrong = ~(weights.isfinite() & (weights >= 0))
    if weights.dim() != 1 or wrong.any():
        is_one_each, what = weights.dim() == 1, told.partition(":")[0]
        got = f"{float(weights[wrong][0])} in row {int(wrong.nonzero()[0])}" if is_one_each else (
            f"{list(weights.shape)}"
        )  # fmt: skip
        raise ValueError(
            f"{what}: {full!r} is {got}, {int(wrong.sum())} of them below 0 or not finite; "
            "expected 0 or more, one each"
        )
    return weights


def times_of(data: PartitionData, kind: Kind, time_attr: str) -> Tensor | None:
    """int64 [n] when this part's nodes, or edges by ascending id, came; ``None`` without a column.
    Raises ``ValueError`` for a column that is no times."""
    store, prefix = columns_of(data, kind)
    if (name := prefix + time_attr) not in store:
        return None
    times = store[name]
    if times.dim() != 1 or times.is_floating_point() or times.dtype == torch.bool:
        raise ValueError(
            f"time_attr: {name!r} is {times.dtype} {list(times.shape)}, expected integers, one each"
        )
    return times.long()


def _edge_times(
    data: PartitionData, exchange: Exchange, etypes: list[EType], time_attr: str
) -> dict[EType, Tensor]:
    """int64 [E] per relation, by ascending id; of edges without times those of their sources."""
    aged, found, wanted = list[str](), dict[EType, Tensor](), dict[EType, Tensor]()
    with exchange.group.agreed("loader"):
        aged += [n for n in data.book.ntypes if times_of(data, n, time_attr) is not None]
        for etype in etypes:
            own = times_of(data, etype, time_attr)
            if own is not None:
                found[etype] = own
            elif etype[0] in aged:
                wanted[etype] = source_ids(data, etype)
            else:
                found[etype] = torch.full((data.num_edges(etype),), ALWAYS)
        if not aged and all(bool((one == ALWAYS).all()) for one in found.values()):
            raise ValueError(f"time_attr: got {time_attr!r}, which neither nodes nor edges have")
    tables = FeatureTables(data, exchange, {ntype: [time_attr] for ntype in aged})
    for etype, ids in wanted.items():
        found[etype] = tables.fetch({etype[0]: ids})[etype[0]][time_attr].long()
    return found
