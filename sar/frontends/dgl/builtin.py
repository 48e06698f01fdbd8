"""DGL's built-in message and reduce functions, read by their attributes (DGL is not imported)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sar.errors import NotSupportedError
from sar.ops.aggregate import REDUCTIONS
from sar.tracing.binary import BuiltinMessage, Operand

_SIDES = {"u": "u", "v": "v", "e": "e"}


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
        lhs, rhs = (
            Operand(_side(func.lhs), func.lhs_field),
            Operand(_side(func.rhs), func.rhs_field),
        )
        if func.binary_op not in ("add", "sub", "mul", "div", "dot"):
            raise NotSupportedError(f"message function: got {func.name!r}, which is not supported")
        return BuiltinMessage(func.binary_op, lhs, rhs, func.out_field)
    if hasattr(func, "in_field"):
        return BuiltinMessage(
            "copy", Operand(_side(func.target), func.in_field), None, func.out_field
        )
    raise NotSupportedError(f"message function: got {func!r}, expected a dgl.function message")


def parse_reduce(func: Any) -> BuiltinReduce | None:
    """The built-in that a ``dgl.function`` reduce object stands for; ``None`` for a UDF.

    Raises ``NotSupportedError`` for an unknown reduction, and ``TypeError`` for something that is
    not a reduce function.
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
    """u, v or e of DGL's operand code, which is a letter or an integer."""
    codes = {0: "u", 1: "v", 2: "e"}
    side = codes.get(target) if isinstance(target, int) else _SIDES.get(str(target))
    if side is None:
        raise NotSupportedError(f"message operand: got {target!r}, expected u, v or e")
    return side
