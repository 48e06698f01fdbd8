"""User-defined message functions: what they read, what they return, what they capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from sar._private import version_of
from sar.config import Policy
from sar.edges import AnyRelation
from sar.errors import NotSupportedError
from sar.frontends.dgl.frame import Frame
from sar.frontends.dgl.store import GraphStore
from sar.graph.view import Scope
from sar.ops.capture import detached_leaf, leaves_of
from sar.ops.randomness import unchanged
from sar.partition.book import EType
from sar.tracing.capture import RecordCaptures, ReplaceCaptures
from sar.tracing.chunks import ROWS, Sample, refuse_chunked
from sar.tracing.edge_rows import node_of
from sar.tracing.lazy import EdgeTensor
from sar.tracing.message_dropout import Drawn, FindDropout, inside_function
from sar.tracing.nodes import Item, Leaf, Node, Udf

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
        return self._size

    def __len__(self) -> int:
        return self._size

    def edges(self) -> None:
        """Node ids of the block are not offered: raises ``NotSupportedError``."""
        raise NotSupportedError("edges.edges() is not supported in a message function")


@dataclass(frozen=True)
class Function:
    """A user's function over batches, and what it was seen to do on a few blank rows.

    Attributes:
        call: (columns of each of its frames, rows) -> what it returns.
        kind: what it is: ``"reduce function"``.
        read, written: names of the columns that it reads, and of those that it writes in place, of
            each frame.
        outputs: its results by name, without rows: trailing shapes and dtypes.
        captures, hidden: Note [Captured tensors].
        dropouts: per call of dropout its probability, and whether on whole rows.
    """

    call: Callable[[list[Any], int], Any]
    kind: str
    read: list[list[str]]
    written: list[set[str]]
    outputs: dict[str, Tensor]
    captures: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]
    dropouts: list[tuple[float, bool]]

    def on_rows(self, frames: list[list[Tensor]], size: int) -> Mapping[str, Tensor]:
        """Call it on rows of the columns that it reads; columns that it writes are copies."""
        columns = [
            _Known(self.kind, {n: t.clone() if n in out else t for n, t in zip(names, rows)})
            for names, rows, out in zip(self.read, frames, self.written, strict=True)
        ]
        with inside_function():
            return self.call(columns, size)


class _Known(dict[str, Tensor]):
    """Columns that a function was seen to read."""

    def __init__(self, kind: str, columns: dict[str, Tensor]) -> None:
        super().__init__(columns)
        self._kind = kind

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(f"{self._kind}: reads {name!r} here but not when it was tried on blank rows")


def seen(
    call: Callable[[list[Any], int], Any],
    frames: list[Mapping[str, Tensor]],
    kind: str,
    name: str,
    row: str,
    inner: tuple[int, ...] = (),
) -> Function:
    """Run a function on blank rows, without communication, random numbers or gradients left behind.

    Args:
        kind, name, row: what the function and its rows are called in errors.
        inner: dimensions of a row of the first frame before those of its columns.

    Raises ``TypeError`` or ``ValueError`` when it does not return one row for each of its own, and
    ``NotSupportedError`` when a row depends on those that are computed with it.
    """
    inners = [inner, *[()] * (len(frames) - 1)]
    both = list(zip(frames, inners, strict=True))
    blank = [Sample(frame, slice(_PROBE_ROWS), more, blank=True) for frame, more in both]
    dropouts: list[tuple[float, bool]] = []

    def run() -> Mapping[str, Tensor]:
        with inside_function(), FindDropout(_PROBE_ROWS) as finder:
            outputs = checked(call(blank, _PROBE_ROWS), _PROBE_ROWS, kind, row)
        dropouts[:] = finder.found
        return outputs

    def run_some(rows: slice) -> Mapping[str, Tensor]:
        size = len(range(ROWS)[rows])
        some = [Sample(frame, rows, more) for frame, more in both]
        with inside_function(), FindDropout(size):
            return call(some, size)

    recorded = RecordCaptures()
    hidden: tuple[Tensor, ...] = ()
    with unchanged():
        with torch.no_grad(), recorded:
            outputs = run()
        captures = recorded.tensors()
        if torch.is_grad_enabled():
            hidden = _hidden_leaves(run, captures)
    refuse_chunked(run_some, f"{kind} {name}", f"{row}s")
    written = [{n for n, rows in side.made.items() if version_of(rows)} for side in blank]
    like = {n: out[:0].detach() for n, out in outputs.items()}
    read = [list(side.made) for side in blank]
    return Function(call, kind, read, written, like, tuple(captures), hidden, dropouts)


def _hidden_leaves(run: Callable, captures: list[Tensor]) -> tuple[Tensor, ...]:
    aliases = [detached_leaf(t, True) for t in captures]
    with torch.enable_grad(), ReplaceCaptures(captures, aliases):
        outputs = run()
    known = {id(alias) for alias in aliases}
    leaves = leaves_of([out for out in outputs.values() if out.requires_grad])
    return tuple({id(t): t for t in leaves if id(t) not in known}.values())


def name_of(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def checked(outputs: Any, size: int, kind: str, row: str) -> Mapping[str, Tensor]:
    """``outputs``; raises unless it is a dict of tensors with ``size`` rows each."""
    if not isinstance(outputs, Mapping):
        got = type(outputs).__name__
        raise TypeError(f"{kind}: returned {got}, expected a dict of tensors")
    for name, out in outputs.items():
        if not isinstance(out, Tensor) or out.dim() == 0 or len(out) != size:
            got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"{kind}: returned {name!r} as {got}, expected a tensor with a row for each of "
                f"{size} {row}s"
            )
    return outputs


def message_columns(
    store: GraphStore, etype: EType, func: Any, policy: Policy, chosen: EdgeTensor | None = None
) -> dict[str, EdgeTensor]:
    """What a user's function of an edge batch returns, lazily.

    Where not ``chosen``, what columns of these names had before, or 0.
    """
    if not callable(func):
        raise TypeError(f"message function: got {type(func).__name__}, expected a callable")
    src, dst = store.src_frames[etype[0]], store.dst_frames[etype[2]]
    edge, relation = store.edge_frames[etype], store.relations[etype]
    scope, kept = Scope(relation, policy, store.device), frozen(func)
    function = seen(
        lambda sides, size: kept(EdgeBatch(sides[0], sides[1], sides[2], size)),
        [src, dst, edge],
        "message function",
        name_of(func),
        "edge",
    )
    if function.written[2] and chosen is None:  # some rows are copies, in DGL too
        raise NotSupportedError(
            f"message function: writes edge columns {sorted(function.written[2])} in place; "
            "expected a new tensor, because its blocks may be computed again, in any order"
        )
    group, read = relation.group, function.read
    drawn = [
        Drawn(p, group.seeds.draw(group) if on_edges and p > 0 else None)
        for p, on_edges in function.dropouts
    ]
    udf = Udf(
        function.on_rows,
        function.outputs,
        function.captures,
        function.hidden,
        [Leaf("u", src[name], name) for name in read[0]],
        [Leaf("v", dst[name], name) for name in read[1]],
        [node_of(edge[name], relation, name) for name in read[2]],
        relation,
        drawn,
        None if chosen is None else chosen.node,
        {} if chosen is None else _before(edge, function.outputs, relation),
    )
    return {name: EdgeTensor(Item(udf, name), out, scope) for name, out in udf.outputs.items()}


def _before(edge: Frame, outputs: Mapping[str, Tensor], relation: AnyRelation) -> dict[str, Node]:
    """The columns whose values stay where a function computes some of the rows alone."""
    found = {}
    for name, like in outputs.items():
        if name in edge:
            old = edge[name]
            if (old.dtype, old.shape[1:]) != (like.dtype, like.shape[1:]):
                raise ValueError(
                    f"edge column {name!r}: got rows of {like.dtype} {list(like.shape[1:])} for "
                    f"some of the edges, expected {old.dtype} {list(old.shape[1:])} as it had"
                )
            found[name] = node_of(old, relation, name)
    return found


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
