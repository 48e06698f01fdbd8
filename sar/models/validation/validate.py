""":func:`validate`: whether a model computes over ranks what it computes in one process."""

from __future__ import annotations

import random
import warnings
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
from sar.comm import LocalGroup, ThreadGroup, use_group
from sar.errors import MistakeWarning
from sar.files import scratch_folder
from sar.graph import load_partition_data
from sar.models.calling import GRAPHS
from sar.models.known import adapted
from sar.models.validation.blame import Comparison, Place
from sar.models.validation.calls import call_on, front_end_of
from sar.models.validation.compare import layout_of
from sar.models.validation.cuts import near_cut, random_cut
from sar.models.validation.neutral import arrays_in, cast, copied, no_dropout, without_dropout
from sar.models.validation.reasons import FUSED, OTHERS, Changed, Reasons
from sar.models.validation.record import CALL, Run
from sar.models.validation.report import Finding, ModuleRow, Validation
from sar.models.validation.run import Subject
from sar.models.validation.seeds import Seeds
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
    front = registry.front_end(own)
    registry.install()  # before functions of dropout are replaced
    make = None if isinstance(model, nn.Module) else model
    call = call or partial(call_on, front_end=own, features=features)
    if make is not None:
        model = _on_one_rank(graph, front, make)
        expect.instance(model, "model", nn.Module, "a function that gives a torch.nn.Module")
    try:
        model = without_dropout(cast(copied(model), torch.get_default_dtype()))
    except RuntimeError as error:
        raise ValueError(f"model: got one that cannot be copied: {error}") from error
    if any(map(is_lazy, model.parameters())):  # a forward pass gives them their shapes
        with torch.no_grad(), use_group(LocalGroup()):
            call(model, front.whole_graph(graph))
    return Subject(model, make, own, call, prepare)


def _on_one_rank(graph: GraphArrays, front: Any, work: Callable[[Any], Any]) -> Any:
    """What ``work`` gives for the graph as one rank has it."""
    with scratch_folder() as folder:
        path = write_partitions(graph, _nobody(graph), folder / "parts", "graph", num_parts=1)
        return ThreadGroup.run(1, lambda _: work(front.rank_graph(load_partition_data(path))))[0]


def _nobody(graph: GraphArrays) -> np.ndarray:
    """One part for all nodes."""
    return np.zeros(graph.total_nodes, np.int64)


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
                finding = self._failure(ranks[0]) or self._finding(compared)
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
        found = self._run(self.subject, self.graph)
        error = found[0].error
        if error is not None and self.has_library:
            self.has_library = False
            found = self._run(self.subject, self.graph)
        if found[0].error is None:
            return found
        raise _RaisesOnWholeError(
            f"model: raises on the whole graph, too: {type(error).__name__}: {error}"
        ) from error

    def _run(self, subject: Subject, graph: GraphArrays) -> tuple[Run, Seeds]:
        """The run on a whole graph, of a library or as one rank has it."""
        if self.has_library:
            return subject.reference(graph)
        seeds = Seeds()
        return subject.ranks(graph, _nobody(graph), seeds)[0], seeds

    def _compared(self, **changes: Any) -> Comparison:
        """Whole graph and ranks again, of a subject that is changed so."""
        subject = replace(self.subject, **changes)
        whole, seeds = self._run(subject, self.graph)
        return Comparison(whole, subject.ranks(self.graph, self.parts, seeds), self.layout)

    def _failure(self, run: Run) -> Finding | None:
        if run.error is None:
            return None
        why = f"ranks raise {type(run.error).__name__}: {run.error}"
        return self._told(Place(run.open[-1], "error", float("inf")), why, "")

    def _finding(self, compared: Comparison) -> Finding | None:
        place = self._place(compared)
        if place is None:
            return None
        aliased = place.what == "gradient"
        if self._is_fused(place):  # the place is inside, where its own code runs
            compared = self._compared(looked_into=place.module, aliased=aliased)
            inner = self._place(compared, looked_into=place.module, aliased=aliased)
            if inner is None:
                return self._told(place, FUSED, _where(place, compared))
            place = inner
        elif aliased:
            compared = self._compared(aliased=True)
        return self._told(place, self._reason(place, compared), _where(place, compared))

    def _place(self, compared: Comparison, **changes: Any) -> Place | None:
        by = compared.results_differ()
        if by > compared.tolerance:
            return compared.first_forward() or Place(CALL, "output", by)
        if (gradient := compared.gradients_differ()) is not None:
            if not changes.get("aliased"):
                compared = self._compared(**changes | {"aliased": True})
            name, by = gradient
            what = f"gradient of {name}"
            return compared.first_backward() or Place(name.rpartition(".")[0], what, by)
        if (buffer := compared.buffers_differ()) is not None:
            name, by = buffer
            return Place(name.rpartition(".")[0], f"buffer {name}", by)
        return None

    def _is_fused(self, place: Place) -> bool:
        """Whether it is a layer that was fused, which has modules of its own."""
        module = self._module(place.module)
        if module is None or place.event is None or adapted(type(module)) is None:
            return False
        return any(part is not module for part in module.modules())

    def _reason(self, place: Place, compared: Comparison) -> str:
        subject = replace(self.subject, aliased=place.what == "gradient")
        _, seeds = self._run(subject, self.graph)

        def run(made: Changed, seed: int) -> Run:
            changed = replace(subject, seed=seed, like=(made.layout, seeds))
            return self._run(changed, made.graph)[0]

        def jittered(module: str) -> Comparison:
            return self._compared(aliased=subject.aliased, jittered=module)

        why = Reasons(self.graph, compared, run, jittered).of(place, self._module(place.module))
        mistakes = [one.message for one in self.told if issubclass(one.category, MistakeWarning)]
        return f"{why}; {mistakes[0]}" if why == OTHERS and mistakes else why

    def _told(self, place: Place, why: str, where: str) -> Finding:
        found = self._module(place.module)
        kind = "" if found is None else type(found).__name__
        return Finding(place.module or kind, kind, place.what, why, where, place.by)

    def _module(self, name: str) -> nn.Module | None:
        return dict(self.subject.model.named_modules()).get(name)

    def _rows(self, compared: Comparison) -> Iterator[ModuleRow]:
        """A row for each module that was compared, in the order in which they ended."""
        ends: dict[str, list] = {}
        for event, others in compared.events:
            if event.kind == "out":
                ends.setdefault(event.module, []).append((event, others))
        for name, pairs in ends.items():
            differences = (
                [by for pair in pairs if (by := compare(*pair)) is not None]
                for compare in (compared.forward, compared.backward)
            )
            kind = "" if name == CALL else type(self._module(name)).__name__
            most = (max(found, default=None) for found in differences)
            yield ModuleRow(name or kind, kind, len(pairs), *most)


def _where(place: Place, compared: Comparison) -> str:
    """Between which modules, or behind which, the place is."""
    if place.event is None:
        return ""
    events = [event for event, _ in compared.events]
    at = next((i for i, one in enumerate(events) if one.key == place.event.key), len(events))
    inner = [e for e in events[:at] if e.inside == place.module and e.kind == "out"]
    begins = place.event.kind == "in"
    after = place.event.module if begins else ""
    if place.what == "gradient":
        inner = [] if begins else [place.event]
        later = (e.module for e in events[at:] if e.inside == place.module and e.kind == "in")
        after = next(later, "")
    before = inner[-1].module if inner else ""
    if before and after and before != after:
        return f"between {before} and {after}"
    return f"before {after}" if after else f"after {before}" if before else ""
