"""User-defined message functions: what they read, what they return, what they capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from sar._private import version_of
from sar.errors import NotSupportedError
from sar.ops.capture import detached_leaf, leaves_of
from sar.ops.randomness import unchanged
from sar.tracing.capture import RecordCaptures, ReplaceCaptures
from sar.tracing.chunks import ROWS, Sample, look_of, refuse_chunked
from sar.tracing.message_dropout import FindDropout, inside_function

_PROBE_ROWS = 2


class EdgeBatch:
    """The edges of one block as a message function sees them.

    Attributes:
        src, dst, data: columns of the sources, destinations and edges, [e, ...] each.
    """

    def __init__(
        self,
        src: Mapping[str, Tensor],
        dst: Mapping[str, Tensor],
        data: Mapping[str, Tensor],
        size: int,
    ) -> None:
        self.src, self.dst, self.data, self._size = src, dst, data, size

    def batch_size(self) -> int:
        """Edges in the block."""
        return self._size

    def __len__(self) -> int:
        return self._size

    def edges(self) -> None:
        """Node ids of the block are not offered: raises ``NotSupportedError``."""
        raise NotSupportedError("edges.edges() is not supported in a message function")


class Recorder(Mapping[str, Tensor]):
    """A few blank rows per column; remembers which columns were read.

    Args:
        rows: leading shape of the blank rows, in place of the column's first dimension.

    Attributes:
        read: the blank rows by name, in the order in which they were first read.
        written: names of those that were written in place.
    """

    def __init__(self, frame: Mapping[str, Tensor], rows: tuple[int, ...] = (_PROBE_ROWS,)) -> None:
        self._frame, self._rows = frame, rows
        self.read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.read:
            shape, kind, device = look_of(self._frame, name)
            with torch.inference_mode(False):  # where writes are counted
                rows = torch.zeros((*self._rows, *shape), dtype=kind, device=device)
            self.read[name] = rows
        return self.read[name]

    @property
    def written(self) -> list[str]:
        return [name for name, rows in self.read.items() if version_of(rows)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)


@dataclass(frozen=True)
class Probe:
    """What a message function was seen to do on a few blank rows.

    Attributes:
        src, dst, edge: names of the columns it reads.
        written: those that it writes in place, by side.
        outputs: its results by name, without rows: trailing shapes and dtypes.
        captures, hidden: Note [Captured tensors].
        dropouts: per call of dropout its probability, and whether on rows of edges.
    """

    src: list[str]
    dst: list[str]
    edge: list[str]
    written: list[list[str]]
    outputs: dict[str, Tensor]
    captures: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]
    dropouts: list[tuple[float, bool]]


def probe(
    udf: Callable[[EdgeBatch], Mapping[str, Tensor]],
    src: Mapping[str, Tensor],
    dst: Mapping[str, Tensor],
    edge: Mapping[str, Tensor],
) -> Probe:
    """Run ``udf`` on blank rows, without communication, random numbers or gradients left behind.

    Raises ``TypeError`` or ``ValueError`` when it does not return one row per edge, and
    ``NotSupportedError`` when a row depends on those that are computed with it.
    """
    sides = [Recorder(frame) for frame in (src, dst, edge)]
    batch = EdgeBatch(sides[0], sides[1], sides[2], _PROBE_ROWS)
    dropouts: list[tuple[float, bool]] = []

    def run() -> Mapping[str, Tensor]:
        with inside_function(), FindDropout(_PROBE_ROWS) as finder:
            outputs = _checked(udf(batch))
        dropouts[:] = finder.found
        return outputs

    def run_some(rows: slice) -> Mapping[str, Tensor]:
        size = len(range(ROWS)[rows])
        some = EdgeBatch(Sample(src, rows), Sample(dst, rows), Sample(edge, rows), size)
        with inside_function(), FindDropout(size):
            return udf(some)

    outputs, captures, hidden = trace(run)
    refuse_chunked(run_some, f"message function {name_of(udf)}", "edges")
    read, written = [list(side.read) for side in sides], [side.written for side in sides]
    return Probe(read[0], read[1], read[2], written, outputs, captures, hidden, dropouts)


def trace(
    run: Callable[[], Mapping[str, Tensor]],
) -> tuple[dict[str, Tensor], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Outputs of a function without their rows, and its captures and hidden leaves.

    Random numbers go on afterwards as if it had not run. See Note [Captured tensors].
    """
    recorded = RecordCaptures()
    with unchanged():
        with torch.no_grad(), recorded:
            outputs = run()
        captures = recorded.tensors()
        hidden: tuple[Tensor, ...] = ()
        if torch.is_grad_enabled():
            hidden = _hidden_leaves(run, captures)
    like = {name: out[:0].detach() for name, out in outputs.items()}
    return like, tuple(captures), hidden


def _hidden_leaves(run: Callable, captures: list[Tensor]) -> tuple[Tensor, ...]:
    aliases = [detached_leaf(t, True) for t in captures]
    with torch.enable_grad(), ReplaceCaptures(captures, aliases):
        outputs = run()
    known = {id(alias) for alias in aliases}
    leaves = leaves_of([out for out in outputs.values() if out.requires_grad])
    return tuple({id(t): t for t in leaves if id(t) not in known}.values())


def name_of(function: Callable) -> str:
    """What to call a user's function."""
    return getattr(function, "__qualname__", type(function).__name__)


def _checked(outputs: Any) -> Mapping[str, Tensor]:
    if not isinstance(outputs, Mapping):
        raise TypeError(
            f"message function: returned {type(outputs).__name__}, expected a dict of tensors"
        )
    for name, out in outputs.items():
        if not isinstance(out, Tensor) or out.dim() == 0 or len(out) != _PROBE_ROWS:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"message {name!r}: got {got}, expected a tensor with a row per edge")
    return outputs


def call_udf(
    udf: Callable, seen: Probe, src: list[Tensor], dst: list[Tensor], edge: list[Tensor], size: int
) -> Mapping[str, Tensor]:
    """Run ``udf`` on the rows of a block, given in the order of the probe's names."""
    batch = EdgeBatch(
        rows_to_write(seen.src, src, seen.written[0]),
        rows_to_write(seen.dst, dst, seen.written[1]),
        rows_to_write(seen.edge, edge, seen.written[2]),
        size,
    )
    with inside_function():
        return udf(batch)


def rows_to_write(names: list[str], rows: list[Tensor], written: list[str]) -> dict[str, Tensor]:
    """The rows by name; of columns that are written in place copies."""
    return {
        name: block.clone() if name in written else block
        for name, block in zip(names, rows, strict=True)
    }


def frozen(udf: Callable) -> Callable:
    """``udf`` with the present values of its closure or its object, for a call that happens later.

    A lambda in a loop reads its variables when it runs, a method the attributes of its object; here
    they must see them as they are now. What a method assigns to attributes, a copy of its object
    gets.
    """
    if isinstance(udf, MethodType):
        return MethodType(udf.__func__, copy(udf.__self__))
    if isinstance(udf, nn.Module):
        return copy(udf)
    if not isinstance(udf, FunctionType) or not udf.__closure__:
        return udf
    cells = tuple(CellType(cell.cell_contents) for cell in udf.__closure__)
    same = FunctionType(udf.__code__, udf.__globals__, udf.__name__, udf.__defaults__, cells)
    same.__kwdefaults__ = udf.__kwdefaults__
    return same
