"""Build relations of edges, read the end points back, and join several relations into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm import Group
from sar.edges.relation import EdgeArrays, Relation
from sar.stream import build_halo_plan, join_plans


def build_relation(
    group: Group,
    src: Tensor,
    dst: Tensor,
    eid: Tensor,
    offsets: Sequence[int],
    num_src: int,
    num_dst: int,
    make_keys: Callable[[], Tensor],
    position: Tensor | None = None,
) -> Relation:
    """Agree on the halo plan of one edge type and renumber remote sources by it; collective.

    Args:
        src, dst, eid: int32 [E] as in :class:`Relation`, but ``src`` is everywhere the row inside
            the owner's partition.
        offsets, make_keys: as in :class:`Relation`.
        position: for blocks, the row of the source tensor for each row of the partition, or -1.
    """
    compact = torch.empty_like(src)
    wanted: list[Tensor] = []
    for peer in range(group.size):
        span = slice(offsets[peer], offsets[peer + 1])
        if peer == group.rank:
            wanted.append(src[:0])
            own = src[span]
            compact[span] = own if position is None else position.index_select(0, own).int()
        else:
            rows, inverse = torch.unique(src[span], return_inverse=True)
            wanted.append(rows)
            compact[span] = inverse.int()
    plan = build_halo_plan(group, wanted, num_src, position)
    return Relation(plan, num_src, num_dst, compact, dst, eid, offsets, make_keys)


def join_relations(relations: Sequence[Relation]) -> Relation:
    """Join relations out of the same source rows to one, whose halo has each row once; collective.
    Their destination rows follow each other, and so do their edges."""
    group, num_src = relations[0].group, relations[0].num_src
    plan, places = join_plans([relation.plan for relation in relations])
    dst_starts = [0, *accumulate(relation.num_dst for relation in relations)]
    eid_starts = [0, *accumulate(relation.num_edges for relation in relations)]
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    arrays = [relation.arrays() for relation in relations]
    offsets = [0]
    for peer in range(group.size):
        for number, edges in enumerate(arrays):
            span = slice(edges.offsets[peer], edges.offsets[peer + 1])
            src = edges.src[span]
            if peer != group.rank:
                src = places[number][peer].index_select(0, src)
            dst, eid = edges.dst[span], edges.eid[span]
            parts.append((src, dst + dst_starts[number], eid + eid_starts[number]))
        offsets.append(sum(len(part[0]) for part in parts))
    src, dst, eid = (torch.cat(column) for column in zip(*parts, strict=True))

    def keys() -> Tensor:
        return torch.cat([relation.make_keys() for relation in relations])

    return Relation(plan, num_src, dst_starts[-1], src, dst, eid, offsets, keys)


class EdgeEnds(NamedTuple):
    """End points of the local edges by position, int64 [num_edges] each, on the CPU: the rank that
    owns the source, the source's row inside that rank, the destination's row inside this one."""

    owner: Tensor
    src: Tensor
    dst: Tensor


def owned_ends(relation: Relation) -> EdgeArrays:
    """The edges with their sources as rows of the ranks that own them, on the CPU; collective. A
    relation itself remembers only which of the rows that arrive an edge reads."""
    plan, group = relation.plan.to(torch.device("cpu")), relation.group
    own = torch.arange(relation.num_src, dtype=torch.int32)
    asked = [
        own[:0] if peer == group.rank else own if idx is None else idx
        for peer, idx in enumerate(plan.send_idx)
    ]
    halo = group.all_to_all(torch.cat(asked), plan.send_counts, plan.recv_counts)
    src, dst, eid, offsets = relation.arrays()
    src = src.cpu().clone()
    for peer, rows in enumerate(halo.split(plan.recv_counts)):
        span = slice(offsets[peer], offsets[peer + 1])
        if peer != group.rank:
            src[span] = rows.index_select(0, src[span])
    return EdgeArrays(src, dst.cpu(), eid.cpu(), offsets)


def edge_ends(relation: Relation) -> EdgeEnds:
    """The end points of a relation's edges by position; collective."""
    src, dst, eid, offsets = owned_ends(relation)
    owner = torch.arange(relation.group.size).repeat_interleave(torch.tensor(offsets).diff())
    position = torch.argsort(eid)
    return EdgeEnds(owner[position], src.long()[position], dst.long()[position])


def relation_of_edges(
    group: Group,
    ends: EdgeEnds,
    num_rows: tuple[int, int],
    make_keys: Callable[[], Tensor],
) -> Relation:
    """A relation of edges that end in rows of this rank, with their positions kept; collective.

    Its set-up costs what its edges and the rows they need cost, whatever the size of the graph.
    ``num_rows`` are those this rank owns as sources and as destinations.
    """
    order = torch.argsort(ends.owner, stable=True)
    counts = torch.bincount(ends.owner, minlength=group.size)
    offsets = [0, *torch.cumsum(counts, 0).tolist()]
    src, dst = ends.src[order].int(), ends.dst[order].int()
    return build_relation(group, src, dst, order.int(), offsets, *num_rows, make_keys)
