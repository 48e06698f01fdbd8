"""Message passing on a store: choose the path, gather inputs, store results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sar.config import Policy
from sar.graph import pending
from sar.graph.builtin import (
    REDUCTIONS,
    BuiltinMessage,
    BuiltinReduce,
    Operand,
    builtin_messages,
    parse_message,
    parse_reduce,
    scalar_weight,
)
from sar.graph.frame import Frame
from sar.graph.store import EType, GraphStore
from sar.graph.udf import probe, udf_messages
from sar.ops import Inputs, Relation, aggregate, run_messages


class NodeBatch:
    """Destination rows as an apply function sees them, like DGL's ``NodeBatch``."""

    def __init__(self, frame: Frame) -> None:
        self.data = frame

    def batch_size(self) -> int:
        """Rows in the batch: all that this rank owns."""
        return self.data.num_rows

    def __len__(self) -> int:
        return self.data.num_rows


def update_all(
    store: GraphStore, etype: EType, message_func: Any, reduce_func: Any, policy: Policy
) -> None:
    """See :meth:`sar.graph.ShardedGraph.update_all`."""
    reduce = parse_reduce(reduce_func)
    message = parse_message(message_func)
    if message is None:
        out = _reduce_udf(store, etype, message_func, reduce, policy)
    else:
        if message.out != reduce.message:
            raise ValueError(
                f"reduce function: reads message {reduce.message!r}, expected {message.out!r}, "
                "which the message function writes"
            )
        out = _reduce_builtin(store, etype, message, reduce.op, policy)
    store.dst_frames[etype[2]][reduce.out] = out


def apply_edges(
    store: GraphStore, etype: EType, func: Any, eids: Tensor | None, policy: Policy
) -> None:
    """See :meth:`sar.graph.ShardedGraph.apply_edges`."""
    frame, message = store.edge_frames[etype], parse_message(func)
    if message is None and eids is not None:
        pending.defer(store, etype, func, eids, policy)
        return
    if message is None:
        seen = probe(func, *_sides(store, etype))
        names = list(seen.outputs)
        messages = udf_messages(func, seen, frame, names)
        inputs = _columns(store, etype, seen.src, seen.dst, seen.edge)
        like = list(seen.outputs.values())
        results = run_messages(store.relations[etype], messages, "edges", policy, inputs, like)
        frame_updates = dict(zip(names, results, strict=True))
    else:
        operands = _operands(store, etype, message)
        messages, found, like_one = builtin_messages(message, operands, eids)
        (result,) = run_messages(
            store.relations[etype], messages, "edges", policy, found, [like_one]
        )
        frame_updates = {message.out: _merged(frame, message.out, result, eids)}
    for name, value in frame_updates.items():
        frame[name] = value


def aggregate_rows(
    relation: Relation, x: Tensor, op: str, edge_weight: Tensor | None, policy: Policy
) -> Tensor:
    """See :meth:`sar.graph.ShardedGraph.aggregate`."""
    if op not in REDUCTIONS:
        raise ValueError(f"op: got {op!r}, expected one of {', '.join(REDUCTIONS)}")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x: got {getattr(x, 'dtype', type(x))}, expected a floating point tensor")
    if len(x) != relation.num_src:
        raise ValueError(f"x: got {len(x)} rows, expected {relation.num_src}, one per source row")
    u, e = Operand("u", "x"), Operand("e", "edge_weight")
    if edge_weight is None:
        return _reduce(relation, BuiltinMessage("copy", u, None, "m"), {u: x}, op, policy)
    if edge_weight.numel() != relation.num_edges:
        got = tuple(edge_weight.shape)
        raise ValueError(f"edge_weight: got {got}, expected [{relation.num_edges}], one per edge")
    operands = {u: x, e: edge_weight.view(-1, *[1] * (x.dim() - 1))}
    return _reduce(relation, BuiltinMessage("mul", u, e, "m"), operands, op, policy)


def _reduce_builtin(
    store: GraphStore, etype: EType, message: BuiltinMessage, op: str, policy: Policy
) -> Tensor:
    column = message.lhs.name
    if message.op == "copy" and message.lhs.side == "e":
        frame = store.edge_frames[etype]
        if column in frame.pending or column not in frame:
            out = pending.reduce(store, etype, column, _summed(op), policy)
            return mean_of_sum(out, store.relations[etype]) if op == "mean" else out
    operands = _operands(store, etype, message)
    return _reduce(store.relations[etype], message, operands, op, policy)


def _reduce(
    relation: Relation,
    message: BuiltinMessage,
    operands: dict[Operand, Tensor],
    op: str,
    policy: Policy,
) -> Tensor:
    """The fast path for sums of whole rows, the generic one for everything else."""
    if op in ("sum", "mean"):
        x = operands.get(message.lhs)
        if (
            message.rhs is None
            and message.lhs.side == "u"
            and x is not None
            and x.is_floating_point()
        ):
            return aggregate(relation, x, op, policy)
        weight = scalar_weight(message, operands)
        if weight is not None:
            u = next(operands[o] for o in (message.lhs, message.rhs) if o and o.side == "u")
            return aggregate(relation, u, op, policy, weight)
    messages, inputs, like = builtin_messages(message, operands)
    (out,) = run_messages(relation, messages, _summed(op), policy, inputs, [like])
    return mean_of_sum(out, relation) if op == "mean" else out


def _reduce_udf(
    store: GraphStore, etype: EType, func: Any, reduce: BuiltinReduce, policy: Policy
) -> Tensor:
    if not callable(func):
        raise TypeError(f"message function: got {type(func).__name__}, expected a callable")
    seen = probe(func, *_sides(store, etype))
    if reduce.message not in seen.outputs:
        raise KeyError(f"message function: returned {sorted(seen.outputs)}, not {reduce.message!r}")
    relation = store.relations[etype]
    messages = udf_messages(func, seen, store.edge_frames[etype], [reduce.message])
    inputs = _columns(store, etype, seen.src, seen.dst, seen.edge)
    like = [seen.outputs[reduce.message]]
    (out,) = run_messages(relation, messages, _summed(reduce.op), policy, inputs, like)
    return mean_of_sum(out, relation) if reduce.op == "mean" else out


def mean_of_sum(total: Tensor, relation: Relation) -> Tensor:
    """[num_dst, ...] sums divided by the number of messages; 0 stays 0."""
    count = relation.in_degrees.clamp(min=1).to(total.dtype)
    return total / count.view(-1, *[1] * (total.dim() - 1))


def _summed(op: str) -> str:
    return "sum" if op == "mean" else op


def _sides(store: GraphStore, etype: EType) -> tuple[Frame, Frame, Frame]:
    return store.src_frames[etype[0]], store.dst_frames[etype[2]], store.edge_frames[etype]


def _columns(
    store: GraphStore, etype: EType, src: list[str], dst: list[str], edge: list[str]
) -> Inputs:
    of_src, of_dst, of_edge = _sides(store, etype)
    return Inputs(
        [of_src[name] for name in src],
        [of_dst[name] for name in dst],
        [of_edge[name] for name in edge],
    )


def _operands(store: GraphStore, etype: EType, message: BuiltinMessage) -> dict[Operand, Tensor]:
    frames = dict(zip("uve", _sides(store, etype), strict=True))
    used = [o for o in (message.lhs, message.rhs) if o is not None]
    return {operand: frames[operand.side][operand.name] for operand in used}


def _merged(frame: Frame, name: str, new: Tensor, eids: Tensor | None) -> Tensor:
    """Rows outside ``eids`` keep the column's old values, where there are any."""
    if eids is None or name not in frame:
        return new
    chosen = torch.zeros(frame.num_rows, dtype=torch.bool, device=new.device)
    chosen[eids.long()] = True
    return torch.where(chosen.view(-1, *[1] * (new.dim() - 1)), new, frame[name])
