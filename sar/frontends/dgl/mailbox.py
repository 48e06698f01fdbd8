"""Reduce functions over a mailbox: what a user's ``update_all(message, reduce)`` gets and gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sar.edges import Relation, as_stored
from sar.frontends.dgl.frame import Frame
from sar.ops import Messages, run_mailbox
from sar.tracing.capture import TORCH_CAPTURES
from sar.tracing.chunks import ROWS, Sample, refuse_chunked
from sar.tracing.lazy import EdgeTensor, Scope
from sar.tracing.message_dropout import FindDropout, inside_function
from sar.tracing.program import Program
from sar.tracing.udf import Recorder, name_of, rows_to_write, trace

_PROBE_ROWS = 2


class NodeBatch:
    """Destinations as a reduce or an apply function sees them, like DGL's ``NodeBatch``.

    Attributes:
        data: columns of the destinations, [n, ...] each.
        mailbox: messages by name, [n, in-degree, ...] each, in ascending global edge id; empty in
            an apply function.
        ntype: the destinations' node type.
    """

    def __init__(
        self,
        data: Mapping[str, Tensor],
        size: int,
        ntype: str | None = None,
        mailbox: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.data, self._size, self.ntype = data, size, ntype
        self.mailbox = {} if mailbox is None else mailbox

    def batch_size(self) -> int:
        """Destinations in the batch."""
        return self._size

    def __len__(self) -> int:
        return self._size

    def nodes(self) -> Tensor:
        """int64 [n] global ids in the partitions' numbering: the column ``_ID``."""
        return self.data["_ID"]


@dataclass(frozen=True)
class _Seen:
    """What a reduce function was seen to read, write in place and return on blank mailboxes."""

    mailbox: list[str]
    data: list[str]
    written: list[list[str]]  # messages, columns
    outputs: dict[str, Tensor]
    captures: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]


def reduce_udf(
    scope: Scope,
    messages: Mapping[str, EdgeTensor],
    frame: Frame,
    ntype: str,
    func: Callable[[NodeBatch], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Call ``func`` on all destinations, those of equal in-degree together; collective.

    Args:
        messages: what the message function gives, lazy.
        frame: the destination columns.

    Returns:
        The columns that ``func`` returns, [num_dst, ...]; 0 for destinations without edges.

    Raises:
        KeyError: ``func`` reads a message or a column that does not exist; the error lists those
            that do. TypeError, ValueError: it does not return a dict of tensors with one row per
            destination, or tensors of other shapes for another in-degree. On every rank.
    """
    relation, error, seen = as_stored(scope.relation, "reduce function"), None, None
    degree = _least_in_degree(relation)
    try:
        seen = _probe(func, messages, frame, ntype, degree)
    except Exception as caught:  # noqa: BLE001 - a user's function; raised on every rank
        error = caught
    relation.group.agree(error, "update_all")
    if seen is None:
        raise TypeError("reduce function: not probed")
    columns = [messages[name] for name in seen.mailbox]
    program = Program([column.read() for column in columns])
    reduce = Messages(
        _Reduce(func, seen, ntype),
        is_udf=True,
        capturing=TORCH_CAPTURES,
        captures=seen.captures,
        hidden=seen.hidden,
    )
    mail = [_without_rows(column) for column in columns]
    results = run_mailbox(
        relation,
        program.messages(),
        program.inputs(),
        mail,
        reduce,
        [frame[name] for name in seen.data],
        list(seen.outputs.values()),
        scope.policy,
        name_of(func),
    )
    return dict(zip(seen.outputs, results, strict=True))


class _Reduce:
    """The function on rows given in the order of the names it was seen to read."""

    def __init__(self, func: Callable, seen: _Seen, ntype: str) -> None:
        self.func, self.seen, self.ntype = func, seen, ntype

    def __call__(
        self, boxes: list[Tensor], data: list[Tensor], _: list[Tensor], rows: Tensor
    ) -> list[Tensor]:
        seen = self.seen
        mailbox = _Known(rows_to_write(seen.mailbox, boxes, seen.written[0]))
        columns = _Known(rows_to_write(seen.data, data, seen.written[1]))
        with inside_function():
            outputs = self.func(NodeBatch(columns, len(rows), self.ntype, mailbox))
        _check(outputs, len(rows))
        if outputs.keys() != self.seen.outputs.keys():
            raise ValueError(
                f"reduce function: returned {sorted(outputs)} for some in-degree, "
                f"expected {sorted(self.seen.outputs)} as for others"
            )
        for name, like in self.seen.outputs.items():
            _check_like(name, outputs[name], like)
        return [outputs[name] for name in self.seen.outputs]


class _Known(dict):
    """Columns that the function was seen to read."""

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(
            f"reduce function: reads {name!r} here but not when it was tried on blank mailboxes"
        )


class _Mail(Mapping[str, Tensor]):
    """The messages that there are, for errors that list them."""

    def __init__(self, messages: Mapping[str, Tensor]) -> None:
        self._messages = messages

    def __getitem__(self, name: str) -> Tensor:
        if name in self._messages:
            return self._messages[name]
        have = ", ".join(sorted(self._messages)) or "none"
        raise KeyError(f"no message {name!r} in the mailbox; there are: {have}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._messages)

    def __len__(self) -> int:
        return len(self._messages)


def _probe(
    func: Callable, messages: Mapping[str, Tensor], frame: Frame, ntype: str, degree: int
) -> _Seen:
    """Run ``func`` on blank mailboxes of an in-degree that exists."""
    mailbox, data = Recorder(_Mail(messages), (_PROBE_ROWS, degree)), Recorder(frame)

    def run() -> Mapping[str, Tensor]:
        with inside_function():
            return _check(func(NodeBatch(data, _PROBE_ROWS, ntype, mailbox)), _PROBE_ROWS)

    def run_some(rows: slice) -> Mapping[str, Tensor]:
        size, boxes = len(range(ROWS)[rows]), Sample(_Mail(messages), rows, (degree,))
        with inside_function(), FindDropout(size):
            return func(NodeBatch(Sample(frame, rows), size, ntype, boxes))

    outputs, captures, hidden = trace(run)
    refuse_chunked(run_some, f"reduce function {name_of(func)}", "nodes")
    written = [mailbox.written, data.written]
    return _Seen(list(mailbox.read), list(data.read), written, outputs, captures, hidden)


def _least_in_degree(relation: Relation) -> int:
    """The smallest in-degree above 0 on any rank: the function is certain to meet it; collective.

    A function may want a certain number of messages (``topk``); DGL's never sees fewer.
    """
    degrees = relation.in_degrees[relation.in_degrees > 0]
    none = torch.iinfo(torch.int64).max
    least = degrees.min() if len(degrees) else torch.tensor(none)
    found = int(relation.group.all_reduce(least.clone(), "min"))
    return 1 if found == none else found


def _check(outputs: Any, size: int) -> Mapping[str, Tensor]:
    if not isinstance(outputs, Mapping):
        got = type(outputs).__name__
        raise TypeError(f"reduce function: returned {got}, expected a dict of tensors")
    for name, out in outputs.items():
        if not isinstance(out, Tensor) or out.dim() == 0 or len(out) != size:
            kind = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"reduce function: returned {name!r} as {kind}, expected a tensor with a row for "
                f"each of {size} destinations"
            )
    return outputs


def _check_like(name: str, out: Tensor, like: Tensor) -> None:
    if out.shape[1:] != like.shape[1:] or out.dtype != like.dtype:
        raise ValueError(
            f"reduce function: returned {name!r} with rows of shape {tuple(out.shape[1:])} and "
            f"{out.dtype}, expected {tuple(like.shape[1:])} and {like.dtype} as for another "
            "in-degree"
        )


def _without_rows(column: Tensor) -> Tensor:
    shape = (0, *tuple(column.shape)[1:])
    return torch.empty(shape, dtype=column.dtype, device=column.device)
