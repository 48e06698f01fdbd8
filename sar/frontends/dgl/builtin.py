"""DGL's built-in message and reduce functions, read by their attributes (DGL is not imported).

A message copies a column or combines two by an operator, feature dimensions broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sar.errors import NotSupportedError
from sar.graph.view import Scope
from sar.ops.aggregate import REDUCTIONS
from sar.tracing.lazy import EdgeTensor
from sar.tracing.reducing import rows_of

_SIDES = {0: "u", 1: "v", 2: "e", "u": "u", "v": "v", "e": "e"}  # DGL's codes of operands
_OPS: dict[str, Any] = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}


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

    @property
    def operands(self) -> list[Operand]:
        return [self.lhs] if self.rhs is None else [self.lhs, self.rhs]

    def rows(self, scope: Scope, columns: list[Tensor]) -> EdgeTensor:
        """The message as a lazy edge tensor, of the columns of ``operands``.

        Raises ``ValueError`` naming both columns when their feature dimensions do not broadcast.
        """
        named = list(zip(self.operands, columns, strict=True))
        rows: list[Any] = [rows_of(scope, o.side, column, o.name) for o, column in named]
        if self.rhs is None:
            return rows[0]
        lhs, rhs = (_with_dims(one, max(r.dim() for r in rows)) for one in rows)
        try:
            if self.op == "dot":  # kept with size 1
                return (lhs * rhs).sum(-1, keepdim=True)
            return _OPS[self.op](lhs, rhs)
        except ValueError as error:
            shapes = " and ".join(f"{o.side}.{o.name} {tuple(t.shape)[1:]}" for o, t in named)
            raise ValueError(f"message {self.op}: feature shapes of {shapes} do not fit") from error


def _with_dims(rows: Any, dims: int) -> Any:
    """Rows with ``dims`` dimensions, by ones behind that of the edges."""
    for _ in range(dims - rows.dim()):
        rows = rows.unsqueeze(1)
    return rows


@dataclass(frozen=True)
class BuiltinReduce:
    """``op`` over the messages ``message``, stored as ``out``."""

    op: str
    message: str
    out: str


def parse_message(func: Any) -> BuiltinMessage | None:
    """The built-in that a ``dgl.function`` message object stands for; ``None`` for a UDF.

    Raises ``NotSupportedError`` for a built-in that is not known here.
    """
    if not hasattr(func, "out_field"):
        return None
    if hasattr(func, "binary_op"):
        lhs = Operand(_side(func.lhs), func.lhs_field)
        rhs = Operand(_side(func.rhs), func.rhs_field)
        if func.binary_op not in (*_OPS, "dot"):
            raise NotSupportedError(f"message function: got {func.name!r}, which is not supported")
        return BuiltinMessage(func.binary_op, lhs, rhs, func.out_field)
    if hasattr(func, "in_field"):
        return BuiltinMessage(
            "copy", Operand(_side(func.target), func.in_field), None, func.out_field
        )
    raise NotSupportedError(f"message function: got {func!r}, expected a dgl.function message")


def parse_reduce(func: Any) -> BuiltinReduce | None:
    """The built-in that a ``dgl.function`` reduce object stands for; ``None`` for a UDF.

    Raises ``NotSupportedError`` for an unknown reduction, ``TypeError`` for no reduce function.
    """
    if not hasattr(func, "msg_field"):
        if callable(func):
            return None
        raise TypeError(
            f"reduce function: got {type(func).__name__}, expected a dgl.function or a callable"
        )
    if func.name not in REDUCTIONS:
        raise NotSupportedError(
            f"reduce function: got {func.name!r}, expected one of {', '.join(REDUCTIONS)}"
        )
    return BuiltinReduce(func.name, func.msg_field, func.out_field)


def _side(target: Any) -> str:
    """u, v or e for DGL's operand code, a letter or an integer; raises ``NotSupportedError``."""
    side = _SIDES.get(target if isinstance(target, int) else str(target))
    if side is None:
        raise NotSupportedError(f"message operand: got {target!r}, expected u, v or e")
    return side
