"""Between relations and lists of edges by the rows of their end points."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm import Group
from sar.edges.build import build_relation
from sar.edges.relation import EdgeArrays, Relation


class EdgeEnds(NamedTuple):
    """End points of the local edges by position, int64 [num_edges] each, on the CPU.

    Attributes:
        owner: rank that owns the source.
        src: the source's row inside that rank.
        dst: the destination's row inside this one.
    """

    owner: Tensor
    src: Tensor
    dst: Tensor


def owned_ends(relation: Relation) -> EdgeArrays:
    """The edges with their sources as rows of the ranks that own them, on the CPU; collective.

    A relation itself remembers only which of the rows that arrive an edge reads.
    """
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
    """Where the edges lead; collective."""
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
    """A relation of edges that end in rows of this rank; collective.

    Args:
        ends: of all edges.
        num_rows: rows this rank owns as sources and as destinations.
        make_keys: as in :class:`sar.edges.Relation`.

    Returns:
        The relation; its edges keep their positions. Its set-up costs what its edges and the rows
        they need cost, whatever the size of the graph.
    """
    order = torch.argsort(ends.owner, stable=True)
    counts = torch.bincount(ends.owner, minlength=group.size)
    offsets = [0, *torch.cumsum(counts, 0).tolist()]
    src, dst = ends.src[order].int(), ends.dst[order].int()
    return build_relation(group, src, dst, order.int(), offsets, *num_rows, make_keys)
