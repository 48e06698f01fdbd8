"""Runs of a model: on the whole graph in one process, and by ranks that are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sar import registry
from sar.comm import Group, LocalGroup, ThreadGroup, use_group
from sar.files import scratch_folder
from sar.graph import load_partition_data
from sar.models.known import parts_of_fused
from sar.models.prepare import with_norms_of_ranks
from sar.models.validation.compare import Layout
from sar.models.validation.neutral import cast, without_dropout
from sar.models.validation.record import CALL, Event, Recorder, leaves_of
from sar.models.validation.seeds import Jitter, SeedMaker, Seeds, layout_of
from sar.nn.params import ShardedParameter, replicated
from sar.partition.arrays import GraphArrays
from sar.partition.load import PartitionData
from sar.partition.write import write_partitions
from sar.tracing.edge_rows import EdgeRows

STEPS = 2  # the second asks for gradients of the input, and meets what the first has left behind
_TIMEOUT = 30.0  # seconds


@dataclass
class Run:
    """What one rank, or the whole graph's process, has done.

    Attributes:
        events: calls of modules, and the results of the call, of all steps.
        parameters: gradients by name, of each step. rows: names of those that are rows of nodes.
        inputs: gradients of columns of nodes by (step, type, name).
        buffers: at the end, by name.
        error: what it ended with. where: the module whose forward raised.
    """

    events: list[Event] = field(default_factory=list)
    parameters: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    inputs: dict[tuple[int, str, str], Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    error: Exception | None = None
    where: str = CALL


@dataclass(frozen=True)
class Subject:
    """What is validated, and how it is run.

    Attributes:
        model: in torch's default dtype, never run itself; ``make`` makes one of a rank's graph,
            where that is how it is made.
        front_end: see :mod:`sar.registry`. call: of a model and its graph.
        converts: ranks' models get the norms of all ranks.
        looked_into: fused layers whose parts get hooks, by name, so that their own code runs.
        aliased: see :class:`Recorder`.
        seed: of random numbers.
        jittered: a module whose inputs are moved a little, so that no two are equal.
        like: where the graph was made of another: which of its rows are whose, and the gradients
            that the other's results were given.
    """

    model: nn.Module
    make: Callable[[Any], nn.Module] | None
    front_end: str
    call: Callable[[nn.Module, Any], Any]
    converts: bool = False
    looked_into: frozenset[str] = frozenset()
    aliased: bool = False
    seed: int = 0
    jittered: str | None = None
    like: tuple[Layout, Seeds] | None = None

    def reference(self, graph: GraphArrays) -> tuple[Run, Seeds]:
        """A run on the whole graph as the library has it, or as one rank has it, and the gradients
        that it gave its results."""
        given, run, seeds = self._front_end.whole_graph(graph), Run(), Seeds()
        layout = layout_of(graph, np.zeros(graph.total_nodes, np.int64), 1)
        with use_group(LocalGroup()), suppress(Exception):  # which the run keeps
            model = copy.deepcopy(self.model)
            _Steps(self, model, given, run, SeedMaker(layout, seeds, like=self.like), set()).take()
        return run, seeds

    @property
    def _front_end(self) -> Any:
        return registry.front_end(self.front_end)

    def ranks(self, graph: GraphArrays, parts: np.ndarray, seeds: Seeds) -> list[Run]:
        """Runs of the ranks that have ``parts`` of the graph.

        Args:
            seeds: gradients of the results, as the whole graph's run gave them; where there are
                none yet, one rank gives its own.
        """
        count = int(parts.max()) + 1
        runs, layout = [Run() for _ in range(count)], layout_of(graph, parts, count)
        gathered: list[Any] = [None] * count

        def work(group: Group) -> None:
            data = load_partition_data(path)
            with self._noted(runs[group.rank]):
                given = self._front_end.rank_graph(data)
                model = self._model_of(given, data)
                skipped = self._fused_parts(model)
                mine = SeedMaker(layout, seeds, group if count > 1 else None, gathered, self.like)
                _Steps(self, model, given, runs[group.rank], mine, skipped).take()

        with scratch_folder() as folder:
            path = write_partitions(graph, parts, Path(folder) / "parts", "graph", num_parts=count)
            try:
                ThreadGroup.run(count, work, timeout=_TIMEOUT)
            except Exception as error:
                if all(run.error is None for run in runs):
                    raise
                failed = next((run for run in runs if run.error is error), None)
                for run in runs:
                    run.error = error
                    run.where = run.where if failed is None else failed.where
        return runs

    @contextmanager
    def _noted(self, run: Run) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            run.error = error
            raise

    def _model_of(self, given: Any, data: PartitionData) -> nn.Module:
        if self.make is None:
            model = copy.deepcopy(self.model)
        else:
            model = without_dropout(cast(self.make(given), torch.get_default_dtype()))
            own = replicated(self.model) | dict(self.model.named_buffers())
            with torch.no_grad():  # rows of nodes are what they start from
                for name, mine in {**replicated(model), **dict(model.named_buffers())}.items():
                    if mine.shape == own[name].shape:
                        mine.copy_(own[name])
        return with_norms_of_ranks(model) if self.converts else model

    def _fused_parts(self, model: nn.Module) -> set[nn.Module]:
        opened = {
            part
            for name, module in model.named_modules()
            if name in self.looked_into
            for part in module.modules()
        }
        return parts_of_fused(model) - opened


class _Steps:
    """Steps of training without an optimizer, noted in ``run``."""

    def __init__(
        self, subject: Subject, model: nn.Module, given: Any, run: Run, seeds: SeedMaker,
        skipped: set[nn.Module],
    ) -> None:  # fmt: skip
        self.subject, self.model, self.given, self.run = subject, model, given, run
        self.seeds = seeds
        seeds.recorder = self.recorder = Recorder(model, skipped, subject.aliased)
        if subject.jittered is not None:
            jitter = Jitter(seeds.layout, seeds.rank)
            model.get_submodule(subject.jittered).register_forward_pre_hook(
                jitter, with_kwargs=True
            )
        self.columns = {
            (ntype, name): column
            for ntype, columns in registry.front_end(subject.front_end).node_columns(given).items()
            for name, column in dict(columns).items()
            if isinstance(column, Tensor) and column.is_floating_point()
        }
        run.events = self.recorder.events
        run.rows = {n for n, p in model.named_parameters() if isinstance(p, ShardedParameter)}

    def take(self) -> None:
        try:
            with self.recorder.noting(), torch.enable_grad():
                for step in range(STEPS):
                    self._step(step)
        except Exception as error:
            self.run.error, self.run.where = error, self.recorder.open[-1]
            raise
        self.run.buffers = {n: b.detach().clone() for n, b in self.model.named_buffers()}

    def _step(self, step: int) -> None:
        torch.manual_seed(self.subject.seed + step)
        own = registry.front_end(self.subject.front_end).node_columns(self.given)
        leaves = {}
        for (ntype, name), column in self.columns.items():
            leaves[ntype, name] = own[ntype][name] = column.clone().requires_grad_(step > 0)
        for param in self.model.parameters():
            param.grad = None
        out = self.subject.call(self.model, self.given)
        found = [x.materialize() if isinstance(x, EdgeRows) else x for x in leaves_of(out)]
        self.recorder.note("out", CALL, found)
        asked = [x for x in found if isinstance(x, Tensor) and x.requires_grad]
        if asked:
            torch.autograd.backward(asked, self.seeds.of(step, asked))
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                dense = param.grad.to_dense() if param.grad.is_sparse else param.grad
                self.run.parameters[step, name] = dense.detach().clone()
        for (ntype, name), leaf in leaves.items():
            if leaf.grad is not None:
                self.run.inputs[step, ntype, name] = leaf.grad
