"""Sampling by owners: who owns a node draws its in-edges, and sends them to who asked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sar.kernels.sampling import Csc, Numbering, draw, hashed, place, split
from sar.partition.book import EType
from sar.partition.load import PartitionData
from sar.sampling.structure import id_dtype, node_ids
from sar.sampling.swap import Swap


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
        ids: per node type, int64; without trees they do not repeat.
        step: the number of the batch, the same on all ranks.
    """

    ids: Mapping[str, Tensor]
    step: int
    trees: Trees | None = None


@dataclass
class Sample:
    """What was drawn around some seeds, in local numbers: seeds first, then as they came.

    Attributes:
        nodes: per node type, int64 [n] ids of the nodes, as
            :func:`sar.sampling.structure.node_ids` numbers them.
        trees: per node type, int64 [n] the tree of each node; empty where there are none.
        hops: per hop and relation that it follows, the edges that were drawn.
        num_nodes: per node type, how many nodes are seeds, and how many came with each hop.
    """

    nodes: dict[str, Tensor]
    trees: dict[str, Tensor]
    hops: list[dict[EType, Edges]]
    num_nodes: dict[str, list[int]]


class _Growing:
    """A sample that grows, hop by hop.

    A node of tree t is known by the number t x nodes of its type + its id.

    Args:
        totals: per node type, how many nodes there are.

    Attributes:
        frontier: per node type, the numbers of the nodes whose edges are drawn next.
    """

    def __init__(self, seeds: Seeds, totals: dict[str, int]) -> None:
        self.seeds, self._totals = seeds, totals
        self.hops = list[dict[EType, Edges]]()
        self.numbers = {ntype: Numbering() for ntype in totals}
        for ntype, ids in seeds.ids.items():
            self.number(ntype, ids, None if seeds.trees is None else seeds.trees.of[ntype])
        counts = {ntype: one.count for ntype, one in self.numbers.items()}
        self.frontier = {ntype: (0, count) for ntype, count in counts.items()}
        self.num_nodes = {ntype: [count] for ntype, count in counts.items()}

    def number(self, ntype: str, ids: Tensor, tree: Tensor | None) -> Tensor:
        """The local numbers of nodes."""
        known = ids if tree is None else ids + tree * self._totals[ntype]
        return self.numbers[ntype].number(known)

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
        found = {ntype: self.nodes(ntype, 0, one.count) for ntype, one in self.numbers.items()}
        nodes = {ntype: ids for ntype, (ids, _) in found.items()}
        trees = {ntype: tree for ntype, (_, tree) in found.items() if tree is not None}
        return Sample(nodes, trees, self.hops, self.num_nodes)


@dataclass(frozen=True)
class Draws:
    """How in-edges are drawn.

    Attributes:
        fanouts: for each hop, how many in-edges of each relation; -1: all; a relation that is
            missing is not followed.
        replace: with replacement.
        last: the latest edges, instead of any up to the time of a tree.
        again: those of all nodes at every hop, as DGL's blocks want it; else of those that came
            with the hop before, as PyG does.
        seed: of all draws, the same on all ranks.
    """

    fanouts: Sequence[Mapping[EType, int]]
    replace: bool = False
    last: bool = False
    again: bool = False
    seed: int = 0


class NeighborSampler:
    """Draws in-edges, hop by hop, of nodes that any rank may own.

    Draws are a function of (seed, step, hop, relation, the node's key, the tree's salt): P ranks
    with some seeds each draw what one process draws for all of them.

    Args:
        data: this rank's part.
        edges: of each relation that is followed, as :func:`sar.sampling.structure.in_edges` gives
            them.
        swap: how ranks ask each other.
        draws: the same on all ranks.
    """

    def __init__(
        self, data: PartitionData, edges: Mapping[EType, Csc], swap: Swap, draws: Draws
    ) -> None:
        book = data.book
        self.book, self.draws, self.edges, self.swap = book, draws, edges, swap
        self.dtype = id_dtype(book)
        self.keys = {ntype: data.keys.nodes(ntype) for ntype in book.ntypes}
        self._ids = {ntype: node_ids(book, ntype) for ntype in book.ntypes}
        self._totals = {ntype: ids.total for ntype, ids in self._ids.items()}

    def sample(self, batches: Sequence[Seeds]) -> list[Sample]:
        """What is drawn around each of some batches of seeds; collective.

        All ranks give as many batches, of the same steps; some may have no seeds.
        """
        growing = [_Growing(seeds, self._totals) for seeds in batches]
        for hop in range(len(self.draws.fanouts)):
            self._hop(growing, hop)
        return [one.sample() for one in growing]

    def _hop(self, batches: list[_Growing], hop: int) -> None:
        followed = [etype for etype in self.edges if self.draws.fanouts[hop].get(etype)]
        into = {n: [etype for etype in followed if etype[2] == n] for n in self.book.ntypes}
        asked = [(batch, n) for n, etypes in into.items() if etypes for batch in batches]
        questions = [self._ask(batch, ntype, into[ntype]) for batch, ntype in asked]
        for batch in batches:
            batch.hops.append({})
        if questions:
            sections = [(one.batch.seeds.step, one.etypes) for one in questions]
            buffer, starts = _Drawing(self, hop, sections).drawn(questions)
            for question in questions:
                question.take(buffer, starts)
        for batch in batches:
            batch.end_hop(self.draws.again)

    def _ask(self, batch: _Growing, ntype: str, etypes: list[EType]) -> _Question:
        first, last = batch.frontier[ntype]
        ids, tree = batch.nodes(ntype, first, last)
        order, rows, sizes = split(ids, self._ids[ntype].bounds)
        trees = batch.seeds.trees
        if trees is not None and tree is not None:
            of = tree[order.long()]
            rows = torch.stack([rows.long(), trees.salt[of], trees.time[of]], dim=1)
        return _Question(batch, etypes, first, tree, order, rows, sizes)

    def base(self, step: int, hop: int, etype: EType) -> int:
        """What keys the draws of one batch, hop and relation."""
        return hashed(self.draws.seed, step, hop, self.book.canonical_etypes.index(etype))


@dataclass
class _Question:
    """The in-edges of a batch's frontier of one node type.

    Attributes:
        first: the number of the first node of the frontier.
        tree: int64 [m], of the frontier's nodes, if there are trees.
        order, sizes: as :func:`sar.kernels.sampling.split` gives them.
        rows: by owner, as :func:`sar.kernels.sampling.draw` takes them.
    """

    batch: _Growing
    etypes: list[EType]
    first: int
    tree: Tensor | None
    order: Tensor
    rows: Tensor
    sizes: list[int]

    def take(self, buffer: Tensor, starts: Tensor) -> None:
        """Add what was drawn to the batch, in the order of the frontier."""
        for etype in self.etypes:
            offsets, ids, eids = place(buffer, starts, torch.tensor(self.sizes), self.order)
            counts = offsets.diff()
            tree = None if self.tree is None else self.tree.repeat_interleave(counts)
            src = self.batch.number(etype[0], ids, tree)
            dst = torch.arange(len(counts)).repeat_interleave(counts) + self.first
            self.batch.hops[-1][etype] = Edges(src, dst, eids)


class _Drawing:
    """One hop of several batches: who owns the rows draws for all that ask.

    Args:
        sections: the step and the relations of each question, the same on all ranks.
    """

    def __init__(
        self, sampler: NeighborSampler, hop: int, sections: list[tuple[int, list[EType]]]
    ) -> None:
        self.sampler, self.hop, self.sections = sampler, hop, sections
        self.fanouts, self.swap = sampler.draws.fanouts[hop], sampler.swap
        self.rank, self.size = self.swap.group.rank, self.swap.group.size

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
        take = self._announced(give, parts)
        reply = torch.empty(sum(give), dtype=self.sampler.dtype)
        for rows, at in zip(theirs, _starts(give), strict=True):
            self._draw(reply, at, rows)
        buffer = torch.empty(sum(take) + self._room(own), dtype=self.sampler.dtype)
        self.swap.send(reply, give, take, buffer[: sum(take)])
        self._draw(buffer, sum(take), own)
        starts = torch.tensor(_starts(take))
        starts[self.rank] = sum(take)
        return buffer, starts

    def _announced(self, give: list[int], parts: list[tuple[Tensor, ...]]) -> list[int]:
        """How much each owner sends; they only tell where it depends on degrees."""
        if any(self.fanouts[etype] < 0 for _, etypes in self.sections for etype in etypes):
            return self.swap.sizes(torch.tensor(give).view(-1, 1)).view(-1).tolist()
        others = [p for p in range(self.size) if p != self.rank]
        rooms = {p: self._room([one[p] for one in parts]) for p in others}
        return [rooms.get(p, 0) for p in range(self.size)]

    def _room(self, parts: Sequence[Tensor]) -> int:
        """Numbers that the draws for some rows of each question take at most."""
        room = 0
        for rows, (_, etypes) in zip(parts, self.sections, strict=True):
            for etype in etypes:
                fanout = self.fanouts[etype]
                most = fanout * len(rows) if fanout >= 0 else self._degrees(etype, rows)
                room += len(rows) + 2 * most
        return room

    def _degrees(self, etype: EType, rows: Tensor) -> int:
        indptr = self.sampler.edges[etype].indptr
        rows = (rows if rows.dim() == 1 else rows[:, 0]).long()
        return int((indptr[rows + 1] - indptr[rows]).sum())

    def _draw(self, out: Tensor, at: int, parts: Sequence[Tensor]) -> None:
        sampler, draws = self.sampler, self.sampler.draws
        for rows, (step, etypes) in zip(parts, self.sections, strict=True):
            for etype in etypes:
                edges, keys = sampler.edges[etype], sampler.keys[etype[2]]
                base, fanout = sampler.base(step, self.hop, etype), self.fanouts[etype]
                at = draw(out, at, edges, rows, keys, base, fanout, draws.replace, draws.last)


def _starts(sizes: list[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][:-1]
