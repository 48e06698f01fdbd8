""":func:`validate`: whether a model computes over ranks what it computes in one process."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from sar.models.validation.blame import Comparison, Place
from sar.models.validation.calls import call_on, front_end_of
from sar.models.validation.neutral import arrays_in, neutral, no_dropout
from sar.models.validation.reasons import FUSED, OTHERS, Trial
from sar.models.validation.record import CALL, Run
from sar.models.validation.report import Finding, ModuleRow, Validation
from sar.models.validation.run import Subject, nobody
from sar.models.validation.source import kind_of, near_cut, random_cut, small_graph
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
        own = GRAPHS if name == "sar" else name
        call = call or partial(call_on, front_end=own, features=features)
        make = partial(_subject, model, call, own, name != "sar", prepare)
        return _in_some_dtype(make, arrays, parts, piece)


def _in_some_dtype(
    make: Callable[[GraphArrays], Subject], arrays: GraphArrays, parts: int, piece: str | None
) -> Validation:
    """The comparison in float64, or in float32 where the model casts to that itself."""
    error: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        with _undisturbed(dtype) as told:
            graph = arrays_in(arrays, dtype)
            subject = make(graph)
            with no_dropout():
                subject, whole = _reference(subject, graph)
                if whole.error is None:
                    return _report(subject, whole, graph, parts, piece, told)
                error = error or whole.error
    text = f"{type(error).__name__}: {error}"
    raise ValueError(f"model: raises on the whole graph, too: {text}") from error


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
    model: Any, call: Any, own: str, has_library: bool, prepare: bool, graph: GraphArrays
) -> Subject:
    front = registry.front_end(own)
    registry.install()  # before functions of dropout are replaced
    make = None if isinstance(model, nn.Module) else model
    if make is not None:
        model = _on_one_rank(graph, front, make)
        expect.instance(model, "model", nn.Module, "a function that gives a torch.nn.Module")
    try:
        model = neutral(model)
    except RuntimeError as error:
        raise ValueError(f"model: got one that cannot be copied: {error}") from error
    if any(map(is_lazy, model.parameters())):  # a forward pass gives them their shapes
        with torch.no_grad(), use_group(LocalGroup()):
            call(model, front.whole_graph(graph))
    return Subject(model, make, own, call, has_library, prepare)


def _on_one_rank(graph: GraphArrays, front: Any, work: Callable[[Any], Any]) -> Any:
    """What ``work`` gives for the graph as one rank has it."""
    with scratch_folder() as folder:
        path = write_partitions(graph, nobody(graph), folder / "parts", "graph", num_parts=1)
        return ThreadGroup.run(1, lambda _: work(front.rank_graph(load_partition_data(path))))[0]


def _reference(subject: Subject, graph: GraphArrays) -> tuple[Subject, Run]:
    """The run on the whole graph; one rank's where the model does not take a library's."""
    run = subject.whole(graph)
    if run.error is not None and subject.has_library:
        other = replace(subject, has_library=False)
        if (found := other.whole(graph)).error is None:
            return other, found
    return subject, run


def _report(
    subject: Subject, whole: Run, graph: GraphArrays, count: int, piece: str | None,
    told: list[warnings.WarningMessage],
) -> Validation:  # fmt: skip
    for cut in (random_cut, near_cut):  # some mistakes do not show in one
        trial = Trial(subject, graph, cut(graph, count))
        compared = trial.compared(whole)
        finding = _finding(trial, compared, told)
        if finding is not None:
            break
    return Validation(
        tuple(_rows(compared, trial.modules)), finding, count, graph.total_nodes,
        graph.total_edges, piece, subject.front_end if subject.has_library else ONE_RANK,
        str(torch.get_default_dtype()).removeprefix("torch."), compared.tolerance,
    )  # fmt: skip


def _finding(
    trial: Trial, compared: Comparison, told: list[warnings.WarningMessage]
) -> Finding | None:
    run = compared.ranks[0]
    if run.error is not None:
        place = Place(run.open[-1], "error", float("inf"))
        why = f"ranks raise {type(run.error).__name__}: {run.error}"
        return _told(place, why, compared, trial)
    first = compared.place()
    if first is None:
        return None
    trial = replace(trial, subject=replace(trial.subject, closely=True))
    closely = trial.compared()
    inner = closely.place()
    if inner is None:
        return _told(first, FUSED, compared, trial)
    why = trial.why(inner, closely)
    mistakes = [one.message for one in told if issubclass(one.category, MistakeWarning)]
    why = f"{why}; {mistakes[0]}" if why == OTHERS and mistakes else why
    return _told(inner, why, closely, trial)


def _told(place: Place, why: str, compared: Comparison, trial: Trial) -> Finding:
    found = trial.modules.get(place.module)
    kind = "" if found is None else type(found).__name__
    where = _where(place, compared)
    return Finding(place.module or kind, kind, place.what, why, where, place.by)


def _rows(compared: Comparison, modules: dict[str, nn.Module]) -> Iterator[ModuleRow]:
    """A row for each module that was compared, in the order in which they ended."""
    ends: dict[str, list] = {}
    for pair in compared.events:
        if pair[0].kind == "out":
            ends.setdefault(pair[0].module, []).append(pair)
    for name, pairs in ends.items():
        kind = "" if name == CALL else type(modules[name]).__name__
        found = ([compared.most(pair, grads) for pair in pairs] for grads in (False, True))
        most = (max((by for by in one if by is not None), default=None) for one in found)
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
