"""Relations out of edges, and one relation out of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sar.comm import Group
from sar.edges.relation import Relation
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
    """Collective: agree the halo plan of one edge type and renumber remote sources by it.

    Args:
        src, dst, eid: int32 [E] as in :class:`Relation`, but ``src`` is everywhere the row inside
            the owner's partition.
        offsets: as in :class:`Relation`, length P + 1.
        num_src, num_dst: rows this rank owns on either side.
        make_keys: as in :class:`Relation`.
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
    """Collective: relations out of the same source rows as one, whose halo holds a row once.

    Their destination rows follow each other, and so do their edges.
    """
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
