""":func:`validate`: whether a model computes over ranks what it computes in one process."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sar import expect, registry
from sar.comm import Group, LocalGroup, ThreadGroup, use_group
from sar.errors import MistakeWarning
from sar.files import scratch_folder
from sar.graph import load_partition_data
from sar.models.calling import GRAPHS
from sar.models.known import adapted
from sar.models.validation.blame import Comparison, Place
from sar.models.validation.calls import call_on, front_end_of
from sar.models.validation.cuts import near_cut, random_cut
from sar.models.validation.neutral import arrays_in, cast, copied, no_dropout, without_dropout
from sar.models.validation.reasons import FUSED, OTHERS, Changed, Reasons
from sar.models.validation.record import CALL
from sar.models.validation.report import Finding, ModuleRow, Validation
from sar.models.validation.run import Run, Subject
from sar.models.validation.seeds import Seeds, layout_of
from sar.models.validation.source import kind_of, small_graph
from sar.partition.arrays import GraphArrays
from sar.partition.write import write_partitions

ONE_RANK = "one rank"


def validate(
    model: nn.Module | Callable[[Any], nn.Module],
    graph: Any,
    call: Callable[[nn.Module, Any], Any] | None = None,
    parts: int = 2,
    *,
    prepare: bool = False,
    front_end: str | None = None,
    features: str | None = None,
) -> Validation:
    """Whether ``model`` computes over ranks what it computes in one process, and where it does not.

    A copy of the model in float64, without dropout, runs on the whole graph in this process, and on
    parts of it by ranks that are threads: two steps, each a forward and a backward pass in which
    every number of the results has a gradient. All that modules get and give is compared in the
    order of calls, then gradients of results backwards, of parameters and of features. Where
    something differs, the model runs on changed graphs to find out why. A model that does not run
    in float64, as it casts to float32 itself, runs in that.

    Neither the model nor the graph, torch's random numbers or defaults change.

    Args:
        model: in the mode that it is in; or a function that makes it of a rank's graph, where it
            has rows of nodes (:class:`sar.nn.ShardedEmbedding`).
        graph: of DGL, PyG's ``Data`` or ``HeteroData``, ``GraphArrays``, the path of partitions or
            text as of ``sar partition INPUT``. Of a large one a piece is taken.
        call: of a model and a graph, the whole one or a rank's; gives its results, or a loss. By
            default the parameters of ``forward`` say it: the graph alone; graph and features; or
            features and an ``edge_index``; and columns of edges by their names.
        parts: number of ranks. Nodes are cut at random, not evenly.
        prepare: ranks' norms are converted, as by :func:`sar.prepare`.
        front_end: whose graphs the model gets where ``graph`` is of no library: ``"dgl"``,
            ``"pyg"`` or ``"sar"``; by default as ``forward`` says.
        features: name of the column that the model gets; by default ``feat``, PyG's ``x``, or the
            only matrix that nodes have.

    Raises:
        TypeError, ValueError: an argument is none of these, or the model raises on the whole graph,
            too: that error is the cause.
    """
    if not isinstance(model, nn.Module) and not callable(model):
        raise expect.wrong_type(model, "model", "a torch.nn.Module, or a function that makes one")
    if call is not None and not callable(call):
        raise expect.wrong_type(call, "call", "a function of a model and a graph")
    expect.integer(parts, "parts", at_least=2)
    expect.boolean(prepare, "prepare")
    with scratch_folder() as scratch:
        arrays, piece = small_graph(graph, scratch)
        if parts > arrays.total_nodes:
            got = f"{parts} for a graph of {arrays.total_nodes} nodes"
            raise ValueError(f"parts: got {got}, expected at most one for each node")
        name = _front_end(model, graph, front_end)
        made = partial(_subject, model, call=call, name=name, prepare=prepare, features=features)
        return _report(made, arrays, parts, name != "sar", piece)


def _report(
    make: Callable[[GraphArrays], Subject], arrays: GraphArrays, parts: int, has_library: bool,
    piece: str | None,
) -> Validation:  # fmt: skip
    """The comparison in float64, or in float32 where the model casts to that itself."""
    error: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        try:
            with _undisturbed(dtype) as told:
                graph = arrays_in(arrays, dtype)
                return _Validator(make(graph), graph, parts, has_library, piece, told).report()
        except _RaisesOnWholeError as raised:
            error = error or raised
    raise ValueError(str(error)) from (error and error.__cause__)


class _RaisesOnWholeError(Exception):
    """The model raises on the whole graph; the cause is the error."""


def _front_end(model: Any, graph: Any, said: str | None) -> str:
    if said is not None:
        registry.front_end(said)  # raises for another name
    kind = kind_of(graph)
    if said not in (None, kind) and kind is not None:
        raise ValueError(f"front_end: got {said!r} for a graph of {kind!r}, expected none")
    name = kind or said or front_end_of(model)
    if name != "sar" and not hasattr(registry.front_end(name), "whole_graph"):
        raise ValueError(f"front_end: got {name!r}, expected one with whole graphs: dgl, pyg, sar")
    return name


@contextmanager
def _undisturbed(dtype: torch.dtype) -> Iterator[list[warnings.WarningMessage]]:
    """Inside, torch makes ``dtype``; afterwards random numbers and defaults are as they were.
    Warnings are listed, not shown."""
    before, numpy_state, state = torch.get_default_dtype(), np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.set_default_dtype(dtype)
        try:
            yield told
        finally:
            torch.set_default_dtype(before)
            np.random.set_state(numpy_state)
            random.setstate(state)


def _subject(
    model: Any, graph: GraphArrays, call: Any, name: str, prepare: bool, features: str | None
) -> Subject:
    own = GRAPHS if name == "sar" else name
    registry.front_end(own)
    registry.install()  # before functions of dropout are replaced
    make = None if isinstance(model, nn.Module) else model
    call = call or partial(call_on, front_end=own, features=features)
    if make is not None:
        model = _on_one_rank(graph, own, make)
        expect.instance(model, "model", nn.Module, "a function that gives a torch.nn.Module")
    try:
        model = without_dropout(cast(copied(model), torch.get_default_dtype()))
    except RuntimeError as error:
        raise ValueError(f"model: got one that cannot be copied: {error}") from error
    if any(map(is_lazy, model.parameters())):
        model = _initialized(model, graph, own, call)
    return Subject(model, make, own, call, prepare)


def _on_one_rank(graph: GraphArrays, front_end: str, work: Callable[[Any], Any]) -> Any:
    """What ``work`` gives for the graph as one rank has it."""
    nobody = np.zeros(graph.total_nodes, np.int64)

    def run(_: Group) -> Any:
        return work(registry.front_end(front_end).rank_graph(load_partition_data(path)))

    with scratch_folder() as folder:
        path = write_partitions(graph, nobody, folder / "parts", "graph", num_parts=1)
        return ThreadGroup.run(1, run)[0]


def _initialized(model: nn.Module, graph: GraphArrays, front_end: str, call: Any) -> nn.Module:
    """``model`` after a forward pass, which gives lazy parameters their shapes."""
    with torch.no_grad(), use_group(LocalGroup()):
        call(model, registry.front_end(front_end).whole_graph(graph))
    return model


@dataclass
class _Validator:
    """Compares, finds the place, and says why."""

    subject: Subject
    graph: GraphArrays
    num_parts: int
    has_library: bool
    piece: str | None
    told: list[warnings.WarningMessage]

    def report(self) -> Validation:
        with no_dropout():
            whole, seeds = self._reference()
            for cut in (random_cut, near_cut):  # some mistakes do not show in one
                self.parts = cut(self.graph, self.num_parts)
                self.layout = layout_of(self.graph, self.parts, self.num_parts)
                ranks = self.subject.ranks(self.graph, self.parts, seeds)
                compared = Comparison(whole, ranks, self.layout)
                finding = self._failure(ranks) if ranks[0].error else self._finding(compared)
                if finding is not None:
                    break
        return Validation(
            tuple(self._rows(compared)), finding, self.num_parts, self.graph.total_nodes,
            self.graph.total_edges, self.piece,
            self.subject.front_end if self.has_library else ONE_RANK,
            str(torch.get_default_dtype()).removeprefix("torch."), compared.tolerance,
        )  # fmt: skip

    def _reference(self) -> tuple[Run, Seeds]:
        """The run on the whole graph; one rank's where the model does not take a library's."""
        error = None
        if self.has_library:
            run, seeds = self.subject.reference(self.graph)
            if run.error is None:
                return run, seeds
            error = run.error
        run, seeds = self._one_rank(self.subject, self.graph)
        if run.error is None:
            self.has_library = False
            return run, seeds
        error = error or run.error
        raise _RaisesOnWholeError(
            f"model: raises on the whole graph, too: {type(error).__name__}: {error}"
        ) from error

    def _one_rank(self, subject: Subject, graph: GraphArrays) -> tuple[Run, Seeds]:
        seeds = Seeds()
        return subject.ranks(graph, np.zeros(graph.total_nodes, np.int64), seeds)[0], seeds

    def _run(self, subject: Subject, graph: GraphArrays) -> tuple[Run, Seeds]:
        """The run on another whole graph, as the reference's."""
        return subject.reference(graph) if self.has_library else self._one_rank(subject, graph)

    def _compared(self, subject: Subject, graph: GraphArrays) -> Comparison:
        whole, seeds = self._run(subject, graph)
        return Comparison(whole, subject.ranks(graph, self.parts, seeds), self.layout)

    def _failure(self, ranks: list[Run]) -> Finding:
        failed = ranks[0]
        why = f"ranks raise {type(failed.error).__name__}: {failed.error}"
        return self._told(failed.where, "error", why, "", float("inf"))

    def _finding(self, compared: Comparison) -> Finding | None:
        place = self._place(compared, self.subject)
        if place is None:
            return None
        inner = self._inside(place)
        if inner is not None:
            subject, looked, compared = inner
            if looked is None:
                where = _where(place, compared)
                return self._told(place.module, place.what, FUSED, where, place.by)
            place = looked
        elif place.what == "gradient":
            compared = self._compared(replace(self.subject, aliased=True), self.graph)
        return self._explained(place, compared)

    def _place(self, compared: Comparison, subject: Subject) -> Place | None:
        by = compared.results_differ()
        if by > compared.tolerance:
            return compared.first_forward() or Place(CALL, "output", by)
        if (gradient := compared.gradients_differ()) is not None:
            again = compared
            if not subject.aliased:
                again = self._compared(replace(subject, aliased=True), self.graph)
            name, by = gradient
            place = again.first_backward()
            return place or Place(name.rpartition(".")[0], f"gradient of {name}", by)
        if (buffer := compared.buffers_differ()) is not None:
            name, by = buffer
            return Place(name.rpartition(".")[0], f"buffer {name}", by)
        return None

    def _inside(self, place: Place) -> tuple[Subject, Place | None, Comparison] | None:
        """The place inside of a layer that was fused, whose own code runs now."""
        module = self._module(place.module)
        if module is None or place.event is None or adapted(type(module)) is None:
            return None
        if not [part for part in module.modules() if part is not module]:
            return None
        is_gradient = place.what == "gradient"
        subject = replace(self.subject, looked_into=frozenset([place.module]), aliased=is_gradient)
        compared = self._compared(subject, self.graph)
        return subject, self._place(compared, subject), compared

    def _explained(self, place: Place, compared: Comparison) -> Finding:
        is_gradient = place.what == "gradient"
        subject = replace(self.subject, aliased=is_gradient)

        _, seeds = self._run(subject, self.graph)

        def run(made: Changed, seed: int) -> Run:
            changed = replace(subject, seed=seed, like=(made.layout, seeds))
            return self._run(changed, made.graph)[0]

        def jittered(module: str) -> Comparison:
            return self._compared(replace(subject, jittered=module), self.graph)

        reasons = Reasons(self.graph, compared, run, jittered)
        why = reasons.of(place, self._module(place.module))
        if why == OTHERS:
            said = [
                str(one.message) for one in self.told if issubclass(one.category, MistakeWarning)
            ]
            why = "; ".join([why, *dict.fromkeys(said)][:2])
        return self._told(place.module, place.what, why, _where(place, compared), place.by)

    def _told(self, module: str, what: str, why: str, where: str, by: float) -> Finding:
        found = self._module(module)
        kind = "" if found is None else type(found).__name__
        return Finding(module or kind, kind, what, why, where, by)

    def _module(self, name: str) -> nn.Module | None:
        return dict(self.subject.model.named_modules()).get(name)

    def _rows(self, compared: Comparison) -> Iterator[ModuleRow]:
        """A row for each module that was compared, in the order in which they ended."""
        calls = Counter(event.module for event, _ in compared.events if event.kind == "out")
        outputs: dict[str, float | None] = {}
        gradients: dict[str, float | None] = {}
        for event, others in compared.events:
            if event.kind == "out":
                for table, by in (
                    (outputs, compared.forward(event, others)),
                    (gradients, compared.backward(event, others)),
                ):
                    known = [one for one in (table.get(event.module), by) if one is not None]
                    table[event.module] = max(known, default=None)
        modules = dict(self.subject.model.named_modules())
        for name, count in calls.items():
            if name == CALL:
                yield ModuleRow(CALL, "", count, outputs.get(name), gradients.get(name))
                continue
            kind = type(modules[name]).__name__
            yield ModuleRow(name or kind, kind, count, outputs.get(name), gradients.get(name))


def _where(place: Place, compared: Comparison) -> str:
    """Between which modules, or behind which, the place is."""
    if place.event is None:
        return ""
    events = [event for event, _ in compared.events]
    at = next((i for i, one in enumerate(events) if one.key == place.event.key), len(events))
    inner = [e for e in events[:at] if e.inside == place.module and e.kind == "out"]
    if place.what == "gradient":
        inner = [] if place.event.kind == "in" else [place.event]
        later = [e for e in events[at:] if e.inside == place.module and e.kind == "in"]
        after = later[0].module if later else ""
    else:
        after = place.event.module if place.event.kind == "in" else ""
    before = inner[-1].module if inner else ""
    if before and after and before != after:
        return f"between {before} and {after}"
    return f"before {after}" if after else f"after {before}" if before else ""
