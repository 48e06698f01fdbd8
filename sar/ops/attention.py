"""Attention over the edges into each destination, streamed; scores and weights never stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor
from torch.autograd import Function

from sar.comm import WINDOW, GradientReturn, Round, fetch
from sar.config import Policy
from sar.kernels import Csc, add_rows, wide_dtype
from sar.kernels.attention import (
    Columns,
    Incoming,
    Mask,
    Normalizer,
    Running,
    Scores,
    add_projected_grads,
    attend,
    attend_grad_additive,
    attend_grad_of_queries,
    attend_grad_of_sources,
)
from sar.kernels.attention_loops import ADDITIVE
from sar.ops.boundary import refuse_sampling
from sar.ops.first_order import first_order
from sar.ops.relation import Relation
from sar.ops.saving import spares_memory
from sar.ops.shard_store import LOCAL
from sar.ops.wanted import agree_wanted

_IDLE = 3  # buffers of rounds that stay for the next layer


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
        self.relation.group.pool.shrink(0 if self.window == 1 else _IDLE)

    def num_rounds(self, sources: Sequence[Tensor]) -> int:
        """Rounds of either pass: backward has rows and their gradients in flight."""
        sizes = [(part, part.element_size() + wide_dtype(part.dtype).itemsize) for part in sources]
        row_bytes = sum(part.shape[1] * size for part, size in sizes)
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


@dataclass(frozen=True)
class Projection:
    """Keys or queries that are ``(value * vector)`` summed over each head's columns.

    Note [Projected scores]. Gradients of such keys and queries are those of the values and of the
    vector: attention adds them there in one pass and returns none for the scores, so that autograd
    has nothing to compute on that way. It does so only if the scores are gone by then: nobody can
    ask for their gradient.

    Attributes:
        vector: H * D numbers of any shape, a leaf.
        scores: the keys or queries as the layer made them.
    """

    vector: Tensor
    scores: ReferenceType[Tensor]


def attention(
    spec: Attention,
    value: Tensor,
    key: Tensor | None,
    query: Tensor,
    weight: Tensor | None,
    projections: Mapping[str, Projection | None] = MappingProxyType({}),
) -> Tensor:
    """o_i = sum over edges e = (j -> i) of a_e v_j with a = softmax of scores; collective.

    The scores are those of :mod:`sar.kernels.attention`.

    Args:
        value: [num_src, H * D] owned rows, float32, float64 or bfloat16.
        key: [num_src, H] for additive scores, else [num_src, H * D]; ``None``: the values are the
            keys.
        query: [num_dst, H] for additive scores, else [num_dst, H * D].
        weight: [H * D] of mixed scores.
        projections: of additive scores, what ``"key"`` and ``"query"`` are where that is known.

    Returns:
        [num_dst, H * D] in the dtype of ``value``; 0 where no edge ends.
    """
    refuse_sampling(spec.policy, "attention")
    named = {"values": value, "keys": key, "queries": query, "weight": weight}
    given = [(name, tensor) for name, tensor in named.items() if tensor is not None]
    agree_wanted(spec.relation.plan, given, 1 if key is None else 2)
    if spares_memory():
        spec = replace(spec, window=1)
    known = [projections.get(name) for name in ("key", "query")]
    vectors = [None if one is None else one.vector for one in known]
    scores = [None if one is None else one.scores for one in known]
    return _Attention.apply(spec, value, key, query, weight, scores, *vectors)


def attention_forward(
    spec: Attention, sources: Sequence[Tensor], query: Tensor, weight: Tensor
) -> tuple[Tensor, Normalizer, list[Tensor]]:
    """(out [num_dst, H * D], what normalizes weights, the halo of each round if it is kept)."""
    scores, mask = spec.scores, spec.mask
    query, weight = _wide(query), _wide(weight)
    running = Running.start(len(query), scores.heads, scores.width, query)
    shards = spec.shards(spec.num_rounds(sources))
    kept = []
    for (step, rows), shard in zip(_stream(spec, sources), shards, strict=True):
        value, key = _columns(scores, rows)
        attend(shard, scores, key, value, query, weight, running, mask)
        if step is not None and not spec.policy.rematerialize:
            kept.append(rows[0])
    spec.end_pass()
    return *running.finish(), kept


def _stream(
    spec: Attention, sources: Sequence[Tensor], kept: Sequence[Tensor] = ()
) -> Iterator[tuple[Round | None, Sequence[Tensor]]]:
    """The owned rows (round ``None``), then each round with its halo rows."""
    plan = spec.relation.plan
    rounds = plan.rounds(spec.num_rounds(sources))
    if kept:
        halos: Iterator[tuple[Round, Tensor]] = zip(rounds, kept, strict=True)
    else:
        policy = spec.policy
        halos = fetch(plan, sources, rounds, not policy.rematerialize, policy.lossy, spec.window)
    yield None, sources
    for step, halo in halos:
        yield step, [halo]


def _columns(scores: Scores, rows: Sequence[Tensor]) -> tuple[Columns, Columns]:
    """Values and keys of owned tensors or of packed halo rows, in the wide dtype."""
    wide = [_wide(part) for part in rows]
    value = Columns(wide[0])
    width = scores.heads * scores.width
    if len(wide) == 2:
        return value, Columns(wide[1])
    return value, Columns(wide[0], width if wide[0].shape[1] > width else 0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(wide_dtype(tensor.dtype)).contiguous()


class _Backward:
    """One backward pass: the own shard, then round by round with gradients sent home.

    Args:
        wanted: whether anybody asks for gradients of the sources; without, none are sent.
    """

    def __init__(
        self, spec: Attention, sources: Sequence[Tensor], query: Tensor, weight: Tensor,
        incoming: Incoming, wanted: bool,
    ) -> None:  # fmt: skip
        self.spec, self.sources, self.wanted = spec, sources, wanted
        self.query, self.weight = _wide(query), _wide(weight)
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
        home, pool = self._home(), spec.relation.group.pool
        stream = _stream(spec, self.sources, kept)
        for (step, rows), csr, csc in zip(stream, spec.transposed(num_rounds), by_dst, strict=True):
            grads = self.homes if step is None else [home.buffer(step)]
            self._shard(rows, csr, csc, grads)
            if step is not None and self.wanted:
                home.send(step, grads[0])
                if spec.window == 1:  # the next rows take the buffers of these gradients
                    home.settle()
            elif step is not None:
                pool.give(grads[0])
        home.finish()
        spec.end_pass()
        dquery = self.dquery.sum(0) if self.additive else self.dquery
        return self.homes, dquery, self.dweight.to(self.weight.dtype)

    def _home(self) -> GradientReturn:
        spec, own, width = self.spec, self.homes[0], sum(part.shape[1] for part in self.sources)
        return GradientReturn(
            spec.relation.plan,
            width,
            own.dtype,
            lambda: own,
            self._add_home,
            1,
            spec.policy.lossy,
        )

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


class _Writes:
    """Whether a tensor has been written into since, known without keeping its memory alive.

    The result is saved as ``data``, which autograd frees after backward like any saved tensor but
    does not guard: the count of writes that it would compare raises an error where the caller
    wrote, and here such a result is only computed again.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._counter = tensor.detach()  # one count for both; then empty, but still counting
        self._counter.data = tensor.new_empty(0)
        self._version = self._counter._version

    @property
    def happened(self) -> bool:
        return self._counter._version != self._version


class _Attention(Function):
    """out_i = sum over edges e = (j -> i) of r_e a_e v_j, a_e = exp(z_e - m_i) / s_i.

    ==========  =========================  ===================================================
    tensor      shape                      owner and lifetime
    ==========  =========================  ===================================================
    v, k        [num_src, H * D], [.., K]  this rank; saved (inputs, not copies); k may be v
    q           [num_dst, K]               this rank; saved (an input)
    w           [H * D]                    every rank; saved (an input); mixed scores only
    a_k, a_q    H * D numbers each         every rank; saved (inputs); where k_j = <a_k, v_j> or
                                           q_i = <a_q, v_i> per head, see Note [Projected scores]
    halo        [<= round, H * D + K]      peers; fetched per round in forward and again in
                                           backward (kept when policy.rematerialize is off)
    m, 1 / s    [num_dst, H] each          this rank; saved
    out         [num_dst, H * D]           this rank; saved; computed again in backward where the
                                           caller wrote into it (on every rank)
    dq          [threads, num_dst, H]      this rank; in backward; additive scores only, else
                                           [num_dst, K]
    z, a, r     one chunk of edges         recomputed where they are used, never stored
    ==========  =========================  ===================================================

    K is H for additive scores, else H * D; z_e = s(k_j, q_i; w) as :mod:`sar.kernels.attention`
    lists, m_i = max_e z_e, s_i = sum_e exp(z_e - m_i), r_e is 1 or the dropout's factor. Backward,
    with delta_i = <dout_i, out_i> per head: dz_e = a_e (r_e <dout_i, v_j> - delta_i),
    dv_j = sum_e r_e a_e dout_i, (dk_j, dq_i, dw) = sum_e (ds/d(k_j, q_i, w))^T dz_e;
    dv and dk of halo rows go home round by round, unless nobody asks for gradients of v and k.
    Then, of projected scores, dv_j += dk_j a_k + dq_j a_q, da_k = sum_j dk_j v_j, da_q likewise.
    """

    @staticmethod
    def forward(
        ctx: Any,
        spec: Attention,
        value: Tensor,
        key: Tensor | None,
        query: Tensor,
        weight: Tensor | None,
        scores: Sequence[ReferenceType[Tensor] | None],
        key_vector: Tensor | None,
        query_vector: Tensor | None,
    ) -> Tensor:
        sources = [part.contiguous() for part in (value, key) if part is not None]
        used = query.new_zeros(0) if weight is None else weight
        wide, normalizer, kept = attention_forward(spec, sources, query, used)
        out = wide.to(value.dtype)
        ctx.spec, ctx.kept, ctx.scores = spec, kept, scores
        if not torch.is_inference_mode_enabled():
            ctx.writes = _Writes(out)
        vectors = (key_vector, query_vector)
        ctx.save_for_backward(value, key, query, weight, *vectors, *normalizer, out.data)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        value, key, query, weight, *vectors, largest, inverse, out = ctx.saved_tensors
        sources = [part.contiguous() for part in (value, key) if part is not None]
        used = query.new_zeros(0) if weight is None else weight
        normalizer = Normalizer(largest, inverse)
        if ctx.writes.happened:  # as a sum's result, it may be written into
            out = attention_forward(ctx.spec, sources, query, used)[0].to(value.dtype)
        wanted = any(ctx.needs_input_grad[1:3])
        queries = [_wide(query)] if ctx.spec.scores.kind == ADDITIVE else []
        incoming = Incoming.of(_wide(dout), _wide(out), normalizer, *queries)
        del out  # its last use: where autograd does not hold it, its memory is free now
        passed = _Backward(ctx.spec, sources, query, used, incoming, wanted)
        homes, dquery, dweight = passed.run(ctx.kept)
        dvalue, dkey = (*homes, None)[:2] if wanted else (None, None)
        ends: list[Tensor | None] = [dkey, dquery]
        dvectors: list[Tensor | None] = [None, None]
        if dvalue is not None:
            dvectors = _pass_on(dvalue, sources[0], ends, vectors, ctx.scores)
            ends = [d if vector is None else None for d, vector in zip(ends, dvectors, strict=True)]
        inputs = (value, key, query, weight)
        grads = (dvalue, *ends, None if weight is None else dweight)
        typed = [d if d is None else d.to(x.dtype) for d, x in zip(grads, inputs, strict=True)]
        return None, *typed, None, *dvectors


def _pass_on(
    dvalue: Tensor,
    value: Tensor,
    dscores: Sequence[Tensor | None],
    vectors: Sequence[Tensor | None],
    scores: Sequence[ReferenceType[Tensor] | None],
) -> list[Tensor | None]:
    """Add gradients of keys and queries to ``dvalue`` where Note [Projected scores] allows it.

    Returns:
        The gradients of the vectors; ``None`` for keys or queries whose gradients are not added.
    """
    found: list[Tensor | None] = [None, None]
    known = zip(dscores, vectors, scores, strict=True)
    chosen = {
        n: (dscore, _wide(vector).view(-1))
        for n, (dscore, vector, made) in enumerate(known)
        if dscore is not None and vector is not None and made is not None and made() is None
    }
    if chosen:
        sums = add_projected_grads(dvalue, _wide(value), *zip(*chosen.values(), strict=True))
        for n, dvector in zip(chosen, sums, strict=True):
            found[n] = dvector.to(value.dtype).view(vectors[n].shape)  # type: ignore[union-attr]
    return found
