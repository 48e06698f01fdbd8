"""Relations with other edges over the same rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sar.edges import Relation, as_stored
from sar.edges.build import EdgeEnds, edge_ends, relation_of_edges
from sar.graph.store import Structure
from sar.partition.book import EType


def whole_relation(store: Structure, etype: EType, what: str) -> Relation:
    """The relation; raises ``ValueError`` unless its loops may be changed."""
    if etype[0] != etype[2] or store.dst_rows is not store.src_rows:
        raise ValueError(f"{what}: got {etype}, expected one node type and no block")
    return as_stored(store.relations[etype], what)


def with_loops(relation: Relation, loop_keys: Callable[[], Tensor]) -> Relation:
    """Add a loop at every node, behind the others, with ``loop_keys``; no communication."""
    rank = relation.group.rank
    src, dst, eid, offsets = relation.arrays()
    loops = torch.arange(relation.num_dst, dtype=torch.int32, device=src.device)
    end, make_keys = offsets[rank + 1], relation.make_keys
    parts = {"src": (src, loops), "dst": (dst, loops), "eid": (eid, loops + relation.num_edges)}
    arrays = {name: torch.cat([old[:end], new, old[end:]]) for name, (old, new) in parts.items()}
    offsets = [offset + (len(loops) if p > rank else 0) for p, offset in enumerate(offsets)]
    return Relation(
        relation.plan,
        relation.num_src,
        relation.num_dst,
        **arrays,
        offsets=offsets,
        make_keys=lambda: torch.cat([make_keys(), loop_keys()]),
    )


def are_no_loops(relation: Relation) -> Tensor:
    """bool [E]: which edges lead to another node."""
    rank = relation.group.rank
    src, dst, eid, offsets = relation.arrays()
    own = slice(offsets[rank], offsets[rank + 1])
    keep = torch.ones(relation.num_edges, dtype=torch.bool, device=src.device)
    keep[eid[own].long()] = src[own] != dst[own]
    return keep


def with_some_edges(relation: Relation, keep: Tensor) -> Relation:
    """Only the edges where bool [E] ``keep`` is true, and all rows; collective."""
    chosen, make_keys = keep.cpu(), relation.make_keys
    smaller = relation_of_edges(
        relation.group,
        EdgeEnds(*(end[chosen] for end in edge_ends(relation))),
        (relation.num_src, relation.num_dst),
        lambda: make_keys()[chosen],
    )
    return smaller.to(relation.plan.device)
