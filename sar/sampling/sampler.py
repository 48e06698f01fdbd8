"""Sampling by owners: the owner of a node draws its edges and sends them to ranks that ask."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sar.kernels.sampling import Csc, draw, hashed, leave_out, place, split
from sar.partition.book import EType
from sar.sampling.buffers import IDLE, BufferPool, NumberingPool, Scratch, check_memory
from sar.sampling.exchange import Exchange
from sar.sampling.sample import Frontier, GrowingSample, Sample, Seeds
from sar.sampling.topology import Topology, id_dtype

_PADDED = 64  # edges that have room in a reply whatever the degree of their node
_PLACED = 12  # bytes for each number of a reply, where its edges are put together


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
        exchange: how ranks ask each other.
        draws: the same on all ranks.
    """

    def __init__(self, topology: Topology, exchange: Exchange, draws: Draws) -> None:
        self.topology, self.exchange, self.draws = topology, exchange, draws
        self.near = 0 if topology.is_out else 2  # where a relation names the type that draws
        self.dtype, self.sent, self.came = id_dtype(topology.book), Scratch(), Scratch()
        self.pool, self._numberings = BufferPool(IDLE * len(draws.fanouts)), NumberingPool()
        self._totals = {ntype: int(one[-1]) for ntype, one in topology.bounds.items()}

    def sample(self, batches: Sequence[Seeds]) -> list[Sample]:
        """What is drawn around each of some batches of seeds; collective.

        All ranks give as many batches, of the same steps; some may have no seeds.
        """
        known = self._totals, self._numberings, self.topology.is_out
        growing = [GrowingSample(seeds, *known) for seeds in batches]
        for hop, fanouts in enumerate(self.draws.fanouts):
            self._hop(growing, hop, fanouts)
            for batch in growing:
                batch.end_hop(self.draws.again)
        if self.draws.induced:
            for batch in growing:
                batch.close()
            every = dict.fromkeys(self.topology.edges, -1)
            self._hop(growing, len(self.draws.fanouts), every)
        return [one.sample() for one in growing]

    def _hop(self, batches: list[GrowingSample], hop: int, fanouts: Mapping[EType, int]) -> None:
        for batch in batches:
            batch.begin_hop()
        questions = []
        for ntype in self.topology.book.ntypes:
            follows = [e for e in self.topology.edges if fanouts.get(e) and e[self.near] == ntype]
            for batch in batches if follows else ():
                frontier, trees = batch.frontier(ntype), batch.seeds.trees
                order, rows, sizes = split(frontier.ids, self.topology.bounds[ntype])
                if trees is not None and frontier.tree is not None:
                    of = frontier.tree[order.long()]
                    rows = torch.stack([rows.long(), trees.salt[of], trees.time[of]], dim=1)
                relations = [self._relation(e, batch.seeds.step, hop, fanouts[e]) for e in follows]
                questions.append(DrawRequest(batch, relations, frontier, order, rows, sizes))
        if questions:
            self._answer(questions)

    def _relation(self, etype: EType, step: int, hop: int, fanout: int) -> _Relation:
        edges, keys = self.topology.edges[etype], self.topology.keys[etype[self.near]]
        if hop == len(self.draws.fanouts):  # what an induced subgraph has: any weight
            edges = edges._replace(weight=edges.weight[:0])
        number = self.topology.book.canonical_etypes.index(etype)
        return _Relation(etype, edges, keys, hashed(self.draws.seed, step, hop, number), fanout)

    def _answer(self, questions: list[DrawRequest]) -> None:
        """Owners draw for all that ask; add the edges to each batch, by its frontier's order."""
        rank, size = self.exchange.group.rank, self.exchange.group.size
        parts = [one.rows.split(one.sizes) for one in questions]  # by question, then by owner
        theirs, own = self.exchange.questions(parts), [one[rank] for one in parts]
        give, mine = [self._room(rows, questions) for rows in theirs], self._room(own, questions)
        if any(not 0 <= one.fanout <= _PADDED for question in questions for one in question.of):
            take = self._announced(give, mine)
        else:
            asked = [[one[p] for one in parts] for p in range(size)]
            take = [self._room(rows, questions) for rows in asked]
            take[rank] = 0
        reply = self.sent.take(sum(give), self.dtype)
        for rows, at in zip(theirs, _starts(give), strict=True):
            self._draw(reply, at, rows, questions)
        buffer = self.came.take(sum(take) + mine, self.dtype)
        self.exchange.send(reply, give, take, buffer[: sum(take)])
        self._draw(buffer, sum(take), own, questions)
        starts = torch.tensor(_starts(take))
        starts[rank] = sum(take)
        for question in questions:
            for one in question.of:
                sizes = torch.tensor(question.sizes)
                drawn = place(buffer, starts, sizes, question.order, self.pool.take)
                question.batch.add(one.etype, question.frontier, drawn)

    def _announced(self, give: list[int], mine: int) -> list[int]:
        """How much each owner sends, where it depends on degrees. Raises ``MemoryError`` on every
        rank where one has no memory for it."""
        take = self.exchange.sizes(torch.tensor(give).view(-1, 1)).view(-1).tolist()
        nbytes = self.dtype.itemsize * (sum(give) + sum(take) + mine)
        check_memory(nbytes + _PLACED * (sum(take) + mine), "num_neighbors: the draws of a hop")
        self.exchange.meet()
        return take

    def _room(self, parts: Sequence[Tensor], questions: list[DrawRequest]) -> int:
        """How many numbers the draws for some rows of each question take at most."""
        room = 0
        for rows, question in zip(parts, questions, strict=True):
            for one in question.of:
                fanout, most = one.fanout, one.fanout * len(rows)
                if not 0 <= fanout <= _PADDED:  # rows of this rank
                    near = (rows if rows.dim() == 1 else rows[:, 0]).long()
                    degrees = one.edges.indptr[near + 1] - one.edges.indptr[near]
                    if fanout >= 0 and self.draws.replace:
                        degrees = torch.where(degrees > 0, fanout, 0)
                    most = int((degrees.clamp(max=fanout) if fanout >= 0 else degrees).sum())
                room += len(rows) + 2 * most
        return room

    def _draw(
        self, out: Tensor, at: int, parts: Sequence[Tensor], questions: list[DrawRequest]
    ) -> None:
        how, rank = (self.draws.replace, self.draws.last), self.exchange.group.rank
        for rows, question in zip(parts, questions, strict=True):
            for one in question.of:
                begin, without = at, question.batch.seeds.without.get(one.etype)
                at = draw(out, at, one.edges, rows, one.keys, one.base, one.fanout, *how)
                if without is not None and len(without):
                    near = rows if rows.dim() == 1 else rows[:, 0]
                    near = near.long() + self.topology.bounds[one.etype[self.near]][rank]
                    total = self._totals[one.etype[2]]
                    at = leave_out(out, begin, at, near, without, total, self.topology.is_out)


class _Relation(NamedTuple):
    """A relation's edges on this rank; nodes' keys and ``base`` key their draws."""

    etype: EType
    edges: Csc
    keys: Tensor
    base: int
    fanout: int


class DrawRequest(NamedTuple):
    """A request for edges of some relations, from a batch's frontier of one node type. Rows are by
    owner, see :func:`sar.kernels.sampling.split` and :func:`sar.kernels.sampling.draw`; all ranks
    have the same questions, by steps and relations, in the same order."""

    batch: GrowingSample
    of: list[_Relation]
    frontier: Frontier
    order: Tensor
    rows: Tensor
    sizes: list[int]


def _starts(sizes: list[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][:-1]
