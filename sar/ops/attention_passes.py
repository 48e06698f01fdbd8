"""The two passes of attention over a relation: the own shard, then round after round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sar.config import Policy
from sar.edges.constant import Landed
from sar.edges.relation import LOCAL, Relation
from sar.kernels import Csc, add_rows, wide_dtype
from sar.kernels.attention import (
    Columns,
    Incoming,
    Mask,
    Normalizer,
    Running,
    Scores,
    attend,
    attend_grad_additive,
    attend_grad_of_queries,
    attend_grad_of_sources,
)
from sar.kernels.attention_loops import ADDITIVE
from sar.ops.saving import spares_memory
from sar.stream import WINDOW, GradientMessages, GradientReturn, Round, Stream, fetch
from sar.stream.plan import agree_on_gradients

# Buffers of rounds that stay for the next layer; without a wire backward has two at once.
_IDLE, _IDLE_WITHOUT_WIRE = 3, 1
_WIDE = (torch.float32, torch.float64)  # what wide_dtype() leaves as it is


@dataclass(frozen=True)
class Attention:
    """One attention over a relation.

    Attributes:
        scores: kind, heads H and width D of a head.
        dropout: (seed, probability) of the weights' dropout; ``None`` for none.
        window: rounds of fetched rows in flight; one where memory counts more than time.
    """

    relation: Relation
    policy: Policy
    scores: Scores
    dropout: tuple[int, float] | None = None
    window: int = WINDOW

    @property
    def mask(self) -> Mask | None:
        if self.dropout is None:
            return None
        return Mask(self.relation.keys, *self.dropout)

    def end_pass(self) -> None:
        """Free buffers of rounds, whose rows are wide: dense layers need the memory, too."""
        group = self.relation.group
        idle = _IDLE if group.has_wire else _IDLE_WITHOUT_WIRE
        group.pool.shrink(0 if self.window == 1 else idle)

    def shards(self, num_rounds: int) -> list[Csc]:
        """The own edges, then those of each round."""
        store, order = self.relation.store, self.dropout is not None
        return [store.local(order=order), *store.shards(num_rounds, order=order)]

    def transposed(self, num_rounds: int) -> Iterator[Csc]:
        """The same edges as :meth:`shards`, by source."""
        for number in (LOCAL, num_rounds):
            order = self.dropout is not None
            yield from self.relation.store.transposed(number, self.policy, order=order)


def agreed(spec: Attention, read: Mapping[str, Tensor | None]) -> Attention:
    """The attention as it is computed now, once the ranks agree on which inputs ask for gradients.

    ``read`` maps names to values, keys (``None`` where values are the keys), and what else is read.
    """
    given = [(name, tensor) for name, tensor in read.items() if tensor is not None]
    agree_on_gradients(spec.relation.plan, given, 1 if read["keys"] is None else 2)
    return replace(spec, window=1) if spares_memory() else spec


@dataclass
class Step:
    """Source rows of one shard.

    Attributes:
        rows: values and keys: owned tensors, or those of a round side by side in one.
        round, halo: the round and the rows that came in it; ``None`` for the owned rows.
    """

    rows: Sequence[Tensor]
    round: Round | None = None
    halo: Tensor | None = None
    stream: Stream | None = None

    def free(self) -> None:
        """Drop the rows: gradients that come home may take their memory."""
        self.rows, self.halo = (), None
        if self.stream is not None:
            self.stream.free()


class Sources:
    """Values and keys of the owned rows, which travel in both passes; their gradients go home.

    ``parts`` are values and, if they are others, keys. ``kept`` is the halo of each round from the
    forward pass, where the policy keeps it. ``again`` makes the parts, where they may be let go.
    """

    travel = True  # values and keys themselves

    def __init__(
        self, spec: Attention, parts: Sequence[Tensor], kept: list[Tensor] | None = None,
        again: Callable[[], Sequence[Tensor]] | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.parts, self._again = spec, [part.contiguous() for part in parts], again
        self.kept: list[Tensor] = kept or []
        width, one = sum([part.shape[1] for part in parts]), parts[0]
        row_bytes = width * (one.element_size() + wide_dtype(one.dtype).itemsize)
        # of either pass: backward has rows and their gradients in flight
        self.num_rounds = spec.relation.plan.num_rounds(spec.policy, row_bytes)

    def rows(self) -> list[Tensor]:
        """The parts, made again where they were let go."""
        if not self.parts and self._again is not None:
            self.parts = [part.contiguous() for part in self._again()]
        return self.parts

    def let_go(self) -> None:
        """Free the parts if they can be made again."""
        if self._again is not None:
            self.parts = []

    def steps(self, window: int, ahead: bool = False, learns: bool = False) -> Iterator[Step]:
        """The owned rows, then those of each round; overwritten when the next is taken. With
        ``learns``, in a forward pass, rows are kept where the policy says so."""
        rounds = self.spec.relation.plan.rounds(self.num_rounds)
        keeps = learns and not self.kept and not self.spec.policy.rematerialize
        if self.kept:
            landed: Landed = zip(rounds, list(self.kept), strict=True)
        else:
            landed = self._landed(rounds, window, ahead, learns)
        yield Step(self.parts)
        for step in self._arrived(landed):
            if keeps and step.halo is not None:
                self.kept.append(step.halo)
            yield step

    def _landed(self, rounds: Sequence[Round], window: int, ahead: bool, learns: bool) -> Landed:
        keep = not self.spec.policy.rematerialize
        return fetch(self.spec.relation.plan, self.parts, rounds, keep, window, ahead)

    def _arrived(self, landed: Landed) -> Iterator[Step]:
        for number, halo in landed:
            step = Step([halo], number, halo, landed if isinstance(landed, Stream) else None)
            del halo  # which is freed with the step
            yield step

    def pass_on(self, step: Step, number: Round, grads: Tensor, home: GradientReturn) -> None:
        """Send the gradients of a round's rows home."""
        step.free()
        home.send(number, grads)
        home.settle()  # meanwhile the next rows travel, which may take the memory afterwards

    def with_shares(self, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors that made the rows, plus shares of halo rows: here, none."""
        return grads


def forward_in_rounds(sources: Sources, query: Tensor, weight: Tensor) -> tuple[Tensor, Normalizer]:
    """out [num_dst, H * D], and m and 1 / s, which normalize the weights."""
    spec = sources.spec
    scores, query, weight = spec.scores, widened(query), widened(weight)
    running = Running.start(len(query), scores.heads, scores.width, query)
    shards = spec.shards(sources.num_rounds)
    for step, shard in zip(sources.steps(spec.window, learns=True), shards, strict=True):
        value, key = _columns(scores, step.rows)
        attend(shard, scores, key, value, query, weight, running, spec.mask)
    spec.end_pass()
    return running.finish()


def _columns(scores: Scores, rows: Sequence[Tensor]) -> tuple[Columns, Columns]:
    """Values and keys, in the wide dtype, of owned tensors or of packed halo rows."""
    wide = list(map(widened, rows))
    value = Columns(wide[0])
    width = scores.heads * scores.width
    if len(wide) == 2:
        return value, Columns(wide[1])
    return value, Columns(wide[0], width if wide[0].shape[1] > width else 0)


def widened(tensor: Tensor) -> Tensor:
    """A tensor without history, contiguous, in the dtype that sums accumulate in."""
    rows = tensor.detach()
    return (rows if rows.dtype in _WIDE else rows.to(wide_dtype(rows.dtype))).contiguous()


class Backward:
    """One backward pass where edges end: the own shard, then rounds whose gradients go home.

    Without ``wanted``, nobody asks for gradients of the sources, and none are sent.
    """

    def __init__(
        self, sources: Sources, query: Tensor, weight: Tensor, incoming: Incoming, wanted: bool
    ) -> None:
        self.spec, self.sources, self.wanted = sources.spec, sources, wanted
        self.query, self.weight, self.incoming = widened(query), widened(weight), incoming
        wide = wide_dtype(sources.parts[0].dtype)
        self.homes = [torch.empty_like(part, dtype=wide) for part in sources.parts]
        self.additive = self.spec.scores.kind == ADDITIVE
        threads = (torch.get_num_threads(),) if self.additive else ()
        self.dquery = self.query.new_zeros((*threads, *self.query.shape))
        self.dweight = torch.zeros_like(self.weight, dtype=torch.float64)

    def run(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Gradients of the sources, of the queries and of the weight, in the wide dtype."""
        spec, sources, group = self.spec, self.sources, self.spec.relation.group
        by_dst, by_src = spec.shards(sources.num_rounds), spec.transposed(sources.num_rounds)
        own, width = self.homes[0], sum(part.shape[1] for part in self.homes)
        messages = GradientMessages(spec.relation.plan, width, own.dtype, self._add_home)
        home = GradientReturn(messages, lambda: own, 1)
        # Beside rows in use and gradients on their way, one more round is enough in flight; and
        # none where it would not travel meanwhile: ranks wait for each other's gradients anyway.
        stream = sources.steps(1, ahead=spec.window > 1 and group.has_wire)
        for step, csr, csc in zip(stream, by_src, by_dst, strict=True):
            grads = self.homes if step.round is None else [home.buffer(step.round)]
            self._shard(step.rows, csr, csc, grads)
            if step.round is not None and self.wanted:
                sources.pass_on(step, step.round, grads.pop(), home)
            elif step.round is not None:
                group.pool.give(grads.pop())
        home.finish()
        spec.end_pass()
        dquery = self.dquery.sum(0) if self.additive else self.dquery
        return self.homes, dquery, self.dweight.to(self.weight.dtype)

    def _shard(self, rows: Sequence[Tensor], csr: Csc, csc: Csc, grads: Sequence[Tensor]) -> None:
        scores, mask = self.spec.scores, self.spec.mask
        value, key = _columns(scores, rows)
        dvalue, dkey = _columns(scores, grads)
        if self.additive:
            own = (key, value, self.incoming, dkey, dvalue, self.dquery)
            attend_grad_additive(csr, scores, *own, mask)
            return
        common = (scores, key, value, self.query, self.weight, self.incoming)
        if self.wanted:
            attend_grad_of_sources(csr, *common, dkey, dvalue, mask)
        dweight = attend_grad_of_queries(csc, *common, self.dquery, mask)
        if len(self.dweight):
            self.dweight += dweight

    def _add_home(self, _: Tensor, idx: Tensor, rows: Tensor) -> None:
        parts = rows.split([home.shape[1] for home in self.homes], dim=1)
        for home, part in zip(self.homes, parts, strict=True):
            add_rows(home, idx, part)
