"""The two passes of attention over a relation: the own shard, then round after round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sar.config import Policy
from sar.edges.constant import constant_halo
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


class Made(Protocol):
    """What makes values and keys of halo rows that travel instead of these.

    Attributes:
        given: the owned rows as the caller has them; rows: the same, contiguous.
        matrix: whose length is the number of columns that are made.
    """

    given: Tensor
    rows: Tensor
    matrix: Tensor

    def project(self, halo: Tensor, out: Tensor) -> None:
        """``out`` becomes values and keys, side by side, of halo rows."""

    def add_grads(self, halo: Tensor, grads: Tensor) -> None:
        """Take in the gradients, alike, of what :meth:`project` computed."""


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
        """The dropout with the keys of the local edges."""
        if self.dropout is None:
            return None
        return Mask(self.relation.keys, *self.dropout)

    def end_pass(self) -> None:
        """Let buffers of rounds go, whose rows are wide: dense layers need the memory, too."""
        group = self.relation.group
        idle = _IDLE if group.has_wire else _IDLE_WITHOUT_WIRE
        group.pool.shrink(0 if self.window == 1 else idle)

    def num_rounds(self, sources: Sequence[Tensor]) -> int:
        """Rounds of either pass: backward has rows and their gradients in flight."""
        width, one = sum([part.shape[1] for part in sources]), sources[0]
        row_bytes = width * (one.element_size() + wide_dtype(one.dtype).itemsize)
        return self.relation.plan.num_rounds(self.policy, row_bytes)

    def shards(self, num_rounds: int) -> list[Csc]:
        """The own edges, then those of each round."""
        relation, order = self.relation, self.dropout is not None
        return [relation.local(order=order), *relation.shards(num_rounds, order=order)]

    def transposed(self, num_rounds: int) -> Iterator[Csc]:
        """Like :meth:`shards`, by source."""
        for number in (LOCAL, num_rounds):
            order = self.dropout is not None
            yield from self.relation.transposed(number, self.policy, order=order)


def agreed(spec: Attention, read: Mapping[str, Tensor | None]) -> Attention:
    """The attention as it is computed now, after the ranks have agreed what asks for gradients.

    Args:
        read: values, keys where they are others, then what else is read, or rows like them.
    """
    given = [(name, tensor) for name, tensor in read.items() if tensor is not None]
    agree_on_gradients(spec.relation.plan, given, 1 if read["keys"] is None else 2)
    return replace(spec, window=1) if spares_memory() else spec


def attention_forward(
    spec: Attention,
    sources: Sequence[Tensor],
    query: Tensor,
    weight: Tensor,
    made: Made | None = None,
) -> tuple[Tensor, Normalizer, list[Tensor]]:
    """(out [num_dst, H * D], what normalizes weights, the halo of each round if it is kept).

    Args:
        sources: owned values and, if they are others, keys.
        made: what makes values and keys of halo rows where other rows travel.
    """
    scores, mask = spec.scores, spec.mask
    query, weight = widened(query), widened(weight)
    running = Running.start(len(query), scores.heads, scores.width, query)
    num_rounds, kept = spec.num_rounds(sources), []
    shards = spec.shards(num_rounds)
    stream = _stream(spec, sources, num_rounds, made, window=spec.window, may_keep=True)
    for step, shard in zip(stream, shards, strict=True):
        value, key = _columns(scores, step.rows)
        attend(shard, scores, key, value, query, weight, running, mask)
        if step.halo is not None and not spec.policy.rematerialize:
            kept.append(step.halo)
    spec.end_pass()
    return *running.finish(), kept


@dataclass
class _Step:
    """Source rows of one shard.

    Attributes:
        rows: values and keys: owned tensors, or those of a round side by side in one.
        round, halo: of a round, and what came; ``None`` for the owned rows.
        stream: where the halo comes from.
    """

    rows: Sequence[Tensor]
    round: Round | None = None
    halo: Tensor | None = None
    stream: Stream | None = None

    def free(self) -> None:
        """The rows are used: gradients that come home may take the memory of those that came."""
        self.rows, self.halo = (), None
        if self.stream is not None:
            self.stream.free()


def _stream(
    spec: Attention,
    sources: Sequence[Tensor],
    num_rounds: int,
    made: Made | None,
    kept: Sequence[Tensor] = (),
    window: int = WINDOW,
    ahead: bool = False,
    may_keep: bool = False,
) -> Iterator[_Step]:
    """The owned rows, then those of each round; overwritten when the next is taken."""
    plan, policy, pool = spec.relation.plan, spec.policy, spec.relation.group.pool
    rounds = plan.rounds(num_rounds)
    sent = sources if made is None else [made.rows]

    def begin() -> Stream:
        return fetch(plan, sent, rounds, not policy.rematerialize, window, ahead)

    landed: Iterator[tuple[Round, Tensor]]
    if kept:
        landed = zip(rounds, kept, strict=True)
    elif made is None:
        landed = begin()
    else:
        landed = constant_halo(spec.relation, made.given, rounds, policy, may_keep, begin)
    yield _Step(sources)
    for step, halo in landed:
        if made is None:
            taken = _Step([halo], step, halo, landed if isinstance(landed, Stream) else None)
            del halo  # which is freed with the step
            yield taken
            continue
        shape = (len(halo), len(made.matrix))
        rows = pool.take(shape, halo.dtype, halo.device, step.most)
        made.project(halo, rows)
        yield _Step([rows], step, halo)
        pool.give(rows)


def _columns(scores: Scores, rows: Sequence[Tensor]) -> tuple[Columns, Columns]:
    """Values and keys of owned tensors or of packed halo rows, in the wide dtype."""
    wide = list(map(widened, rows))
    value = Columns(wide[0])
    width = scores.heads * scores.width
    if len(wide) == 2:
        return value, Columns(wide[1])
    return value, Columns(wide[0], width if wide[0].shape[1] > width else 0)


def widened(tensor: Tensor) -> Tensor:
    """The values of a tensor in the dtype to accumulate in, contiguous."""
    rows = tensor.detach()
    return (rows if rows.dtype in _WIDE else rows.to(wide_dtype(rows.dtype))).contiguous()


class Backward:
    """One backward pass: the own shard, then round by round with gradients sent home.

    Args:
        wanted: whether anybody asks for gradients of the sources; without, none are sent.
        made: what makes values and keys of halo rows where other rows travel.
    """

    def __init__(
        self, spec: Attention, sources: Sequence[Tensor], query: Tensor, weight: Tensor,
        incoming: Incoming, wanted: bool, made: Made | None,
    ) -> None:  # fmt: skip
        self.spec, self.sources, self.wanted = spec, sources, wanted
        self.made = made
        self.query, self.weight = widened(query), widened(weight)
        self.incoming = incoming
        wide = wide_dtype(sources[0].dtype)
        self.homes = [torch.empty_like(part, dtype=wide) for part in sources]
        self.additive = spec.scores.kind == ADDITIVE
        threads = (torch.get_num_threads(),) if self.additive else ()
        self.dquery = self.query.new_zeros((*threads, *self.query.shape))
        self.dweight = torch.zeros_like(self.weight, dtype=torch.float64)

    def run(self, kept: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
        """Gradients of the sources, of the queries and of the weight, in the wide dtype."""
        spec, num_rounds = self.spec, self.spec.num_rounds(self.sources)
        by_dst = spec.shards(num_rounds)
        home = self._home()
        # Beside rows in use and gradients on their way, one more round is enough in flight; and
        # none where it would not travel meanwhile: ranks wait for each other's gradients anyway.
        ahead = spec.window > 1 and spec.relation.group.has_wire
        stream = _stream(spec, self.sources, num_rounds, self.made, kept, 1, ahead)
        for step, csr, csc in zip(stream, spec.transposed(num_rounds), by_dst, strict=True):
            grads = self.homes if step.round is None else [home.buffer(step.round)]
            self._shard(step.rows, csr, csc, grads)
            if step.round is not None:
                self._pass_on(home, step, grads.pop())
        home.finish()
        spec.end_pass()
        dquery = self.dquery.sum(0) if self.additive else self.dquery
        return self.homes, dquery, self.dweight.to(self.weight.dtype)

    def _home(self) -> GradientReturn:
        spec, own, width = self.spec, self.homes[0], sum(part.shape[1] for part in self.sources)
        messages = GradientMessages(spec.relation.plan, width, own.dtype, self._add_home)
        return GradientReturn(messages, lambda: own, 1)

    def _pass_on(self, home: GradientReturn, step: _Step, grads: Tensor) -> None:
        """Gradients of a round's rows go home, or into those of what the rows were made with."""
        if self.wanted and self.made is None and step.round is not None:
            number = step.round
            step.free()
            home.send(number, grads)
            home.settle()  # meanwhile the next rows travel, which may take the memory afterwards
            return
        if self.wanted and self.made is not None and step.halo is not None:
            self.made.add_grads(step.halo, grads)
        self.spec.relation.group.pool.give(grads)

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
