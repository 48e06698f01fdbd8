"""What is drawn around the seeds of a batch: nodes in local numbers, and edges hop by hop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.errors import NotSupportedError
from sar.kernels.sampling import Placed
from sar.partition.book import EType
from sar.sampling.buffers import NumberingPool


class Edges(NamedTuple):
    """Drawn edges of one relation: local numbers of both ends, and the edges' ids; int64 [e]."""

    src: Tensor
    dst: Tensor
    eid: Tensor


class Trees(NamedTuple):
    """Seeds whose neighborhoods are kept apart, one tree for each.

    Attributes:
        of: per node type, int64, the tree of each seed.
        salt: int64 [trees], what keys the draws of a tree.
        time: int64 [trees], after which nothing is drawn.
    """

    of: dict[str, Tensor]
    salt: Tensor
    time: Tensor


class Seeds(NamedTuple):
    """What a batch grows from.

    Attributes:
        ids: per node type, int64; those that repeat, in one tree, are one node.
        step: the number of the batch, the same on all ranks.
        without: per relation, the edges that this rank draws for nobody: int64 src x nodes of
            dst's type + dst, ascending.
    """

    ids: Mapping[str, Tensor]
    step: int
    trees: Trees | None = None
    without: Mapping[EType, Tensor] = MappingProxyType({})


@dataclass
class Sample:
    """What was drawn around some seeds, in local numbers: seeds first, then as they came.

    Attributes:
        nodes: per node type, int64 [n] ids of the nodes, as
            :func:`sar.sampling.exchange.id_bounds` numbers them.
        trees: per node type, int64 [n] the tree of each node; empty where there are none.
        hops: per hop and relation that it follows, the edges that were drawn.
        num_nodes: per node type, how many nodes are seeds, and how many came with each hop.
        seeds: per node type, int64, the number of each of the ids that it grew from.
        starts: per hop, int64 [n + 1] where the edges of each of the nodes begin whose edges were
            drawn; where all are in their order.
    """

    nodes: dict[str, Tensor]
    trees: dict[str, Tensor]
    hops: list[dict[EType, Edges]]
    num_nodes: dict[str, list[int]]
    seeds: dict[str, Tensor]
    starts: list[dict[EType, Tensor]]


class Frontier(NamedTuple):
    """Nodes of a type whose edges are drawn next; their local numbers begin with ``first``."""

    ids: Tensor
    tree: Tensor | None
    first: int


class GrowingSample:
    """A sample that grows hop by hop, with node ``id`` of tree t as t x nodes of its type + id."""

    def __init__(
        self, seeds: Seeds, totals: dict[str, int], numberings: NumberingPool, is_out: bool
    ) -> None:
        self.seeds, self._totals, self._is_out = seeds, totals, is_out
        self._numberings, trees = numberings, 1 if seeds.trees is None else len(seeds.trees.salt)
        self._hops, self._starts = list[dict[EType, Edges]](), list[dict[EType, Tensor]]()
        self._numbers = {n: numberings.take(total * trees) for n, total in totals.items()}
        of, self._is_closed = {} if seeds.trees is None else seeds.trees.of, False
        self._given = {n: self._number(n, ids, of.get(n)) for n, ids in seeds.ids.items()}
        self._next = {ntype: (0, one.count) for ntype, one in self._numbers.items()}
        self._num_nodes = {ntype: [one.count] for ntype, one in self._numbers.items()}

    def _number(
        self, ntype: str, ids: Tensor, tree: Tensor | None, local: Tensor | None = None
    ) -> Tensor:
        """Local numbers of nodes, in ``local`` if it can be; -1 for unknown ones if closed."""
        known = ids if tree is None else ids + tree * self._totals[ntype]
        numbers = self._numbers[ntype]
        return numbers.find(known) if self._is_closed else numbers.number(known, local)

    def _nodes(self, ntype: str, first: int, last: int) -> tuple[Tensor, Tensor | None]:
        """Ids, and trees if there are any, of the nodes with these local numbers."""
        known = self._numbers[ntype].nodes(first)[: last - first]
        if self.seeds.trees is None:
            return known, None
        total = self._totals[ntype]
        return known % total, known.div(total, rounding_mode="floor")

    def frontier(self, ntype: str) -> Frontier:
        first, last = self._next[ntype]
        return Frontier(*self._nodes(ntype, first, last), first)

    def begin_hop(self) -> None:
        self._hops.append({})
        self._starts.append({})

    def add(self, etype: EType, frontier: Frontier, drawn: Placed) -> None:
        """Add the drawn edges of a relation."""
        offsets, ids, eids, of = drawn
        tree = None if frontier.tree is None else frontier.tree[of]
        far = self._number(etype[2 if self._is_out else 0], ids, tree, ids)
        near = of + frontier.first if frontier.first else of
        if self._is_closed:
            far, near, eids = (one[far >= 0] for one in (far, near, eids))
        self._hops[-1][etype] = Edges(*((near, far) if self._is_out else (far, near)), eids)
        if len(near) == int(offsets[-1]) and frontier.first == 0 and not self._is_out:
            self._starts[-1][etype] = offsets

    def end_hop(self, again: bool) -> None:
        """End a hop: the next one follows the nodes that came with it, or all nodes (``again``)."""
        for ntype, one in self._numbers.items():
            first = sum(self._num_nodes[ntype])
            self._num_nodes[ntype].append(one.count - first)
            self._next[ntype] = (0 if again else first, one.count)

    def close(self) -> None:
        """Let no more nodes come, and forget the edges: those of all nodes are drawn anew."""
        self._is_closed, self._hops, self._starts = True, [], []
        self._next = {ntype: (0, one.count) for ntype, one in self._numbers.items()}

    def sample(self) -> Sample:
        """The finished sample; the last call, as it gives the numberings back."""
        found = {ntype: self._nodes(ntype, 0, one.count) for ntype, one in self._numbers.items()}
        nodes = {ntype: ids.clone() for ntype, (ids, _) in found.items()}
        trees = {ntype: tree for ntype, (_, tree) in found.items() if tree is not None}
        self._numberings.give(self._numbers.values())
        return Sample(nodes, trees, self._hops, self._num_nodes, self._given, self._starts)


def bidirectional(sample: Sample) -> Sample:
    """The edges that were drawn and their reverses, each pair of nodes once, as one hop.

    A reverse that was drawn as well keeps its own id, another has that of its edge.
    """
    found = dict[EType, Edges]()
    for hop in sample.hops:
        for etype, edges in hop.items():
            before = found.get(etype)
            found[etype] = edges if before is None else Edges(*map(torch.cat, zip(before, edges)))
    for etype, (src, dst, eid) in found.items():
        if etype[0] != etype[2]:
            raise NotSupportedError(
                f"subgraph_type: got 'bidirectional' for {etype}; expected relations between nodes "
                "of one type"
            )
        ends = torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])
        pairs, which = ends.unique(dim=1, return_inverse=True)
        first = torch.full((pairs.shape[1],), ends.shape[1])
        first.scatter_reduce_(0, which, torch.arange(ends.shape[1]), "amin")
        found[etype] = Edges(pairs[0], pairs[1], torch.cat([eid, eid])[first])
    sample.hops, sample.starts = [found], [{}]
    return sample


def filtered(call: Callable[[Sample], Any], sample: Sample) -> Sample:
    """Call a user's filter; raises ``TypeError`` and ``ValueError`` for what is no sample."""
    made = call(sample)
    if not isinstance(made, Sample):
        got = "None" if made is None else type(made).__name__
        raise TypeError(f"filter: returned {got}, expected the Sample that it was called with")
    made.starts = [{} for _ in made.hops]  # of edges that may have gone
    for ntype, ids in made.nodes.items():
        if len(ids) != sum(made.num_nodes[ntype]):
            wanted = sum(made.num_nodes[ntype])
            raise ValueError(f"filter: got {len(ids)} nodes of {ntype!r}, expected the {wanted}")
    for hop in made.hops:
        for etype, (src, dst, eid) in hop.items():
            if not len(src) == len(dst) == len(eid):
                sizes = len(src), len(dst), len(eid)
                raise ValueError(f"filter: got {sizes} ends and ids of {etype}, expected as many")
            for ntype, ends in ((etype[0], src), (etype[2], dst)):
                check_range("an end", etype, ends, len(made.nodes[ntype]))
    return made


def check_range(what: str, kind: object, ids: Tensor, count: int) -> None:
    """Raise ``ValueError`` for ids of a filter's that there are not: rows are read by them."""
    wrong = (ids < 0) | (ids >= count)
    if wrong.any():
        got = int(ids[wrong][0])
        raise ValueError(f"filter: got {what} {got} of {kind!r}, expected 0 to {count - 1}")
