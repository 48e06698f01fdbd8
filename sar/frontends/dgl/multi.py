"""Messages over several relations in one call, and how their results meet at a node type."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sar.config import Policy
from sar.edges import ReversedRelation
from sar.frontends.dgl.builtin import BuiltinReduce, parse_message, parse_reduce
from sar.frontends.dgl.mailbox import NodeBatch
from sar.frontends.dgl.passing import reduced
from sar.frontends.dgl.store import GraphStore, copy_frame
from sar.models.sharing import reduce_jointly, stream_of
from sar.partition.book import EType

Columns = dict[str, Tensor]
CrossReducer = Callable[[list[Tensor]], Tensor]

CROSS: dict[str, CrossReducer] = {
    "sum": lambda rows: torch.stack(rows).sum(0),
    "mean": lambda rows: torch.stack(rows).mean(0),
    "max": lambda rows: torch.stack(rows).max(0).values,
    "min": lambda rows: torch.stack(rows).min(0).values,
    "stack": lambda rows: torch.stack(rows, 1),
}
_NOTHING = {"max": -math.inf, "min": math.inf}  # what a row without edges is reduced to


@dataclass(frozen=True)
class Step:
    """The message, reduce and, if any, apply function of one relation."""

    message: Any
    reduce: Any
    apply: Callable | None = None

    @property
    def builtin(self) -> BuiltinReduce | None:
        return parse_reduce(self.reduce)


def read_steps(
    etype_dict: Any, cross_reducer: Any, canonical: Callable[[Any], EType]
) -> dict[EType, Step]:
    """The arguments of ``multi_update_all``, checked; raises before anything is sent."""
    if not isinstance(etype_dict, Mapping):
        kind = type(etype_dict).__name__
        raise TypeError(f"etype_dict: got {kind}, expected a dict from relation to functions")
    if not callable(cross_reducer) and cross_reducer not in CROSS:
        raise ValueError(
            f"cross_reducer: got {cross_reducer!r}, expected a function or one of {list(CROSS)}"
        )
    steps: dict[EType, Step] = {}
    for key, functions in etype_dict.items():
        etype = canonical(key)
        if etype in steps:
            raise ValueError(f"etype_dict: got {etype} twice, expected each relation once")
        if not isinstance(functions, tuple) or len(functions) not in (2, 3):
            raise ValueError(
                f"etype_dict[{key!r}]: got {functions!r}, "
                "expected (message function, reduce function[, apply function])"
            )
        steps[etype] = Step(*functions)
    return steps


def steps_of_all(etypes: list[EType], message: Any, reduce: Any) -> tuple[dict[EType, Step], str]:
    """Steps with the same functions for every relation, and the cross reducer of the whole."""
    step = Step(message, reduce)
    if parse_message(message) is None or step.builtin is None or step.builtin.op == "mean":
        raise ValueError(
            f"etype: got None, expected one of {etypes}; over all relations at once, built-in "
            "functions are summed, or their maximum or minimum is taken"
        )
    return dict.fromkeys(etypes, step), step.builtin.op


def update_all(store: GraphStore, etype: EType, step: Step, policy: Policy) -> None:
    found = reduced(store, etype, step.message, step.reduce, policy)
    if step.apply is not None:
        found = _finished(store, etype, step, found)
        if _fill(step) is not None and found:
            first = next(iter(found))
            found[first] = _without_infinities(found[first])
    store.dst_frames[etype[2]].update(found)


def multi_update_all(
    store: GraphStore,
    steps: dict[EType, Step],
    cross_reducer: str | CrossReducer,
    apply_node_func: Callable | None,
    policy: Policy,
) -> None:
    found = _reduced_together(store, steps, policy)
    for etype, step in steps.items():
        if etype not in found:
            found[etype] = reduced(store, etype, step.message, step.reduce, policy)
    into: dict[str, dict[EType, Columns]] = {}
    for etype, step in steps.items():
        into.setdefault(etype[2], {})[etype] = _finished(store, etype, step, found[etype])
    for ntype, parts in into.items():
        merged = _merged(store, parts, cross_reducer)
        if any(_fill(steps[etype]) is not None for etype in parts):
            merged = {name: _without_infinities(rows) for name, rows in merged.items()}
        frame = store.dst_frames[ntype]
        frame.update(merged)
        if apply_node_func is not None:
            frame.update(apply_node_func(NodeBatch(frame, frame.num_rows, ntype)))


def _reduced_together(
    store: GraphStore, steps: dict[EType, Step], policy: Policy
) -> dict[EType, Columns]:
    """Results of the relations that copy the same source column: its rows travel once a stream."""
    shared: dict[tuple[str, str, str], dict[EType, BuiltinReduce]] = {}
    for etype, step in steps.items():
        message, reduce = parse_message(step.message), step.builtin
        if message is None or reduce is None or reduce.message != message.out:
            continue
        turned = isinstance(store.relations[etype], ReversedRelation)
        if message.op == "copy" and message.lhs.side == "u" and not turned:
            stream = etype[0], message.lhs.name, stream_of(reduce.op)
            shared.setdefault(stream, {})[etype] = reduce
    found: dict[EType, Columns] = {}
    for (ntype, column, _), reduces in shared.items():
        x = store.src_frames[ntype][column]
        if len(reduces) > 1 and x.is_floating_point():
            ops = {store.relations[etype]: reduce.op for etype, reduce in reduces.items()}
            parts = reduce_jointly(store, ops, x, policy)  # type: ignore[arg-type]
            for (etype, reduce), part in zip(reduces.items(), parts.values(), strict=True):
                found[etype] = {reduce.out: part}
    return found


def _fill(step: Step) -> float | None:
    reduce = step.builtin
    return None if reduce is None else _NOTHING.get(reduce.op)


def _finished(store: GraphStore, etype: EType, step: Step, columns: Columns) -> Columns:
    """A relation's result as in DGL: infinite where a max has no edge (0 if none has); applied."""
    fill = _fill(step)
    if fill is not None and store.relations[etype].num_edges_global:
        empty = store.relations[etype].in_degrees == 0
        columns = {
            name: rows.masked_fill(empty.view(-1, *[1] * (rows.dim() - 1)), fill)
            for name, rows in columns.items()
        }
    if step.apply is None:
        return columns
    frame = copy_frame(store.dst_frames[etype[2]])
    frame.update(columns)
    return dict(step.apply(NodeBatch(frame, frame.num_rows, etype[2])))


def _merged(
    store: GraphStore, parts: dict[EType, Columns], cross_reducer: str | CrossReducer
) -> Columns:
    """Columns that merge those of each relation; DGL stacks them in the order of relation ids."""
    if len(parts) == 1 and cross_reducer != "stack":
        return next(iter(parts.values()))
    order = list(parts)
    if cross_reducer == "stack":
        order.sort(key=store.book.canonical_etypes.index)
    merge = CROSS[cross_reducer] if isinstance(cross_reducer, str) else cross_reducer
    names = dict.fromkeys(name for etype in order for name in parts[etype])
    return {
        name: merge([parts[etype][name] for etype in order if name in parts[etype]])
        for name in names
    }


def _without_infinities(rows: Tensor) -> Tensor:
    return rows.masked_fill(rows.isinf(), 0)
