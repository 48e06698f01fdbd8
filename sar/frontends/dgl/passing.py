"""Message passing on a store: choose the path, gather inputs, store results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sar.config import Policy
from sar.frontends.dgl.builtin import BuiltinMessage, parse_message, parse_reduce
from sar.frontends.dgl.mailbox import reduce_udf
from sar.frontends.dgl.store import GraphStore
from sar.frontends.dgl.udf import message_columns
from sar.graph.view import Scope
from sar.partition.book import EType
from sar.tracing.lazy import EdgeTensor, stored
from sar.tracing.reducing import reduce_rows, rows_of


def reduced(
    store: GraphStore, etype: EType, message_func: Any, reduce_func: Any, policy: Policy
) -> dict[str, Tensor]:
    """The destination columns that messages over one relation are reduced to."""
    reduce, message = parse_reduce(reduce_func), parse_message(message_func)
    if reduce is None:
        store.group.meter.tell("mailbox")
        columns = _messages(store, etype, message_func, message, policy)
        frame, scope = store.dst_frames[etype[2]], scope_of(store, etype, policy)
        return reduce_udf(scope, columns, frame, etype[2], reduce_func)
    if message is None:
        columns = message_columns(store, etype, message_func, policy)
        if reduce.message not in columns:
            raise KeyError(f"message function: returned {sorted(columns)}, not {reduce.message!r}")
        return {reduce.out: reduce_rows(columns[reduce.message], reduce.op)}
    if message.out != reduce.message:
        raise ValueError(
            f"reduce function: reads message {reduce.message!r}, expected {message.out!r}, "
            "which the message function writes"
        )
    operands = _operands(store, etype, message)
    if store.sharing is not None and message.op == "copy" and message.lhs.side == "u":
        rows = store.sharing.reduce(store.relations[etype], operands[0], reduce.op, policy)
        if rows is not None:
            store.group.meter.tell("shared rows")
            return {reduce.out: rows}
    out = reduce_message(scope_of(store, etype, policy), message, operands, reduce.op)
    return {reduce.out: out}


def reduce_message(scope: Scope, message: BuiltinMessage, columns: list[Tensor], op: str) -> Tensor:
    """A built-in message, of the columns of its operands, reduced to destinations; collective."""
    return reduce_rows(message.rows(scope, [stored(column) for column in columns]), op)


def apply_edges(
    store: GraphStore, etype: EType, func: Any, edges: Any | None, policy: Policy
) -> None:
    """See :meth:`sar.frontends.dgl.ShardedGraph.apply_edges`; ``edges`` of ``None`` are all."""
    frame, message, chosen = store.edge_frames[etype], parse_message(func), None
    if edges is not None:
        positions = _positions(edges, frame.num_rows).long()
        mask = torch.zeros(frame.num_rows, dtype=torch.bool, device=store.device)
        mask[positions] = True
        chosen = rows_of(scope_of(store, etype, policy), "e", mask)
    for name, values in _messages(store, etype, func, message, policy, chosen).items():
        if chosen is not None and message is not None:
            rows = chosen.view(-1, *[1] * (values.dim() - 1))
            frame[name] = torch.where(rows, values, frame[name] if name in frame else 0)
        else:
            is_column = message is not None and message.op == "copy"  # of which it has no copy
            frame[name] = values.clone() if is_column else values


def _messages(
    store: GraphStore,
    etype: EType,
    func: Any,
    message: BuiltinMessage | None,
    policy: Policy,
    chosen: EdgeTensor | None = None,
) -> dict[str, EdgeTensor]:
    """The rows of edges that a message function gives, lazy; at least those that are ``chosen``."""
    if message is None:
        return message_columns(store, etype, func, policy, chosen)
    columns = _operands(store, etype, message)
    return {message.out: message.rows(scope_of(store, etype, policy), columns)}


def _positions(edges: Any, num_edges: int) -> Tensor:
    """int [n] positions among ``num_edges`` edges; raises ``TypeError`` or ``ValueError``."""
    if isinstance(edges, tuple):
        raise TypeError("edges: got a tuple, expected int positions [n] of local edges")
    eids = torch.as_tensor(edges)
    if eids.numel() == 0 and not isinstance(edges, Tensor):
        eids = eids.long()
    kind = eids.dtype
    if eids.dim() != 1 or kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise TypeError(f"edges: got {kind} {list(eids.shape)}, expected int positions [n]")
    if len(eids) and not (0 <= int(eids.min()) and int(eids.max()) < num_edges):
        raise ValueError(
            f"edges: got positions {int(eids.min())} to {int(eids.max())}, expected 0 to "
            f"{num_edges - 1}, those of this rank's edges"
        )
    return eids


def scope_of(store: GraphStore, etype: EType, policy: Policy) -> Scope:
    return Scope(store.relations[etype], policy, store.device)


def _operands(store: GraphStore, etype: EType, message: BuiltinMessage) -> list[Tensor]:
    frames = {
        "u": store.src_frames[etype[0]],
        "v": store.dst_frames[etype[2]],
        "e": store.edge_frames[etype],
    }
    return [frames[operand.side][operand.name] for operand in message.operands]
