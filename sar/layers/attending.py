"""Parts that layers of attention share: which rows travel, and their result.

Note [Projected on arrival]. A layer that sums values v = x W^T + b weighted by attention sends
rows of v twice and their gradients once, although nobody asks for the gradient of x where that is
the input of a model. There x travels instead, provided that it is no wider: who reads a row
computes its values and scores, and no gradient goes home. Of the gradients d of what it computed
of a halo row a rank needs d^T x alone, its share of the gradient of W; those are summed over the
ranks as all gradients of parameters are. What travels is part of the protocol: all ranks do it or
none.

Note [Result first]. Backward of attention reads its result for one number a head alone,
delta_i = <dout_i, out_i>, and has no use for it afterwards. Autograd frees what a function saved
when its backward pass is over. So the result is saved by a function of its own, behind attention:
by the time that attention's backward begins, its memory is free, unless the caller has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from sar._private import frees_graph, is_view
from sar.config import Policy
from sar.edges import Relation
from sar.edges.constant import Landed, constant_halo
from sar.kernels import wide_dtype
from sar.kernels.attention import Incoming, Normalizer, deltas
from sar.kernels.attention_loops import ADDITIVE
from sar.ops.attention import attention_backward, attention_forward
from sar.ops.attention_passes import Attention, Sources, Step, widened
from sar.ops.saving import Writes, anybody_wrote, compute_once, first_order, owns_saved
from sar.stream import GradientReturn, Round, fetch
from sar.stream.plan import agree_on_gradients


def input_travels(
    relation: Relation | None, x: Any, weight: Any, width: int, policy: Policy, fused: bool
) -> bool:
    """Whether x travels by Note [Projected on arrival]: if it may on all ranks, rows of one width.
    Never where there are several relations, no one tensor of rows or ``weight``, or a table.

    Collective where ``x`` asks for no gradient and ``weight``, which projects it, does, at each
    call: if a single rank takes another way from some moment on, nobody waits. ``width`` is of the
    rows that would travel instead; ``fused``: this rank computes the layer as a whole. Raises
    ``ValueError`` on every rank where ``x`` or ``weight`` asks for a gradient on some only.
    """
    if relation is None or not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return False
    group = relation.group
    agree_on_gradients(relation.plan, [("rows", x), ("their weight", weight)], 2)
    trained = weight.requires_grad and torch.is_grad_enabled()
    if x.requires_grad or not trained or group.size == 1 or group.table is not None:
        return False
    fits = fused and x.dtype == wide_dtype(x.dtype) and x.shape[1] <= width
    mine = x.shape[1] if fits else 0

    def agreed() -> bool:
        least, most = group.all_reduce(torch.tensor([mine, -mine]), "min").tolist()
        return 0 < least == -most

    return compute_once(agreed)


class ProjectedSources(Sources):
    """Sources whose layer's input x travels: who reads a row makes its values and keys.

    Values v and keys k_h = <a_h, v> of rows are (v | k) = x M^T + c. With W' = (W | b) and
    M' = (M | c): M' = (W' ; A W'), where A sums the rows of a head weighted by a. Backward, of
    gradients d of rows (v | k): dM' = (d^T x | the sum of d), in two parts dM' = (V ; K),
    dW'_hd = V_hd + a_hd K_h, da_hd = <W'_hd, K_h>.

    Args:
        parts: values and keys of the owned rows.
        rows: x, [num_src, F] owned, as the layer got them.
        weight, bias: W, [H * D, F], and b, [H * D] or none.
        vector: a, H * D numbers; ``None``: there are no keys, or they are the values.
    """

    travel = False

    def __init__(
        self, spec: Attention, parts: Sequence[Tensor], kept: list[Tensor] | None, rows: Tensor,
        weight: Tensor, bias: Tensor | None, vector: Tensor | None,
    ) -> None:  # fmt: skip
        super().__init__(spec, parts, kept)
        self.given, self.width = rows, rows.shape[1]
        columns = [weight] if bias is None else [weight, bias.view(-1, 1)]
        self.matrix = torch.cat(columns, 1)
        self.by_head = self.matrix.view(spec.scores.heads, -1, self.matrix.shape[1])
        self.vector = None if vector is None else vector.view(spec.scores.heads, -1, 1)
        if self.vector is not None:
            self.matrix = torch.cat([self.matrix, (self.vector * self.by_head).sum(1)])
        self.dmatrix = torch.zeros_like(self.matrix)

    def _landed(self, rounds: Sequence[Round], window: int, ahead: bool, learns: bool) -> Landed:
        relation, policy = self.spec.relation, self.spec.policy
        rows, keep = [self.given.detach().contiguous()], not policy.rematerialize

        def begin() -> Landed:
            return fetch(relation.plan, rows, rounds, keep, window, ahead)

        return constant_halo(relation, self.given, rounds, policy, learns, begin)

    def _arrived(self, landed: Landed) -> Iterator[Step]:
        pool = self.spec.relation.group.pool
        for number, halo in landed:
            shape = (len(halo), len(self.matrix))
            rows = pool.take(shape, halo.dtype, halo.device, number.most)
            torch.mm(halo, self.matrix[:, : self.width].t(), out=rows)
            if self.matrix.shape[1] > self.width:
                rows += self.matrix[:, self.width]
            yield Step([rows], number, halo)
            pool.give(rows)

    def pass_on(self, step: Step, number: Round, grads: Tensor, home: GradientReturn) -> None:
        if step.halo is not None:
            self.dmatrix[:, : self.width].addmm_(grads.t(), step.halo)
        if self.matrix.shape[1] > self.width:
            self.dmatrix[:, self.width] += grads.sum(0)
        self.spec.relation.group.pool.give(grads)

    def with_shares(self, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """dW, db and da with the shares of halo rows, each if its gradient is asked for."""
        num_values, shares = self.by_head.shape[:2].numel(), list[Tensor]()
        dweight, dkeys = self.dmatrix[:num_values], self.dmatrix[num_values:]
        if self.vector is not None:
            dweight = dweight + (self.vector * dkeys.unsqueeze(1)).flatten(0, 1)
            shares = [(self.by_head * dkeys.unsqueeze(1)).sum(2).flatten()]
        shares = [dweight[:, : self.width], dweight[:, self.width :].sum(1), *shares]
        return tuple(d if d is None else d + share for d, share in zip(grads, shares, strict=True))


_LARGER = 4  # how many times a bias may exceed the root mean square of what it is added to
_SAMPLE = 1024  # rows that tell it


@dataclass
class Call:
    """State that the two autograd functions of one call of a layer share.

    Attributes:
        input_travels: see Note [Projected on arrival].
        donate: whether a gradient may take the memory of the layer's input, unless the graph is
            kept, or others have made something of what was saved.
        owns: whether saved tensors stay as they are.
        writes: into the saved result; ``None``: the caller does not have it.
        is_written: whether anybody wrote, as this backward pass found it.
        delta: [n, H] of this backward pass, without meaning where ``is_written``.
    """

    spec: Attention
    input_travels: bool
    donate: bool
    owns: bool = field(default_factory=owns_saved)
    writes: Writes | None = None
    is_written: bool = False
    delta: Tensor | None = None

    def gives(self) -> bool:
        return self.donate and self.owns and frees_graph()

    def sources(
        self, used: Parameters, x: Tensor, parts: list[Tensor], kept: list[Tensor] | None = None
    ) -> Sources:
        """The rows that travel: ``parts``, made of ``x``, or ``x`` itself."""
        if self.input_travels:
            return ProjectedSources(self.spec, parts, kept, x, *used.projection())
        return Sources(self.spec, parts, kept, lambda: used.make(self.spec, x.detach())[0])

    def take_delta(self) -> Tensor:
        """delta, which backward of :class:`_Result` has left for this backward pass."""
        delta, self.delta = self.delta, None
        if delta is None:
            raise RuntimeError("delta: got none, expected that of this backward pass")
        return delta


def finish(result: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """``result + bias``, [n, H * D], in the memory of ``result`` where it keeps its digits there.

    ``result`` [n, H * D] is that of attention, which nobody else has; ``bias`` is [H * D] or none.
    """
    in_place = bias is None or _keeps_digits(result, bias, call.spec.scores.heads)
    out = _Result.apply(result, bias, call, in_place)
    if in_place and not torch.is_inference_mode_enabled():
        call.writes = Writes(out)
    return out


def _keeps_digits(result: Tensor, bias: Tensor, heads: int) -> bool:
    """Whether no head's sum loses digits of the result that matter."""
    if result.dtype != wide_dtype(result.dtype):
        return False
    some = result.detach()[:: max(1, len(result) // _SAMPLE)]
    some = some.view(len(some), heads, bias.numel() // heads)
    size = torch.linalg.vector_norm(some, dim=(0, 2)) / (some[:, 0].numel() or 1) ** 0.5
    return bool((bias.detach().view(heads, -1).abs().amax(1) <= _LARGER * size).all())


class _Result(Function):
    """out = o + b; backward finds delta for that of o.

    ======  ==========  ======================================================================
    tensor  shape       owner and lifetime
    ======  ==========  ======================================================================
    o       [n, H * D]  this rank; becomes out, unless b is so large that digits would be lost:
                        then it is saved beside out
    b       [H * D]     replicated; a copy is held where out is saved
    out     [n, H * D]  this rank; saved: see Note [Result first]
    delta   [n, H]      this rank; of one backward pass
    ======  ==========  ======================================================================

    do = dout; db = the sum of dout over n; per head delta = <dout, o> = <dout, out> - <dout, b>.
    """

    @staticmethod
    def forward(
        ctx: Any, result: Tensor, bias: Tensor | None, call: Call, in_place: bool
    ) -> Tensor:
        ctx.call, ctx.bias = call, None
        if bias is None or in_place:
            ctx.mark_dirty(result)
            out = result if bias is None else result.add_(bias)
            ctx.bias = None if bias is None else bias.detach().clone()  # as it is now
        else:
            out = result + bias
        ctx.save_for_backward(result.data)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        (out,) = ctx.saved_tensors
        dout = dout.contiguous()
        wide = widened(dout)
        call.is_written = call.writes is not None and call.writes.happened
        call.delta = deltas(wide, widened(out), call.spec.scores.heads, ctx.bias)
        return dout, dout.sum(0) if ctx.needs_input_grad[1] else None, None, None


class Parameters:
    """A layer's parameters, copied: backward makes the same values, keys and queries again.

    Attributes:
        num_source: how many parameters, the first ones, make values and keys.
        num_saved: how many, the last ones, are saved: backward reads what they are by then.
    """

    num_source: ClassVar[int]
    num_saved: ClassVar[int]

    def make(self, spec: Attention, x: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Values and keys of owned rows, queries, and the weight of mixed scores."""
        raise NotImplementedError

    def projection(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Weight and bias that make values, and the vector that makes keys of them."""
        raise NotImplementedError

    def grads(self, done: Done) -> tuple[Tensor | None, ...]:
        """dx and the gradients of the parameters."""
        raise NotImplementedError


class Done(NamedTuple):
    """Gradients that a layer's backward pass has found of its attention, and what they are of.

    Attributes:
        needs: of x and each parameter, whether its gradient is asked for.
        saved: the parameters that are saved, as they are now.
        homes, dquery, dweight: gradients of values and keys, queries, and the scores' weight.
        gives: whether this pass may write over ``x``.
    """

    sources: Sources
    x: Tensor
    needs: Sequence[bool]
    saved: Sequence[Tensor]
    homes: Sequence[Tensor]
    dquery: Tensor
    dweight: Tensor | None
    gives: bool


class AttentionLayer(Function):
    """o_i = sum over edges e = (j -> i) of r_e a_e v_j, a_e = exp(z_e - m_i) / s_i.

    ==========  ==========================  ==================================================
    tensor      shape                       owner and lifetime
    ==========  ==========================  ==================================================
    x           [num_src, F]                this rank; saved (an input). Donated and of another
                                            width than v it becomes dx
    parameters  see the layer               replicated; copies are held, some are saved
    v           [num_src, H * D]            this rank; made in forward and again in backward,
                                            where dx takes its place if it is as wide
    k, q        [.., H] or [.., H * D]      this rank; like v
    halo        [<= round, columns of v k]  peers; fetched per round in forward and again in
                                            backward (kept when policy.rematerialize is off);
                                            [<= round, F] where x travels, see Note [Projected on
                                            arrival], in files where Note [Constant halo] says so
    m, 1 / s    [num_dst, H] each           this rank; saved
    o           [num_dst, H * D]            this rank; not saved here, see Note [Result first]
    dv, dk, dq  as v, k, q                  this rank; in backward
    z, a, r     one chunk of edges          recomputed where they are used, never stored
    ==========  ==========================  ==================================================

    z_e is a function of k_j and q_i, m_i = max_e z_e, s_i = sum_e exp(z_e - m_i), r_e is 1 or the
    dropout's factor. Backward, with delta_i = <do_i, o_i>: dz_e = a_e (r_e <do_i, v_j> - delta_i),
    dv_j = sum_e r_e a_e do_i; gradients of halo rows go home round by round, or by Note [At the
    sources] rows of do and of what is known of the destinations travel and dq goes home. What the
    layer makes of them is in its :class:`Parameters`.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, kind: Any, x: Tensor, *given: Tensor | None) -> Tensor:
        used = kind(*[one if one is None else one.detach().clone() for one in given])
        table = call.spec.relation.group.table
        if table is not None:
            table.wait()  # before rows are made that would have to survive the turn
        parts, query, weight = used.make(call.spec, x.detach())
        sources = call.sources(used, x, parts)
        del parts
        out, normalizer = attention_forward(sources, query, weight)
        ctx.call, ctx.used, ctx.kept = call, used, sources.kept
        ctx.save_for_backward(x, *given[len(given) - kind.num_saved :], *normalizer)
        return out.to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved, largest, inverse = ctx.saved_tensors
        call, used, needs = ctx.call, ctx.used, ctx.needs_input_grad[2:]
        spec = call.spec
        table = spec.relation.group.table
        if table is not None:
            table.wait()
        parts, query, weight = used.make(spec, x.detach())
        sources = call.sources(used, x, parts, ctx.kept)
        del parts
        delta, dout = call.take_delta(), widened(dout)
        if anybody_wrote(spec.relation.group, call.is_written):
            out = attention_forward(sources, query, weight)[0]
            delta = deltas(dout, out, spec.scores.heads)
        queries = [widened(query)] if spec.scores.kind == ADDITIVE else []
        incoming = Incoming.of(dout, Normalizer(largest, inverse), delta, *queries)
        del dout, delta, queries
        wanted = any(needs[: 1 + used.num_source])
        found = attention_backward(sources, query, weight, incoming, wanted)
        del incoming, query
        return None, None, *used.grads(Done(sources, x, needs, saved, *found, call.gives()))


def like(x: Tensor, width: int, made_of: Sequence[Tensor | None]) -> Tensor:
    """No rows, [0, width], that ask for a gradient if one of ``made_of`` does."""
    rows = x.new_empty((0, width))
    for tensor in made_of if torch.is_grad_enabled() else ():
        if tensor is not None and tensor.requires_grad:
            return rows.requires_grad_()
    return rows


def grad_of_rows(x: Tensor, dvalue: Tensor, weight: Tensor, value: Tensor, donate: bool) -> Tensor:
    """dv W of v = x W^T, written over v or x if that is as wide and free.

    ``value`` is v, which nobody else has and nobody reads any more. With ``donate``, ``x`` may be
    taken if it is no leaf and no view.
    """
    place = None
    if value.shape == x.shape:
        place = value
    elif donate and not x.is_leaf and not is_view(x) and x.is_contiguous():
        place = x.detach()
    return torch.mm(dvalue, weight, out=place) if place is not None else dvalue @ weight
