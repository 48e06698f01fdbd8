"""Messages that copy a column or combine two by an operator, feature dimensions broadcast."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sar.kernels import has
from sar.ops import Inputs, Messages


@dataclass(frozen=True)
class Operand:
    """A column that a message reads: ``side`` is u (source), v (destination) or e (edge)."""

    side: str
    name: str


@dataclass(frozen=True)
class BuiltinMessage:
    """``op(lhs, rhs)`` stored as ``out``; ``op`` is copy, add, sub, mul, div or dot."""

    op: str
    lhs: Operand
    rhs: Operand | None
    out: str


def apply_binary(op: str, lhs: Tensor, rhs: Tensor | None) -> Tensor:
    """The message of an operator, [e, ...]: feature dimensions broadcast from the right.

    ``dot`` sums the product over the last dimension and keeps it with size 1.
    """
    if rhs is None:
        return lhs
    lhs, rhs = _aligned(lhs, rhs)
    if op == "add":
        return lhs + rhs
    if op == "sub":
        return lhs - rhs
    if op == "mul":
        return lhs * rhs
    if op == "div":
        return lhs / rhs
    return (lhs * rhs).sum(-1, keepdim=True)


def _aligned(lhs: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
    """Both with as many dimensions, by ones behind the edge dimension."""
    dims = max(lhs.dim(), rhs.dim())
    return _with_dims(lhs, dims), _with_dims(rhs, dims)


def _with_dims(tensor: Tensor, dims: int) -> Tensor:
    return tensor.reshape(len(tensor), *[1] * (dims - tensor.dim()), *tensor.shape[1:])


def builtin_messages(
    message: BuiltinMessage, operands: dict[Operand, Tensor], eids: Tensor | None = None
) -> tuple[Messages, Inputs, Tensor]:
    """The message function, its inputs, and an empty message that shows shape and dtype.

    Raises ``ValueError`` naming both columns when their feature dimensions do not broadcast.
    """
    used = [o for o in (message.lhs, message.rhs) if o is not None]
    by_side = {side: [o for o in dict.fromkeys(used) if o.side == side] for side in "uve"}

    def function(
        src: list[Tensor], dst: list[Tensor], edge: list[Tensor], _: Tensor | None = None
    ) -> list[Tensor]:
        rows = dict(
            zip([*by_side["u"], *by_side["v"], *by_side["e"]], [*src, *dst, *edge], strict=True)
        )
        rhs = None if message.rhs is None else rows[message.rhs]
        return [apply_binary(message.op, rows[message.lhs], rhs)]

    src, dst, edge = ([operands[o] for o in by_side[side]] for side in "uve")
    like = message_like(message, operands)
    linear = _linear_in_src(message, operands)
    return Messages(function, linear_in_src=linear, eids=eids), Inputs(src, dst, edge), like


def message_like(message: BuiltinMessage, operands: dict[Operand, Tensor]) -> Tensor:
    """The message on no edges: its trailing shape, dtype and device.

    Raises ``ValueError`` naming both columns when their feature dimensions do not broadcast.
    """
    used = [o for o in (message.lhs, message.rhs) if o is not None]
    empty = [
        torch.empty((0, *tuple(t.shape)[1:]), dtype=t.dtype, device=t.device)
        for t in (operands[o] for o in used)
    ]
    try:
        return apply_binary(message.op, empty[0], empty[1] if len(empty) > 1 else None)
    except RuntimeError as error:
        shapes = " and ".join(f"{o.side}.{o.name} {tuple(operands[o].shape)[1:]}" for o in used)
        raise ValueError(f"message {message.op}: feature shapes of {shapes} do not fit") from error


def _linear_in_src(message: BuiltinMessage, operands: dict[Operand, Tensor]) -> bool:
    """True when no gradient depends on the values of source rows, so that none are fetched."""
    if message.rhs is None or message.op in ("add", "sub"):
        return True
    if message.op == "div" and message.rhs.side == "u":
        return False
    sides = {o.side for o in (message.lhs, message.rhs)}
    others = [o for o in (message.lhs, message.rhs) if o.side != "u"]
    return "u" in sides and not any(operands[o].requires_grad for o in others)


def scalar_weight(message: BuiltinMessage, operands: dict[Operand, Tensor]) -> Tensor | None:
    """The weight [num_edges] of a message ``u * e`` that scales whole rows, or ``None``.

    A weight that asks for a gradient is taken where a kernel computes that.
    """
    if message.op != "mul" or message.rhs is None:
        return None
    by_side = {o.side: operands[o] for o in (message.lhs, message.rhs)}
    if set(by_side) != {"u", "e"}:
        return None
    u, e = by_side["u"], by_side["e"]
    scales_rows = e.dim() <= u.dim() and all(size == 1 for size in e.shape[1:])
    asks = e.requires_grad and torch.is_grad_enabled()
    if asks and not has("edge_dots", u.device, u.dtype):
        return None
    if not scales_rows or e.dtype != u.dtype or not torch.is_floating_point(u):
        return None
    return e.reshape(-1)
