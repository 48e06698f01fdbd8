"""A user's function of the rows of one round at a time, whose results are summed over rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sar._private import version_of
from sar.config import Policy
from sar.edges.relation import Relation
from sar.kernels import Csc, add_rows, wide_dtype
from sar.ops.capture import Captures, detached_leaf, leaves_of
from sar.ops.halo import from_wire, to_wire
from sar.ops.message_blocks import as_before, autocast_state, flat_rows
from sar.ops.message_passes import Recomputed
from sar.ops.randomness import random_state
from sar.ops.saving import any_rank
from sar.stream import GradientMessages, GradientReturn, Pass, Step

Part = Callable[..., Tensor]
Around = Callable[[], AbstractContextManager[Any]]
_FEW = 16  # edges that a function is tried on


def sum_over_rounds(
    relation: Relation, part: Part, x: Tensor, others: Sequence[Tensor], policy: Policy,
    capturing: Captures, around: Around,
) -> Tensor:  # fmt: skip
    """``part`` of the own rows and of those of each round, summed: [num_dst, ...]; collective.

    Backward fetches the rows again and calls ``part`` again. Raises on every rank what ``part``
    raises on any. ``capturing`` replaces the leaves that ``part`` uses besides its arguments;
    ``around`` gives what each call is made in.

    Args:
        part: (rows, src, dst, positions, \\*others) -> [num_dst, ...].
        x: [num_src, ...]; all ranks agree on whether it asks for a gradient.
    """
    spec, kept = RoundSum(relation, part, policy, capturing, around), list[Tensor]()
    tensors = [x, *others]
    result, leaves = spec.forward([t.detach() for t in tensors], kept)
    tensors += leaves
    asks = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if any_rank(relation.group, asks) and not asks:  # the others need this rank in backward
        tensors.append(torch.zeros(0, requires_grad=True))
    again = RoundsBackward(spec, kept, len(others), leaves)
    return Recomputed.apply(again, [result], *tensors)[0]


class _Total(NamedTuple):
    """A sum of results in a wide type, and their own type."""

    values: Tensor
    dtype: torch.dtype

    def add(self, value: Tensor) -> None:
        if (value.shape, value.dtype) != (self.values.shape, self.dtype):
            raise ValueError(
                f"part: returned {value.dtype} {list(value.shape)} for some rows, expected "
                f"{self.dtype} {list(self.values.shape)} as for others"
            )
        self.values.add_(value)


def _leaves_behind(value: Tensor) -> Iterator[Tensor]:
    is_itself = value.is_leaf and value.requires_grad
    return iter([value]) if is_itself else leaves_of([value])


@dataclass(frozen=True)
class RoundSum:
    """What is summed over rounds, and how it is streamed.

    ``seed`` is of the random numbers that ``part`` draws, mixed with the number of the step.
    """

    relation: Relation
    part: Part
    policy: Policy
    capturing: Captures
    around: Around
    seed: int = field(default_factory=lambda: int(torch.randint(2**62, (1,))))
    autocast: tuple[str, bool, torch.dtype] = field(default_factory=autocast_state)

    def forward(self, given: list[Tensor], kept: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The sum, and the leaves that ``part`` uses besides its arguments, if gradients are on.

        ``kept`` gets the rows of each round, where the policy keeps them.
        """
        total, leaves, error = None, dict[int, Tensor](), None
        for step, rows in self.steps(given[0], None if self.policy.rematerialize else kept):
            if error is not None:
                continue  # the others wait for the rows of this rank
            try:
                if step.round is None:
                    tried = partial(self.try_on_few_edges, step, rows, given[1:])
                    self.relation.derived(("sum_rounds", *_code_of(self.part)), tried)
                with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
                    value = self.call(step, rows, given[1:])
                leaves |= {id(leaf): leaf for leaf in _leaves_behind(value)}
                if total is None:
                    total = _Total(
                        torch.zeros_like(value, dtype=wide_dtype(value.dtype)), value.dtype
                    )
                total.add(value.detach())
            except Exception as caught:  # noqa: BLE001 - a user's function; raised on every rank
                error = caught
        self.relation.group.agree(error, "sum_rounds")
        if total is None:
            raise RuntimeError("unreachable: the own rows are a step")
        return total.values.to(total.dtype), list(leaves.values())

    def steps(
        self, x: Tensor, keep: list[Tensor] | None = None, kept: Sequence[Tensor] = ()
    ) -> Iterator[tuple[Step, Tensor]]:
        """The own shard and each round, with the rows [n, ...] that their sources index."""
        rows, edges = to_wire(x), self.relation.store
        width = rows.shape[1] * (rows.element_size() + wide_dtype(rows.dtype).itemsize)
        size = max(1, width)  # backward: rows in, gradients out
        for step in Pass(
            edges, self.policy, rows, row_bytes=size, order=True, keep=keep, kept=kept
        ):
            yield step, from_wire(step.rows, x)

    def call(
        self, step: Step, rows: Tensor, others: Sequence[Tensor],
        mode: AbstractContextManager | None = None,
    ) -> Tensor:  # fmt: skip
        """The result of one call; raises ``TypeError`` or ``ValueError`` where it does not fit."""
        return self._on(ends_of_edges(step.shard), step.number, rows, others, mode)

    def _on(
        self, ends: Sequence[Tensor], number: int, rows: Tensor, others: Sequence[Tensor],
        mode: AbstractContextManager | None = None,
    ) -> Tensor:  # fmt: skip
        given = [rows, *others]
        before = [version_of(tensor) for tensor in given]
        with as_before(self.seed, number, self.autocast, rows.device, mode), self.around():
            value = self.part(rows, *ends, *others)
        if [version_of(tensor) for tensor in given] != before:
            raise ValueError("part: wrote into a tensor that it was given, expected a new one")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"part: returned {got}, expected a floating point tensor")
        if value.dim() == 0 or len(value) != self.relation.num_dst:
            raise ValueError(
                f"part: returned shape {tuple(value.shape)}, expected "
                f"[{self.relation.num_dst}, ..], a row for each destination"
            )
        return value

    def try_on_few_edges(self, step: Step, rows: Tensor, others: Sequence[Tensor]) -> bool:
        """True; ``ValueError`` unless ``part`` gives 0 for no edge, and for some of them the sum of
        what it gives for halves of them, if it draws no random numbers."""
        ends = [end[:_FEW] for end in ends_of_edges(step.shard)]
        draws = list[bool]()

        def noted(*given: Tensor) -> Tensor:
            before = random_state(rows.device)
            value = self.part(*given)
            draws.append(not torch.equal(random_state(rows.device), before))
            return value

        spec, touched = replace(self, part=noted), ends[1].unique()
        with torch.no_grad():
            if spec._on([end[:0] for end in ends], 0, rows, others).any():
                raise ValueError("part: returned other numbers than 0 for no edges, expected a sum")
            whole, even, odd = (
                spec._on([end[chosen] for end in ends], 0, rows, others)[touched]
                for chosen in (slice(None), slice(0, None, 2), slice(1, None, 2))
            )
        about = 0.01 * float(whole.abs().max()) if whole.numel() else 0.0
        close = torch.allclose(whole, even + odd, rtol=0.01, atol=about, equal_nan=True)
        if not any(draws) and not close:
            raise ValueError(
                "part: its result for some edges is not the sum of its results for halves of them, "
                "as of a mean, a softmax or a norm; expected what each edge adds by itself"
            )
        return True


def ends_of_edges(shard: Csc) -> list[Tensor]:
    """int64 [e] each: rows that edges start in, rows that they end in, their places."""
    if shard.order is None:
        raise RuntimeError("unreachable: the pass was asked for the places of edges")
    return [end.long() for end in (shard.indices, shard.row_of_edges(), shard.order)]


def _code_of(part: Any) -> tuple[Any, int]:
    """What tells functions apart that were tried from those that were not."""
    while isinstance(part, partial):
        part = part.func
    code = getattr(getattr(part, "__func__", part), "__code__", None)
    return code or type(part), id(getattr(part, "__self__", None) if code else part)


@dataclass
class RoundsBackward:
    """out = sum over steps r of f(x_r, edges of r, w, leaves).

    ==========  ==================  =========================================================
    tensor      shape               owner and lifetime
    ==========  ==================  =========================================================
    x           [num_src, ...]      this rank; saved (an input, not a copy)
    x_r         [<= round, ...]     peers; fetched per round in forward and again in backward,
                                    or kept as the policy says; those of the own shard are x
    w, leaves   any                 this rank; saved (inputs)
    f(x_r, ..)  [num_dst, ...]      this rank; added, dropped, computed again in backward
    out         [num_dst, ...]      this rank; not saved
    ==========  ==================  =========================================================

    (dx_r, dw, dleaves) += (df/d(x_r, w, leaves))^T dout; dx_r goes home round by round. Leaves are
    found behind the results of f. What was computed from them before is differentiated in each
    step.
    """

    spec: RoundSum
    kept: list[Tensor]
    num_others: int
    leaves: list[Tensor]

    def run(
        self, tensors: Sequence[Tensor], needs: Sequence[bool], grads: list[Tensor]
    ) -> list[Tensor | None]:
        x, *others = [tensor.detach() for tensor in tensors[: 1 + self.num_others]]
        others = [detached_leaf(t, need) for t, need in zip(others, needs[1:], strict=False)]
        aliases = [detached_leaf(leaf, True) for leaf in self.leaves]
        given = [*(one for one in others if one.requires_grad), *aliases]
        totals = [torch.zeros_like(one, dtype=wide_dtype(one.dtype)) for one in given]
        home, error = None, None
        for step, rows in self.spec.steps(x, kept=self.kept):
            drows = None
            try:
                if error is None:
                    rows = detached_leaf(rows, needs[0])
                    drows = self._step(step, rows, others, aliases, totals, grads[0])
            except Exception as caught:  # noqa: BLE001 - a user's function; raised on every rank
                error = caught
            if needs[0]:
                home = self._send(home, step, torch.zeros_like(rows) if drows is None else drows)
        dx = None if home is None else from_wire(home.finish().to(x.dtype), x)
        self.spec.relation.group.agree(error, "sum_rounds")
        sums = iter(total.to(one.dtype) for total, one in zip(totals, given, strict=True))
        found = [dx, *(next(sums) if one.requires_grad else None for one in others), *sums]
        return found + [None] * (len(tensors) - len(found))

    def _step(
        self, step: Step, rows: Tensor, others: list[Tensor], aliases: list[Tensor],
        totals: list[Tensor], dout: Tensor,
    ) -> Tensor | None:  # fmt: skip
        """Compute a step again, under grad: adds to ``totals``, and gives the gradient of rows."""
        mode = self.spec.capturing.replace(self.leaves, aliases)
        with torch.enable_grad():
            value = self.spec.call(step, rows, others, mode)
        trained = [one for one in others if one.requires_grad]
        asked = [*trained, *aliases, *self.leaves, *([rows] if rows.requires_grad else [])]
        if not value.requires_grad or not asked:
            return None
        # What was computed from leaves before the call is used again by the next step.
        options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
        found = torch.autograd.grad(value, asked, dout, **options)
        # A leaf that no alias could replace has a gradient of its own.
        for total, grad in zip([*totals, *totals[len(trained) :]], found, strict=False):
            total.add_(grad)
        return found[-1] if rows.requires_grad else None

    def _send(self, home: GradientReturn | None, step: Step, drows: Tensor) -> GradientReturn:
        """Gradients of the own rows begin the return, those of a round go home."""
        flat = flat_rows(drows)
        if home is not None and step.round is not None:
            home.send(step.round, home.buffer(step.round).copy_(flat))
            return home
        own = flat.to(wide_dtype(flat.dtype), copy=True).contiguous()
        plan = self.spec.relation.plan
        return GradientReturn(
            GradientMessages(plan, own.shape[1], own.dtype, add_rows), lambda: own
        )
