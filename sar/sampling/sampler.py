"""Sampling by owners: who owns a node draws its in-edges, and sends them to who asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sar.kernels.sampling import Csc, Numbering, draw, hashed, place, split
from sar.partition.book import EType
from sar.partition.load import PartitionData
from sar.sampling.structure import id_dtype, in_edges, node_ids
from sar.sampling.swap import Swap

Fanouts = Sequence[Mapping[EType, int]]


class Edges(NamedTuple):
    """Drawn edges of one relation: local numbers of both ends, and the edges' ids; int64 [e]."""

    src: Tensor
    dst: Tensor
    eid: Tensor


@dataclass
class Sample:
    """What was drawn around some seeds, in local numbers: seeds first, then as they came.

    Attributes:
        nodes: per node type, int64 [n] ids of the nodes, as
            :func:`sar.sampling.structure.node_ids` numbers them.
        hops: per hop and relation that it follows, the edges that were drawn.
        num_nodes: per node type, how many nodes are seeds, and how many came with each hop.
    """

    nodes: dict[str, Tensor]
    hops: list[dict[EType, Edges]]
    num_nodes: dict[str, list[int]]


class _Growing:
    """A sample that grows, hop by hop.

    Attributes:
        step: what keys its draws.
        frontier: per node type, the numbers of the nodes whose edges are drawn next.
    """

    def __init__(self, seeds: Mapping[str, Tensor], step: int, ntypes: Sequence[str]) -> None:
        self.step, self.hops = step, list[dict[EType, Edges]]()
        self.numbers = {ntype: Numbering() for ntype in ntypes}
        for ntype, ids in seeds.items():
            self.numbers[ntype].number(ids)
        counts = {ntype: one.count for ntype, one in self.numbers.items()}
        self.frontier = {ntype: (0, count) for ntype, count in counts.items()}
        self.num_nodes = {ntype: [count] for ntype, count in counts.items()}

    def end_hop(self, again: bool) -> None:
        """What came with this hop is what is followed next; ``again``: and all before it."""
        for ntype, one in self.numbers.items():
            first = sum(self.num_nodes[ntype])
            self.num_nodes[ntype].append(one.count - first)
            self.frontier[ntype] = (0 if again else first, one.count)

    def sample(self) -> Sample:
        nodes = {ntype: one.nodes() for ntype, one in self.numbers.items()}
        return Sample(nodes, self.hops, self.num_nodes)


class NeighborSampler:
    """Draws in-edges, hop by hop, of nodes that any rank may own; made collectively.

    Draws are a function of (seed, step, hop, relation, the node's key): P ranks with some seeds
    each draw what one process draws for all of them.

    Args:
        data: this rank's part.
        swap: how ranks ask each other.
        fanouts: for each hop, how many in-edges of each relation; -1: all; a relation that is
            missing is not followed.
        replace: draw with replacement.
        weight_attr: the edge feature that chances are in proportion to.
        again: draw the edges of all nodes at every hop, as DGL's blocks want it; else of those that
            came with the hop before, as PyG does.
        seed: of all draws, the same on all ranks.

    Raises ``ValueError`` on every rank for weights that do not fit.
    """

    def __init__(
        self,
        data: PartitionData,
        swap: Swap,
        fanouts: Fanouts,
        *,
        replace: bool = False,
        weight_attr: str | None = None,
        again: bool = False,
        seed: int = 0,
    ) -> None:
        self.data, self.fanouts, self.replace, self.again = data, fanouts, replace, again
        self.seed, self._swap, self._dtype = seed, swap, id_dtype(data.book)
        book = data.book
        self._etypes = [e for e in book.canonical_etypes if any(hop.get(e) for hop in fanouts)]
        self._keys = {ntype: data.keys.nodes(ntype) for ntype in book.ntypes}
        self._in_edges, error = dict[EType, Csc](), None
        try:
            for etype in self._etypes:
                self._in_edges[etype] = in_edges(data, etype, weight_attr)
        except Exception as caught:  # any, too little memory as well: the others would wait
            error = caught
        swap.group.agree(error, "NeighborLoader")
        self._ids = {ntype: node_ids(book, ntype) for ntype in book.ntypes}

    def sample(self, seeds: Sequence[Mapping[str, Tensor]], steps: Sequence[int]) -> list[Sample]:
        """What is drawn around each of some batches of seeds; collective.

        Args:
            seeds: of each batch, by node type, int64 ids that do not repeat; all ranks give as many
                batches, some of which may be empty.
            steps: the number of each batch, the same on all ranks.
        """
        ntypes = self.data.book.ntypes
        growing = [_Growing(one, step, ntypes) for one, step in zip(seeds, steps, strict=True)]
        for hop, fanouts in enumerate(self.fanouts):
            self._hop(growing, hop, fanouts)
        return [one.sample() for one in growing]

    def _hop(self, batches: list[_Growing], hop: int, fanouts: Mapping[EType, int]) -> None:
        followed = [etype for etype in self._etypes if fanouts.get(etype)]
        into = {n: [etype for etype in followed if etype[2] == n] for n in self.data.book.ntypes}
        asked = [(batch, n) for n, etypes in into.items() if etypes for batch in batches]
        questions = [self._ask(batch, ntype, into[ntype]) for batch, ntype in asked]
        drawing = _Drawing(self, hop, fanouts, [(one.batch.step, one.etypes) for one in questions])
        buffer, starts = drawing.drawn([one.rows.split(one.sizes) for one in questions])
        for batch in batches:
            batch.hops.append({})
        for question in questions:
            question.take(buffer, starts)
        for batch in batches:
            batch.end_hop(self.again)

    def _ask(self, batch: _Growing, ntype: str, etypes: list[EType]) -> _Question:
        first, last = batch.frontier[ntype]
        ids = batch.numbers[ntype].nodes(first)[: last - first]
        return _Question(batch, etypes, first, *split(ids, self._ids[ntype].bounds))

    def base(self, step: int, hop: int, etype: EType) -> int:
        """What keys the draws of one batch, hop and relation."""
        return hashed(self.seed, step, hop, self.data.book.canonical_etypes.index(etype))


@dataclass
class _Question:
    """The in-edges of a batch's frontier of one node type.

    Attributes:
        first: the number of the first node of the frontier.
        order, rows, sizes: as :func:`sar.kernels.sampling.split` gives them.
    """

    batch: _Growing
    etypes: list[EType]
    first: int
    order: Tensor
    rows: Tensor
    sizes: list[int]

    def take(self, buffer: Tensor, starts: Tensor) -> None:
        """Add what was drawn to the batch, in the order of the frontier."""
        for etype in self.etypes:
            offsets, ids, eids = place(buffer, starts, torch.tensor(self.sizes), self.order)
            src = self.batch.numbers[etype[0]].number(ids)
            dst = torch.arange(len(self.order)).repeat_interleave(offsets.diff()) + self.first
            self.batch.hops[-1][etype] = Edges(src, dst, eids)


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
        self.sampler, self.hop, self.fanouts, self.sections = sampler, hop, fanouts, sections
        self.swap = sampler._swap
        self.rank, self.size = self.swap.group.rank, self.swap.group.size

    def drawn(self, rows: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        """What the owners drew for this rank's questions, and where each owner's begins.

        Args:
            rows: of each question, by owner, int32.
        """
        wanted = torch.tensor([[len(one) for one in parts] for parts in rows], dtype=torch.int64)
        wanted = wanted.view(len(rows), self.size).T.contiguous()
        own = [parts[self.rank] for parts in rows]
        wanted[self.rank] = 0
        asked = self.swap.sizes(wanted)
        ids = [parts[p] for p in range(self.size) if p != self.rank for parts in rows]
        empty = torch.empty(0, dtype=torch.int32)
        came = self.swap.send(
            torch.cat([empty, *ids]), wanted.sum(1).tolist(), asked.sum(1).tolist()
        )
        theirs = [
            peer.split(a.tolist()) for peer, a in zip(came.split(asked.sum(1).tolist()), asked)
        ]
        give = [self._room(parts) for parts in theirs]
        take = self._announced(give, wanted, rows)
        reply = torch.empty(sum(give), dtype=self.sampler._dtype)
        at = 0
        for room, parts in zip(give, theirs, strict=True):
            self._draw(reply, at, parts)
            at += room
        buffer = torch.empty(sum(take) + self._room(own), dtype=self.sampler._dtype)
        self.swap.send(reply, give, take, buffer[: sum(take)])
        self._draw(buffer, sum(take), own)
        starts = torch.tensor([0, *take]).cumsum(0)[:-1]
        starts[self.rank] = sum(take)
        return buffer, starts

    def _announced(
        self, give: list[int], wanted: Tensor, rows: list[tuple[Tensor, ...]]
    ) -> list[int]:
        """How much each owner sends; they only tell where it depends on degrees."""
        if any(self.fanouts[etype] < 0 for _, etypes in self.sections for etype in etypes):
            return self.swap.sizes(torch.tensor(give).view(-1, 1)).view(-1).tolist()
        others = [parts for parts in zip(*rows, strict=True)] or [()] * self.size
        return [0 if p == self.rank else self._room(others[p]) for p in range(self.size)]

    def _room(self, parts: Sequence[Tensor]) -> int:
        """Numbers that the draws for some rows of each question take at most."""
        room = 0
        for rows, (_, etypes) in zip(parts, self.sections, strict=True):
            for etype in etypes:
                fanout = self.fanouts[etype]
                room += len(rows) + 2 * (fanout * len(rows) if fanout >= 0 else
                                         self._degrees(etype, rows))  # fmt: skip
        return room

    def _degrees(self, etype: EType, rows: Tensor) -> int:
        indptr, rows = self.sampler._in_edges[etype].indptr, rows.long()
        return int((indptr[rows + 1] - indptr[rows]).sum())

    def _draw(self, out: Tensor, at: int, parts: Sequence[Tensor]) -> None:
        sampler = self.sampler
        for rows, (step, etypes) in zip(parts, self.sections, strict=True):
            for etype in etypes:
                edges, keys = sampler._in_edges[etype], sampler._keys[etype[2]]
                base, fanout = sampler.base(step, self.hop, etype), self.fanouts[etype]
                at = draw(out, at, edges, rows, keys, base, fanout, sampler.replace)
