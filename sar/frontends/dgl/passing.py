"""Message passing on a store: choose the path, gather inputs, store results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sar.config import Policy
from sar.edges import AnyRelation, Relation, ReversedRelation
from sar.errors import NotSupportedError
from sar.frontends.dgl import pending
from sar.frontends.dgl.builtin import BuiltinReduce, parse_message, parse_reduce
from sar.frontends.dgl.frame import Frame
from sar.frontends.dgl.mailbox import reduce_udf
from sar.frontends.dgl.store import GraphStore, reverse
from sar.kernels import has
from sar.ops import aggregate, run_messages
from sar.ops.aggregate import check_reduction, extreme_of_rows
from sar.partition.book import EType
from sar.stream import agree_on_gradients
from sar.tracing.binary import (
    BuiltinMessage,
    Operand,
    apply_binary,
    builtin_messages,
    message_like,
    scalar_weight,
)
from sar.tracing.lazy import EdgeTensor, Scope, eager, node_of, stored
from sar.tracing.memo import remembered
from sar.tracing.message_dropout import Drawn
from sar.tracing.nodes import Call, Item, Leaf, Node, Udf
from sar.tracing.patterns import attend_if_matched
from sar.tracing.program import Program
from sar.tracing.udf import frozen, probe
from sar.tracing.weights import weighted_by


def reduced(
    store: GraphStore, etype: EType, message_func: Any, reduce_func: Any, policy: Policy
) -> dict[str, Tensor]:
    """The destination columns that messages over one relation are reduced to."""
    reduce = parse_reduce(reduce_func)
    message = parse_message(message_func)
    if reduce is None:
        store.group.meter.tell("mailbox")
        columns = _mailbox(store, etype, message_func, message, policy)
        frame, scope = store.dst_frames[etype[2]], scope_of(store, etype, policy)
        return reduce_udf(scope, columns, frame, etype[2], reduce_func)
    if message is None:
        out = _reduce_udf(store, etype, message_func, reduce, policy)
    else:
        if message.out != reduce.message:
            raise ValueError(
                f"reduce function: reads message {reduce.message!r}, expected {message.out!r}, "
                "which the message function writes"
            )
        out = _reduce_builtin(store, etype, message, reduce.op, policy)
    return {reduce.out: out}


def _mailbox(
    store: GraphStore, etype: EType, func: Any, message: BuiltinMessage | None, policy: Policy
) -> dict[str, EdgeTensor]:
    """All messages that a reduce function may read, lazy."""
    if message is None:
        return _udf_columns(store, etype, func, policy)
    operands = _operands(store, etype, message)
    return {message.out: edge_values(scope_of(store, etype, policy), message, operands)}


def apply_edges(
    store: GraphStore, etype: EType, func: Any, edges: Any | None, policy: Policy
) -> None:
    """See :meth:`sar.frontends.dgl.ShardedGraph.apply_edges`; ``edges`` of ``None`` are all."""
    eids = None if edges is None else _positions(edges, store.relations[etype].num_edges)
    frame, message = store.edge_frames[etype], parse_message(func)
    if message is None and eids is not None:
        pending.defer(store, etype, func, eids, policy)
        return
    if message is None:
        for name, value in _udf_columns(store, etype, func, policy).items():
            frame[name] = value
        return
    operands, scope = _operands(store, etype, message), scope_of(store, etype, policy)
    if eids is None:
        frame[message.out] = edge_values(scope, message, operands)
        return
    operands = {operand: eager(tensor) for operand, tensor in operands.items()}
    _agree_operands(scope, operands)
    messages, inputs, like = builtin_messages(message, operands, eids)
    (result,) = run_messages(scope.relation, messages, "edges", policy, inputs, [like])
    frame[message.out] = _merged(frame, message.out, result, eids)


def _positions(edges: Any, num_edges: int) -> Tensor:
    """int [n] positions among ``num_edges`` edges; refuses what is not such."""
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
    """What lazy edge tensors of a relation carry with them."""
    return Scope(store.relations[etype], policy, store.device)


def edge_values(
    scope: Scope, message: BuiltinMessage, operands: dict[Operand, Tensor]
) -> EdgeTensor:
    """A built-in message as a lazy edge tensor; no communication."""
    key: list[Any] = ["message", message]  # all that its look depends on
    for operand, tensor in operands.items():
        key.append((operand, tensor.shape[1:], tensor.dtype))
    like = remembered(scope.relation, tuple(key), lambda: message_like(message, operands))
    return EdgeTensor(_node(message, operands, scope.relation), like, scope)


def _node(message: BuiltinMessage, operands: dict[Operand, Tensor], relation: AnyRelation) -> Node:
    nodes = {
        operand: node_of(tensor, relation, operand.name)
        if operand.side == "e"
        else Leaf(operand.side, tensor, operand.name)
        for operand, tensor in operands.items()
    }
    rhs = None if message.rhs is None else nodes[message.rhs]
    return Call(apply_binary, (message.op, nodes[message.lhs], rhs), {})


def _udf_columns(
    store: GraphStore, etype: EType, func: Any, policy: Policy
) -> dict[str, EdgeTensor]:
    """What a user's function of an edge batch returns, as lazy edge tensors."""
    if not callable(func):
        raise TypeError(f"message function: got {type(func).__name__}, expected a callable")
    src, dst, edge = _sides(store, etype)
    seen, scope = probe(func, src, dst, edge), scope_of(store, etype, policy)
    if seen.written[2]:
        raise NotSupportedError(
            f"message function: writes edge columns {seen.written[2]} in place; expected a new "
            "tensor, because its blocks may be computed again, in any order"
        )
    group = scope.relation.group
    udf = Udf(
        frozen(func),
        seen,
        [Leaf("u", src[name], name) for name in seen.src],
        [Leaf("v", dst[name], name) for name in seen.dst],
        [node_of(edge[name], scope.relation, name) for name in seen.edge],
        scope.relation,
        [
            Drawn(p, group.seeds.draw(group) if on_edges and p > 0 else None)
            for p, on_edges in seen.dropouts
        ],
    )
    return {name: EdgeTensor(Item(udf, name), out, scope) for name, out in seen.outputs.items()}


def aggregate_rows(
    relation: AnyRelation, x: Tensor, op: str, edge_weight: Tensor | None, policy: Policy
) -> Tensor:
    """See :meth:`sar.frontends.dgl.ShardedGraph.aggregate`."""
    check_reduction(relation, x, op, edge_weight)
    u, e = Operand("u", "x"), Operand("e", "edge_weight")
    scope = Scope(relation, policy, relation.plan.device)
    if edge_weight is None:
        return reduce_messages(scope, BuiltinMessage("copy", u, None, "m"), {u: x}, op)
    operands = {u: x, e: edge_weight.view(-1, *[1] * (x.dim() - 1))}
    return reduce_messages(scope, BuiltinMessage("mul", u, e, "m"), operands, op)


def _reduce_builtin(
    store: GraphStore, etype: EType, message: BuiltinMessage, op: str, policy: Policy
) -> Tensor:
    column = message.lhs.name
    if message.op == "copy" and message.lhs.side == "e":
        frame, relation = store.edge_frames[etype], store.relations[etype]
        if column in frame.pending or column not in frame:
            if isinstance(relation, ReversedRelation):  # the functions are of the other direction
                rows = pending.reduce(
                    reverse(store, [etype], True, True), etype[::-1], column, "edges", policy
                )
                return reduce_messages(
                    scope_of(store, etype, policy), message, {message.lhs: rows}, op
                )
            out = pending.reduce(store, etype, column, _summed(op), policy)
            return mean_of_sum(out, relation) if op == "mean" else out
    operands = _operands(store, etype, message)
    if store.sharing is not None and message.op == "copy" and message.lhs.side == "u":
        rows = store.sharing.reduce(etype, operands[message.lhs], op, policy)
        if rows is not None:
            store.group.meter.tell("shared rows")
            return rows
    return reduce_messages(scope_of(store, etype, policy), message, operands, op)


def reduce_messages(
    scope: Scope, message: BuiltinMessage, operands: dict[Operand, Tensor], op: str
) -> Tensor:
    """The fast path for sums of whole rows, the generic one for everything else."""
    relation, policy = scope.relation, scope.policy
    operands = {operand: stored(tensor) for operand, tensor in operands.items()}
    if any(isinstance(tensor, EdgeTensor) for tensor in operands.values()):
        return _reduce_lazy(edge_values(scope, message, operands), op)
    _agree_operands(scope, operands)
    meter = relation.group.meter
    x = operands.get(message.lhs) if message.rhs is None and message.lhs.side == "u" else None
    if x is not None and isinstance(relation, Relation) and op in ("max", "min"):
        is_compiled = has("extremes", x.device, x.dtype)
        what = "(bytes of a number, whether there is a loop that compares such numbers)"
        relation.plan.agree_once(what, x.element_size(), int(is_compiled))
        if is_compiled:
            meter.tell("extreme")
            return extreme_of_rows(relation, x, policy, largest=op == "max")
    if op in ("sum", "mean") and isinstance(relation, Relation):
        if x is not None and x.is_floating_point():
            meter.tell("sum")
            return aggregate(relation, x, op, policy)
        weight = scalar_weight(message, operands)
        if weight is not None:
            meter.tell("sum")
            u = next(operands[o] for o in (message.lhs, message.rhs) if o and o.side == "u")
            return aggregate(relation, u, op, policy, weight)
    messages, inputs, like = builtin_messages(message, operands)
    (out,) = run_messages(relation, messages, _summed(op), policy, inputs, [like])
    return mean_of_sum(out, relation) if op == "mean" else out


def _agree_operands(scope: Scope, operands: dict[Operand, Tensor]) -> None:
    """Raise on every rank where ranks differ in a gradient, on which the path depends."""
    named = [(f"column {operand.name!r}", tensor) for operand, tensor in operands.items()]
    agree_on_gradients(scope.relation.plan, named, len(named))


def _reduce_lazy(messages: EdgeTensor, op: str) -> Tensor:
    """Evaluate an edge program by a kernel or block by block, reduced at the destinations."""
    scope = messages.scope
    out = attend_if_matched(messages) if op in ("sum", "mean") else None
    if out is not None:
        meter = scope.relation.group.meter
        if meter.told is not None:
            meter.tell("attention kernel")
        return mean_of_sum(out, scope.relation) if op == "mean" else out
    by_sum = op in ("sum", "mean") and isinstance(scope.relation, Relation)
    softmax, weighting = (weighted_by(messages) if by_sum else None) or (None, None)
    program = Program([messages.read()], softmax)
    like = torch.empty(
        (0, *tuple(messages.shape)[1:]), dtype=messages.dtype, device=messages.device
    )
    function, inputs = program.messages(weighting), program.inputs()
    (out,) = run_messages(scope.relation, function, _summed(op), scope.policy, inputs, [like])
    return mean_of_sum(out, scope.relation) if op == "mean" else out


def _reduce_udf(
    store: GraphStore, etype: EType, func: Any, reduce: BuiltinReduce, policy: Policy
) -> Tensor:
    columns = _udf_columns(store, etype, func, policy)
    if reduce.message not in columns:
        raise KeyError(f"message function: returned {sorted(columns)}, not {reduce.message!r}")
    return _reduce_lazy(columns[reduce.message], reduce.op)


def mean_of_sum(total: Tensor, relation: AnyRelation) -> Tensor:
    """[num_dst, ...] sums divided by the number of messages; 0 stays 0."""
    count = relation.in_degrees.clamp(min=1).to(total.dtype)
    return total / count.view(-1, *[1] * (total.dim() - 1))


def _summed(op: str) -> str:
    return "sum" if op == "mean" else op


def _sides(store: GraphStore, etype: EType) -> tuple[Frame, Frame, Frame]:
    return store.src_frames[etype[0]], store.dst_frames[etype[2]], store.edge_frames[etype]


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
