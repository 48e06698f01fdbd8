"""Marks around a model's layers, by which time and bytes are theirs, and traces of a run."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sar._private import after_backward
from sar.comm import Group, current_group
from sar.comm.collectives import gather_json
from sar.comm.meter import COMPUTE, OTHER, Meter, Span
from sar.files import write_whole
from sar.graph import GraphArgument
from sar.kernels.device import StreamClock, clock_of
from sar.models.known import parts_of_fused
from sar.models.measure import SavedBytes

Row = dict[str, Any]
_MARKED = "sar.layer"  # key in an autograd node's own dictionary


@contextmanager
def mark_layers(
    model: nn.Module,
    group: Group | None = None,
    *,
    watch: SavedBytes | None = None,
) -> Iterator[Counter[str]]:
    """Inside, the group's meter knows which layer of ``model`` is at work, in both passes.

    A layer is a module that is called with a graph. What it does outside of inner layers counts
    for itself; backward belongs to a layer from its output to the output of the next. Parts of
    layers that may be fused get no hooks: with some, these would run as somebody watches them.

    Args:
        watch: is told when each layer begins, and ends, its forward pass.

    Yields:
        How often each layer is called.
    """
    meter, calls = (group or current_group()).meter, Counter[str]()
    handles, parts = [], parts_of_fused(model)
    for name, module in model.named_modules():
        if module in parts:
            continue
        mark = _Marks(name or type(module).__name__, meter, watch, calls)
        handles.append(module.register_forward_pre_hook(mark.enter, with_kwargs=True))
        handles.append(module.register_forward_hook(mark.leave, always_call=True))
    meter.use(_clock(model))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
        meter.switch(*OTHER)
        meter.use(None)


def _clock(model: nn.Module) -> StreamClock | None:
    first = next(model.parameters(), None)
    return None if first is None else clock_of(first.device)


class _Marks:
    """Hooks of one module, which tell the meter when it begins and ends."""

    def __init__(
        self, name: str, meter: Meter, watch: SavedBytes | None, calls: Counter[str]
    ) -> None:
        self.name, self.meter, self.watch, self.calls = name, meter, watch, calls
        self._before: list[tuple[str, str] | None] = []

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(map(_says_graph, (*args, *kwargs.values()))):
            self.calls[self.name] += 1
            self._before.append(self.meter.switch(self.name, "forward"))
            if self.watch is not None:
                self.watch.enter(self.name, [*args, *kwargs.values()])
        else:
            self._before.append(None)

    def leave(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        before = self._before.pop()
        if before is None:
            return
        self.meter.switch(*before)
        if self.watch is not None:
            self.watch.leave(self.name, _tensors(output))
        for tensor in _tensors(output):
            node: Any = tensor.grad_fn
            # What an inner layer made, or what came in, is not this layer's to mark.
            if node is None or _MARKED in node.metadata or any(tensor is arg for arg in args):
                continue
            node.metadata[_MARKED] = self.name
            node.register_prehook(self._backward)

    def _backward(self, _grads: Any) -> None:
        before = self.meter.switch(self.name, "backward")
        if before[1] != "backward":  # the first layer that this backward meets
            after_backward(lambda: self.meter.switch(*before))


def _says_graph(value: Any) -> bool:
    among = value.values() if isinstance(value, dict) else (value,)
    return any(isinstance(one, GraphArgument) for one in among)


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, dict):
        output = list(output.values())
    parts = output if isinstance(output, (tuple, list)) else [output]
    return [part for part in parts if isinstance(part, Tensor)]


class Trace:
    """What :func:`trace` yields."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._start = _account(group.meter)

    def summary(self) -> list[Row]:
        """A row for each layer and pass of this rank, since the trace began.

        Keys: ``layer``, ``pass``, ``compute`` and ``wait`` (seconds), ``sent`` and ``received``
        (bytes of rows), ``exchanges``. The last row, ``other``, is what belongs to no layer.
        """
        return layer_rows(self._group.meter, self._start)


def layer_rows(meter: Meter, start: list[Row] | None = None) -> list[Row]:
    """The meter's account as rows, that of no layer last; less an earlier account."""
    before = {(row["layer"], row["pass"]): row for row in start or ()}
    rows = [_less(row, before.get((row["layer"], row["pass"]))) for row in _account(meter)]
    return [row for row in rows[1:] if row["compute"] or row["wait"]] + rows[:1]


def _account(meter: Meter) -> list[Row]:
    meter.switch(*OTHER)
    meter.settle()
    return [
        {
            "layer": layer,
            "pass": work,
            "compute": taken.seconds - taken.wait_seconds,
            "wait": taken.wait_seconds,
            "sent": taken.sent_bytes,
            "received": taken.received_bytes,
            "exchanges": taken.exchanges,
        }
        for (layer, work), taken in meter.stretches.items()
    ]


def _less(row: Row, before: Row | None) -> Row:
    if before is None:
        return row
    return {k: v if isinstance(v, str) else v - before[k] for k, v in row.items()}


@contextmanager
def trace(
    file: str | os.PathLike | None = None,
    model: nn.Module | None = None,
    *,
    group: Group | None = None,
) -> Iterator[Trace]:
    """Record what every rank computes, waits for and moves; collective at both ends.

    Args:
        file: where rank 0 writes the spans of all ranks, in the Chrome trace format (open it in
            ``ui.perfetto.dev`` or ``chrome://tracing``): a process for each rank, one track for
            what it does and others for its exchanges. ``None`` writes nothing.
        model: whose layers are named, unless a :class:`sar.train.Trainer` trains it.

    Yields:
        A :class:`Trace`, which sums up by layer.

    Raises:
        FileNotFoundError: on every rank, where the file's folder does not exist. TypeError,
            PermissionError: where ``file`` is no path, or in a folder that may not be looked into.
    """
    group = group or current_group()
    group.agree(_folder_error(file, group))
    recorded = Trace(group)
    if file is not None:
        group.meter.record()
        group.all_gather(torch.zeros(1))  # ranks leave this together: their clocks' common zero
    origin = _now(group.meter)
    try:
        if model is None:
            yield recorded
        else:
            with mark_layers(model, group):
                yield recorded
    except BaseException:  # the other ranks may not come: nothing is gathered
        group.meter.stop()
        raise
    if file is not None:
        events = chrome_events(group.rank, group.meter.stop(), origin)
        write_events(file, events, group)


def _now(meter: Meter) -> float:
    meter.switch(*OTHER)
    return meter.since


def _folder_error(file: str | os.PathLike | None, group: Group) -> Exception | None:
    if file is None or group.rank != 0:
        return None
    try:
        is_there = Path(file).absolute().parent.is_dir()
    except Exception as error:  # no path, or a folder that may not be looked into
        return error
    if is_there:
        return None
    return FileNotFoundError(f"file: got {str(file)!r}, expected one in a folder that exists")


def chrome_events(rank: int, spans: list[Span], origin: float) -> list[Row]:
    """Events of the Chrome trace format, in microseconds since ``origin``."""
    lanes = sorted({span.lane for span in spans})
    events: list[Row] = [_name("process_name", rank, 0, f"rank {rank}")]
    for lane in lanes:
        name = "compute and wait" if lane == COMPUTE else f"wire {lane}"
        events.append(_name("thread_name", rank, lane, name))
    for span in spans:
        if span.begin < origin:
            continue
        event: Row = {
            "name": span.name or "other",
            "ph": "X",
            "pid": rank,
            "tid": span.lane,
            "ts": (span.begin - origin) * 1e6,
            "dur": (span.end - span.begin) * 1e6,
        }
        if span.lane != COMPUTE:
            event["args"] = {"sent": span.sent, "received": span.received}
        events.append(event)
    return events


def _name(kind: str, rank: int, lane: int, name: str) -> Row:
    return {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}


def write_events(file: str | os.PathLike, events: list[Row], group: Group) -> None:
    """Write the events of all ranks into one file on rank 0; collective."""
    everybody = gather_json(events, group)
    with group.agreed():
        if everybody:
            merged = [event for events in everybody for event in events]
            text = json.dumps({"traceEvents": merged, "displayTimeUnit": "ms"})
            write_whole(Path(file), lambda out: out.write(text.encode()))
