"""Sampling by owners: who owns a node draws its in-edges, and sends them to who asked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from sar.kernels.sampling import draw, hashed, place, split
from sar.partition.book import EType
from sar.sampling.leases import IDLE, Grown, Leases, Numberings, check_memory
from sar.sampling.structure import id_dtype
from sar.sampling.swap import Swap
from sar.sampling.topology import Topology

_PADDED = 64  # edges that have room in a reply whatever the degree of their node
_PLACED = 12  # bytes for each number of a reply, where its edges are put together


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
        without: per relation, edges that are left out: int64 src x nodes of dst's type + dst,
            ascending.
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
            :func:`sar.sampling.structure.node_ids` numbers them.
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


class _Growing:
    """A sample that grows, hop by hop.

    A node of tree t is known by the number t x nodes of its type + its id.

    Args:
        totals: per node type, how many nodes there are.

    Attributes:
        frontier: per node type, the numbers of the nodes whose edges are drawn next.
    """

    def __init__(self, seeds: Seeds, totals: dict[str, int], numberings: Numberings) -> None:
        self.seeds, self._totals, self.is_closed = seeds, totals, False
        self._numberings, trees = numberings, 1 if seeds.trees is None else len(seeds.trees.salt)
        self.hops, self.starts = list[dict[EType, Edges]](), list[dict[EType, Tensor]]()
        self.numbers = {n: numberings.take(total * trees) for n, total in totals.items()}
        of = {} if seeds.trees is None else seeds.trees.of
        self.given = {n: self.number(n, ids, of.get(n)) for n, ids in seeds.ids.items()}
        counts = {ntype: one.count for ntype, one in self.numbers.items()}
        self.frontier = {ntype: (0, count) for ntype, count in counts.items()}
        self.num_nodes = {ntype: [count] for ntype, count in counts.items()}

    def number(
        self, ntype: str, ids: Tensor, tree: Tensor | None, local: Tensor | None = None
    ) -> Tensor:
        """The local numbers of nodes; of a closed sample -1 for those that are not in it.

        Args:
            local: int64, may get the numbers; it may be ``ids``.
        """
        known = ids if tree is None else ids + tree * self._totals[ntype]
        numbers = self.numbers[ntype]
        return numbers.find(known) if self.is_closed else numbers.number(known, local)

    def is_left_out(self, etype: EType, src: Tensor, dst: Tensor) -> Tensor | None:
        """bool [e] of edges between some ids; ``None`` where none is."""
        pairs = self.seeds.without.get(etype)
        if pairs is None or not len(pairs):
            return None
        keys = src * self._totals[etype[2]] + dst
        at = torch.searchsorted(pairs, keys).clamp(max=len(pairs) - 1)
        return pairs[at] == keys

    def close(self) -> None:
        """No node comes any more; the edges of all of them are drawn anew."""
        self.is_closed, self.hops, self.starts = True, [], []
        self.frontier = {ntype: (0, one.count) for ntype, one in self.numbers.items()}

    def nodes(self, ntype: str, first: int, last: int) -> tuple[Tensor, Tensor | None]:
        """Ids, and trees if there are any, of the nodes with these local numbers."""
        known = self.numbers[ntype].nodes(first)[: last - first]
        if self.seeds.trees is None:
            return known, None
        total = self._totals[ntype]
        return known % total, known.div(total, rounding_mode="floor")

    def end_hop(self, again: bool) -> None:
        """What came with this hop is what is followed next; ``again``: and all before it."""
        for ntype, one in self.numbers.items():
            first = sum(self.num_nodes[ntype])
            self.num_nodes[ntype].append(one.count - first)
            self.frontier[ntype] = (0 if again else first, one.count)

    def sample(self) -> Sample:
        """What came of it; its last call."""
        found = {ntype: self.nodes(ntype, 0, one.count) for ntype, one in self.numbers.items()}
        nodes = {ntype: ids.clone() for ntype, (ids, _) in found.items()}
        trees = {ntype: tree for ntype, (_, tree) in found.items() if tree is not None}
        self._numberings.give(self.numbers.values())
        return Sample(nodes, trees, self.hops, self.num_nodes, self.given, self.starts)


@dataclass(frozen=True)
class Draws:
    """How edges are drawn.

    Attributes:
        fanouts: for each hop, how many edges of each relation; -1: all; a relation that is
            missing is not followed.
        replace: with replacement.
        last: the latest edges, instead of any up to the time of a tree.
        again: those of all nodes at every hop, as DGL's blocks want it; else of those that came
            with the hop before, as PyG does.
        induced: then take all edges between the nodes that came, as one hop.
        seed: of all draws, the same on all ranks.
    """

    fanouts: Sequence[Mapping[EType, int]]
    replace: bool = False
    last: bool = False
    again: bool = False
    induced: bool = False
    seed: int = 0


class NeighborSampler:
    """Draws edges, hop by hop, of nodes that any rank may own.

    Draws are a function of (seed, step, hop, relation, the node's key, the tree's salt): P ranks
    with some seeds each draw what one process draws for all of them.

    Args:
        topology: which edges there are, and who has them.
        swap: how ranks ask each other.
        draws: the same on all ranks.
    """

    def __init__(self, topology: Topology, swap: Swap, draws: Draws) -> None:
        self.topology, self.draws, self.swap = topology, draws, swap
        self.book, self.edges, self.keys = topology.book, topology.edges, topology.keys
        self.near, self._numberings = topology.ends[0], Numberings()
        self.dtype, self.sent, self.came = id_dtype(self.book), Grown(), Grown()
        self._leases = Leases(IDLE * len(draws.fanouts))
        self._totals = {ntype: ids.total for ntype, ids in topology.ids.items()}

    def sample(self, batches: Sequence[Seeds]) -> list[Sample]:
        """What is drawn around each of some batches of seeds; collective.

        All ranks give as many batches, of the same steps; some may have no seeds.
        """
        growing = [_Growing(seeds, self._totals, self._numberings) for seeds in batches]
        for hop, fanouts in enumerate(self.draws.fanouts):
            self._hop(growing, hop, fanouts)
            for batch in growing:
                batch.end_hop(self.draws.again)
        if self.draws.induced:
            for batch in growing:
                batch.close()
            self._hop(growing, len(self.draws.fanouts), dict.fromkeys(self.edges, -1))
        return [one.sample() for one in growing]

    def _hop(self, batches: list[_Growing], hop: int, fanouts: Mapping[EType, int]) -> None:
        followed = [etype for etype in self.edges if fanouts.get(etype)]
        of = {n: [one for one in followed if one[self.near] == n] for n in self.book.ntypes}
        asked = [(batch, n) for n, etypes in of.items() if etypes for batch in batches]
        questions = [self._ask(batch, ntype, of[ntype]) for batch, ntype in asked]
        for batch in batches:
            batch.hops.append({})
            batch.starts.append({})
        if questions:
            sections = [(one.batch.seeds.step, one.etypes) for one in questions]
            buffer, starts = _Drawing(self, hop, fanouts, sections).drawn(questions)
            for question in questions:
                question.take(buffer, starts)

    def _ask(self, batch: _Growing, ntype: str, etypes: list[EType]) -> _Question:
        first, last = batch.frontier[ntype]
        ids, tree = batch.nodes(ntype, first, last)
        order, rows, sizes = split(ids, self.topology.ids[ntype].bounds)
        trees = batch.seeds.trees
        if trees is not None and tree is not None:
            of = tree[order.long()]
            rows = torch.stack([rows.long(), trees.salt[of], trees.time[of]], dim=1)
        return _Question(
            batch, etypes, self.topology.is_out, first, ids, tree, order, rows, sizes, self._leases
        )

    def base(self, step: int, hop: int, etype: EType) -> int:
        """What keys the draws of one batch, hop and relation."""
        return hashed(self.draws.seed, step, hop, self.book.canonical_etypes.index(etype))


@dataclass
class _Question:
    """The edges of a batch's frontier of one node type.

    Attributes:
        first: the number of the first node of the frontier.
        ids, tree: int64 [m], of the frontier's nodes; trees if there are some.
        order, sizes: as :func:`sar.kernels.sampling.split` gives them.
        rows: by owner, as :func:`sar.kernels.sampling.draw` takes them.
        leases: give the memory of edges.
    """

    batch: _Growing
    etypes: list[EType]
    is_out: bool
    first: int
    ids: Tensor
    tree: Tensor | None
    order: Tensor
    rows: Tensor
    sizes: list[int]
    leases: Leases

    def take(self, buffer: Tensor, starts: Tensor) -> None:
        """Add what was drawn to the batch, in the order of the frontier."""
        for etype in self.etypes:
            sizes = torch.tensor(self.sizes)
            offsets, ids, eids, of = place(buffer, starts, sizes, self.order, self.leases.take)
            ids, eids, of = self._without_some(etype, ids, eids, of)
            tree = None if self.tree is None else self.tree[of]
            far = self.batch.number(etype[2 if self.is_out else 0], ids, tree, ids)
            near = of + self.first if self.first else of
            if self.batch.is_closed:
                far, near, eids = (one[far >= 0] for one in (far, near, eids))
            ends = (near, far) if self.is_out else (far, near)
            self.batch.hops[-1][etype] = Edges(*ends, eids)
            if len(near) == int(offsets[-1]) and self.first == 0 and not self.is_out:
                self.batch.starts[-1][etype] = offsets

    def _without_some(
        self, etype: EType, ids: Tensor, eids: Tensor, of: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self.batch.seeds.without:
            return ids, eids, of
        ends = (self.ids[of], ids) if self.is_out else (ids, self.ids[of])
        wrong = self.batch.is_left_out(etype, *ends)
        return (ids, eids, of) if wrong is None else (ids[~wrong], eids[~wrong], of[~wrong])


class _Drawing:
    """One hop of several batches: who owns the rows draws for all that ask.

    Args:
        sections: the step and the relations of each question, the same on all ranks.
    """

    def __init__(
        self,
        sampler: NeighborSampler,
        hop: int,
        fanouts: Mapping[EType, int],
        sections: list[tuple[int, list[EType]]],
    ) -> None:
        self.sampler, self.hop, self.sections = sampler, hop, sections
        self.fanouts, self.swap = fanouts, sampler.swap
        self.rank, self.size = self.swap.group.rank, self.swap.group.size
        followed = {etype for _, etypes in sections for etype in etypes}
        self.by_degree = any(not 0 <= fanouts[etype] <= _PADDED for etype in followed)

    def drawn(self, questions: list[_Question]) -> tuple[Tensor, Tensor]:
        """What the owners drew for this rank's questions, and where each owner's begins."""
        parts = [one.rows.split(one.sizes) for one in questions]  # by question, then by owner
        wanted = torch.tensor([one.sizes for one in questions], dtype=torch.int64)
        wanted = wanted.view(len(questions), self.size).T.contiguous()
        wanted[self.rank] = 0
        asked = self.swap.sizes(wanted)
        others = [one[p] for p in range(self.size) if p != self.rank for one in parts]
        rows = torch.cat([*others, *(one.rows[:0] for one in questions[:1])])
        came = self.swap.send(rows, wanted.sum(1).tolist(), asked.sum(1).tolist())
        by_peer = came.split(asked.sum(1).tolist())
        theirs = [rows.split(sizes) for rows, sizes in zip(by_peer, asked.tolist(), strict=True)]
        own = [one[self.rank] for one in parts]
        give = [self._room(rows) for rows in theirs]
        take = self._announced(give, parts, self._room(own))
        reply = self.sampler.sent.take(sum(give), self.sampler.dtype)
        for rows, at in zip(theirs, _starts(give), strict=True):
            self._draw(reply, at, rows)
        buffer = self.sampler.came.take(sum(take) + self._room(own), self.sampler.dtype)
        self.swap.send_much(reply, give, take, buffer[: sum(take)])
        self._draw(buffer, sum(take), own)
        starts = torch.tensor(_starts(take))
        starts[self.rank] = sum(take)
        return buffer, starts

    def _announced(self, give: list[int], parts: list[tuple[Tensor, ...]], mine: int) -> list[int]:
        """How much each owner sends; they only tell where it depends on degrees. Raises
        ``MemoryError`` on every rank where one has no memory for it."""
        if self.by_degree:
            take = self.swap.sizes(torch.tensor(give).view(-1, 1)).view(-1).tolist()
            size = self.sampler.dtype.itemsize
            nbytes = size * sum(give) + (size + _PLACED) * (sum(take) + mine)
            check_memory(nbytes, "num_neighbors: the draws of a hop")
            self.swap.meet()
            return take
        others = [p for p in range(self.size) if p != self.rank]
        rooms = {p: self._room([one[p] for one in parts]) for p in others}
        return [rooms.get(p, 0) for p in range(self.size)]

    def _room(self, parts: Sequence[Tensor]) -> int:
        """Numbers that the draws for some rows of each question take at most."""
        room = 0
        for rows, (_, etypes) in zip(parts, self.sections, strict=True):
            for etype in etypes:
                fanout = self.fanouts[etype]
                by_degree = not 0 <= fanout <= _PADDED
                most = self._drawable(etype, rows) if by_degree else fanout * len(rows)
                room += len(rows) + 2 * most
        return room

    def _drawable(self, etype: EType, rows: Tensor) -> int:
        """Edges that are drawn of some rows of this rank at most."""
        indptr, fanout = self.sampler.edges[etype].indptr, self.fanouts[etype]
        rows = (rows if rows.dim() == 1 else rows[:, 0]).long()
        degrees = indptr[rows + 1] - indptr[rows]
        if fanout >= 0 and self.sampler.draws.replace:
            return fanout * int((degrees > 0).sum())
        return int((degrees.clamp(max=fanout) if fanout >= 0 else degrees).sum())

    def _draw(self, out: Tensor, at: int, parts: Sequence[Tensor]) -> None:
        sampler, draws = self.sampler, self.sampler.draws
        for rows, (step, etypes) in zip(parts, self.sections, strict=True):
            for etype in etypes:
                edges, keys = sampler.edges[etype], sampler.keys[etype[sampler.near]]
                if self.hop == len(draws.fanouts):  # what an induced subgraph has: of any weight
                    edges = edges._replace(weight=edges.weight[:0])
                base, fanout = sampler.base(step, self.hop, etype), self.fanouts[etype]
                at = draw(out, at, edges, rows, keys, base, fanout, draws.replace, draws.last)


def _starts(sizes: list[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][:-1]
