"""What computes each layer of a model, what it sends and what it saves: :func:`explain`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sar import expect
from sar._private import tree_leaves
from sar.comm import Group
from sar.comm.meter import OTHER, LayerNotes, Meter
from sar.graph import GraphArgument, GraphView, graphs_among
from sar.models.known import adapted, arguments_of, known_layers, own_forward
from sar.models.measure import SavedBytes, backward, measure, untouched
from sar.models.tracing import mark_layers

logger = logging.getLogger("sar")

DENSE = "dense"
_FUSED = ("fused", "fused, recomputed", "fused + table")
_HEADER = (
    "layer", "class", "calls", "runs as", "rows sent", "bytes sent", "rows received",
    "bytes received", "bytes saved", "why not fused",
)  # fmt: skip
_WORDS = (0, 1, 3, 9)  # columns of text; the others are numbers


@dataclass(frozen=True)
class LayerRow:
    """A layer in one epoch of this rank, its forward and its backward pass.

    Attributes:
        name: in the model; that of the class for the model itself. ``"(other)"`` is what belongs to
            no layer.
        class_name: of the module.
        calls: how often it is called.
        implementation: what computes it: ``"fused"``, ``"fused, recomputed"``, ``"attention
            kernel"``, ``"edge program"``, ``"mailbox"``, ``"sum"`` (or mean), ``"extreme"`` (max or
            min), ``"shared rows"`` (sums that came with another layer's), ``"halo"``, ``"rounds"``
            and ``"fetch"`` (:func:`sar.halo`, :func:`sar.sum_rounds`, :func:`sar.fetch`),
            ``"dense"`` (nothing over edges); several in their order, joined by ``" + "``.
        why_not_fused: ``None`` where it is, and where nothing goes over edges.
        sent_rows, sent_bytes, received_rows, received_bytes: to and from other ranks.
        saved_bytes: in memory for backward: what autograd and the layer hold, without parameters,
            buffers, inputs of the model and columns of its graphs. Memory that several layers hold
            counts for the first. ``None`` where it cannot be told.
    """

    name: str
    class_name: str
    calls: int
    implementation: str
    why_not_fused: str | None
    sent_rows: int
    sent_bytes: int
    received_rows: int
    received_bytes: int
    saved_bytes: int | None


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` gives; as a string, a table.

    Attributes:
        rows: of this rank, in the order of the model's modules, what belongs to no layer last.
        rank, num_ranks: whose rows they are.
    """

    rows: tuple[LayerRow, ...]
    rank: int
    num_ranks: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        lines = [_HEADER, *(_cells(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [f"one epoch of rank {self.rank} of {self.num_ranks}"]
        for line in lines:
            cells = [
                cell.ljust(width) if place in _WORDS else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            shown.append("  ".join(cells).rstrip())
        return "\n".join(shown)


def _cells(row: LayerRow) -> tuple[str, ...]:
    numbers = (row.sent_rows, row.sent_bytes, row.received_rows, row.received_bytes)
    saved = "?" if row.saved_bytes is None else f"{row.saved_bytes:,}"
    first = (row.name, row.class_name, f"{row.calls}", row.implementation)
    return (*first, *(f"{number:,}" for number in numbers), saved, row.why_not_fused or "")


def explain(model: nn.Module, graph: Any, *inputs: Any, **named: Any) -> Explanation:
    """What computes each layer of ``model`` on ``graph``, what it sends and what it saves.

    Runs ``model(graph, *inputs, **named)`` and a backward pass, in which every number of the
    results has a gradient, as the next epoch would. Twice, as the first may ask the other ranks
    what they are asked once for all; the second is told of. Then a forward pass in which what is
    saved is counted, by hooks of saved tensors that this library knows to change nothing; what
    hooks inside of the model hide is not seen. A layer is a module that is called with a graph.
    Collective: every rank calls it alike.

    Afterwards all is as it was: gradients, buffers, training flags, columns of the graphs, random
    numbers of torch and of :func:`sar.manual_seed`, counters of bytes, and the results of constant
    rows that are kept: the first two epochs send such rows, and later ones do not.

    Args:
        graph: a sharded graph, or a list of blocks, as the model takes it; or PyG's data of one,
            whose columns the model gets by the names of its parameters.
        inputs, named: what the model takes behind it, or beside it where it takes an
            ``edge_index``. Without any, random rows of the width that the model's first layer
            wants, where one graph and its layers say so.

    Returns:
        A row for each layer; other ranks have other numbers.

    Raises:
        TypeError: ``model`` is no module, or ``graph`` no graph of this library.
        ValueError: no inputs are given and their width cannot be told.
    """
    expect.instance(model, "model", nn.Module, "a torch.nn.Module")
    args = arguments_of(model, graph, inputs)
    graphs = _graphs(graph, args, named)
    if len(args) == 1 and not named and isinstance(graph, (GraphArgument, list, tuple)):
        args = arguments_of(model, graph, (_made_rows(model, graphs),))
    return explained(model, lambda: model(*args, **named), graphs, [args, named])


def explained(
    model: nn.Module, call: Callable[[], Any], graphs: list[GraphView], held: Any
) -> Explanation:
    """As :func:`explain`, of a ``call`` on ``graphs`` that is given ``held``; collective."""
    group = graphs[0].group
    for _ in range(2):
        notes = LayerNotes(undo=[])
        with untouched(model, graphs, held, notes):
            meter = group.meter
            with mark_layers(model, group) as calls:
                backward(call())
    again, saved = LayerNotes(undo=[]), SavedBytes([model, graphs, held])
    with untouched(model, graphs, held, again):
        with mark_layers(model, group, watch=saved):
            measure(saved, call)
    same = set(notes.ways) == set(again.ways)  # else other code ran in the second pass
    rows = _Rows(meter, notes, calls, saved.number if same else None)
    return Explanation(tuple(rows.of(model)), group.rank, group.size)


@dataclass
class _Rows:
    """Makes the rows of layers from what meter and layers told."""

    meter: Meter
    notes: LayerNotes
    calls: dict[str, int]
    saved: dict[str, int] | None

    def of(self, model: nn.Module) -> list[LayerRow]:
        found = []
        for name, module in model.named_modules():
            name = name or type(module).__name__
            if name in self.calls:
                what, why = way_of(module, name, self.notes.ways)
                found.append(self._row(name, type(module).__name__, what, why))
        ways = [(what, reason) for layer, what, reason in self.notes.ways if layer == OTHER[0]]
        other = self._row("(other)", "", _joined(what for what, _ in ways), None)
        moved = other.sent_bytes or other.received_bytes or other.saved_bytes
        return [*found, other] if ways or moved else found

    def _row(self, name: str, kind: str, what: str, why: str | None) -> LayerRow:
        keys = [OTHER] if not kind else [(name, "forward"), (name, "backward")]
        spans = [self.meter.stretches[key] for key in keys if key in self.meter.stretches]
        rows = [self.notes.rows.get(key, (0, 0)) for key in keys]
        return LayerRow(
            name, kind, self.calls.get(name, 0), what, why,
            sum(sent for sent, _ in rows), sum(span.sent_bytes for span in spans),
            sum(received for _, received in rows), sum(span.received_bytes for span in spans),
            None if self.saved is None else self.saved.get(keys[0][0], 0),
        )  # fmt: skip


def way_of(
    module: nn.Module, name: str, ways: Sequence[tuple[str, str, str | None]]
) -> tuple[str, str | None]:
    """(implementation, why not fused) of a layer, by the ways that layers told."""
    mine = [(what, reason) for layer, what, reason in ways if layer == name]
    what = _joined(what for what, _ in mine if what != "plain")
    for _, reason in mine:
        if reason is not None:
            return what, reason
    if what == DENSE or what in _FUSED:
        return what, None
    if adapted(type(module)) is None:
        return what, f"no fused layer stands for {type(module).__name__}"
    return what, own_forward(module)


def _joined(whats: Iterable[str]) -> str:
    return " + ".join(dict.fromkeys(whats)) or DENSE


def _graphs(graph: Any, args: Any, named: Any) -> list[GraphView]:
    graphs = graphs_among((args, named))
    others = [one for one in tree_leaves(graph) if not isinstance(one, GraphArgument)]
    if not graphs or (others and isinstance(graph, (list, tuple))):
        got = type(others[0]).__name__ if others else "an empty list"
        raise TypeError(f"graph: got {got}, expected a sharded graph or a list of blocks")
    return graphs


def _made_rows(model: nn.Module, graphs: list[GraphView]) -> Tensor:
    """[num_src, width] random rows; raises ``ValueError`` where the model says no width."""
    width = _first_width(model)
    if width is None or not all(one.is_homogeneous for one in graphs):
        raise ValueError("inputs: got none, and cannot tell what the model takes: pass its inputs")
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    rows = torch.rand((graphs[0].num_src_nodes(), width), generator=torch.Generator())
    return rows.to(graphs[0].device, like.dtype)


def _first_width(model: nn.Module) -> int | None:
    """Columns that the first module with parameters reads; ``None`` where it does not say."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
        widths = (one.width(module) for one in known_layers())
        if (width := next((one for one in widths if one is not None), None)) is not None:
            return width
        if next(module.parameters(recurse=False), None) is not None:
            return None
    return None


@contextmanager
def layers_logged(model: nn.Module, group: Group) -> Iterator[None]:
    """When the first forward pass of ``model`` inside ends, rank 0 logs what computed its layers.

    Needs :func:`sar.models.mark_layers` around it, which knows the layers; no communication.
    """
    meter = group.meter
    if group.rank != 0 or meter.notes is not None:
        yield
        return
    notes = meter.notes = LayerNotes()

    def end(*_: Any) -> None:
        handle.remove()
        meter.notes = None
        for line in lines_of(model, notes):
            logger.info(line)

    handle = model.register_forward_hook(end)
    try:
        yield
    finally:
        handle.remove()
        meter.notes = None


def lines_of(model: nn.Module, notes: LayerNotes) -> list[str]:
    """``SAGEConv x 3: fused`` and the like, in the order of the modules."""
    counted: Counter[tuple[str, str, str | None]] = Counter()
    names = {layer for layer, _, _ in notes.ways}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if (name or kind) in names:
            what, why = way_of(module, name or kind, notes.ways)
            counted[kind, what, why] += 1
    lines = []
    for (kind, what, why), number in counted.items():
        reason = "" if why is None else f", not fused: {why} (sar.explain shows more)"
        lines.append(f"{kind} x {number}: {what}{reason}")
    return lines
