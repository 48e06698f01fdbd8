"""Reduce functions over a mailbox, given by users to ``update_all(message, reduce)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from sar.edges import Relation, as_stored
from sar.frontends.dgl.frame import Frame
from sar.frontends.dgl.udf import Function, checked, name_of, seen
from sar.ops import Messages, run_mailbox
from sar.tracing.capture import TORCH_CAPTURES
from sar.tracing.lazy import EdgeTensor, Scope
from sar.tracing.program import Program

_KIND = "reduce function"


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
        return self._size

    def __len__(self) -> int:
        return self._size

    def nodes(self) -> Tensor:
        """int64 [n] global ids in the partitions' numbering: the column ``_ID``."""
        return self.data["_ID"]


def reduce_udf(
    scope: Scope,
    messages: Mapping[str, EdgeTensor],
    frame: Frame,
    ntype: str,
    func: Callable[[NodeBatch], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Call ``func`` on all destinations, those of equal in-degree together; collective.

    Gives its columns, [num_dst, ...], 0 for destinations without edges. ``messages`` are lazy.

    Raises, on every rank, ``KeyError`` for a message or column that ``func`` reads and that does
    not exist, with those that do; ``TypeError`` and ``ValueError`` where it returns no dict of
    tensors with one row per destination, or other shapes for another in-degree.
    """
    relation, error, function = as_stored(scope.relation, "reduce function"), None, None
    degree, mail = _least_in_degree(relation), Frame(relation.num_edges, "the mailbox", {})
    mail.update(messages)
    try:
        function = seen(
            lambda sides, size: func(NodeBatch(sides[1], size, ntype, sides[0])),
            [mail, frame],
            _KIND,
            name_of(func),
            "node",
            (degree,),
        )
    except Exception as caught:  # noqa: BLE001 - a user's function; raised on every rank
        error = caught
    relation.group.agree(error, "update_all")
    if function is None:
        raise TypeError("reduce function: not probed")
    columns = [messages[name] for name in function.read[0]]
    program = Program([column.read() for column in columns])
    reduce = Messages(
        partial(_reduced, function),
        is_udf=True,
        capturing=TORCH_CAPTURES,
        captures=function.captures,
        hidden=function.hidden,
    )
    results = run_mailbox(
        relation,
        program.messages(),
        program.inputs(),
        [column.without_rows for column in columns],
        reduce,
        [frame[name] for name in function.read[1]],
        list(function.outputs.values()),
        scope.policy,
        name_of(func),
    )
    return dict(zip(function.outputs, results, strict=True))


def _reduced(
    function: Function, boxes: list[Tensor], data: list[Tensor], _: list[Tensor], rows: Tensor
) -> list[Tensor]:
    """Call the function on nodes of one in-degree; raises if its columns are not as for others."""
    outputs = checked(function.on_rows([boxes, data], len(rows)), len(rows), _KIND, "node")
    if outputs.keys() != function.outputs.keys():
        raise ValueError(
            f"reduce function: returned {sorted(outputs)} for some in-degree, "
            f"expected {sorted(function.outputs)} as for others"
        )
    for name, like in function.outputs.items():
        out = outputs[name]
        if out.shape[1:] != like.shape[1:] or out.dtype != like.dtype:
            raise ValueError(
                f"reduce function: returned {name!r} with rows of shape {tuple(out.shape[1:])} and "
                f"{out.dtype}, expected {tuple(like.shape[1:])} and {like.dtype} as for another "
                "in-degree"
            )
    return [outputs[name] for name in function.outputs]


def _least_in_degree(relation: Relation) -> int:
    """The least in-degree above 0 of all ranks, which the function meets for certain; collective.

    A function may want a certain number of messages (``topk``); DGL's never sees fewer.
    """
    degrees = relation.in_degrees[relation.in_degrees > 0]
    none = torch.iinfo(torch.int64).max
    least = degrees.min() if len(degrees) else torch.tensor(none)
    found = int(relation.group.all_reduce(least.clone(), "min"))
    return 1 if found == none else found
