"""Runs of a model: on the whole graph in one process, and by ranks that are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
from sar.models.validation.compare import Layout, layout_of
from sar.models.validation.neutral import cast, without_dropout
from sar.models.validation.record import CALL, Recorder, Run, mapped
from sar.models.validation.seeds import SeedMaker, Seeds, moved
from sar.nn.params import ShardedParameter, replicated
from sar.partition.arrays import GraphArrays
from sar.partition.write import write_partitions
from sar.tracing.edge_rows import EdgeRows

STEPS = 2  # the second asks for gradients of the input, and meets what the first has left behind
_TIMEOUT = 30.0  # seconds


@dataclass(frozen=True)
class Subject:
    """What is validated, and how it is run.

    Attributes:
        model: in torch's default dtype, never run itself; ``make`` makes one of a rank's graph,
            where that is how it is made.
        front_end: see :mod:`sar.registry`. call: of a model and its graph.
        converts: ranks' models get the norms of all ranks.
        looked_into: a fused layer whose parts get hooks, so that its own code runs.
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
    looked_into: str | None = None
    aliased: bool = False
    seed: int = 0
    jittered: str | None = None
    like: tuple[Layout, Seeds] | None = None

    def reference(self, graph: GraphArrays) -> tuple[Run, Seeds]:
        """A run on the whole graph as the library has it, and the gradients that it gave its
        results."""
        given, run, seeds = registry.front_end(self.front_end).whole_graph(graph), Run(), Seeds()
        layout = layout_of(graph, np.zeros(graph.total_nodes, np.int64), 1)
        with use_group(LocalGroup()), suppress(Exception), run.noting_errors():
            maker = SeedMaker(layout, seeds, like=self.like)
            self._train(copy.deepcopy(self.model), given, run, maker, set())
        return run, seeds

    def ranks(self, graph: GraphArrays, parts: np.ndarray, seeds: Seeds) -> list[Run]:
        """Runs of the ranks that have ``parts`` of the graph; of all an error, if one has it.

        Args:
            seeds: gradients of the results, as the whole graph's run gave them; where there are
                none yet, one rank gives its own.
        """
        count = int(parts.max()) + 1
        runs, layout = [Run() for _ in range(count)], layout_of(graph, parts, count)
        gathered: list[Any] = [None] * count

        def work(group: Group) -> None:
            data = load_partition_data(path)
            with runs[group.rank].noting_errors():
                given = registry.front_end(self.front_end).rank_graph(data)
                model = self._model_of(given)
                skipped = self._fused_parts(model)
                mine = SeedMaker(layout, seeds, group if count > 1 else None, gathered, self.like)
                self._train(model, given, runs[group.rank], mine, skipped)

        with scratch_folder() as folder:
            path = write_partitions(graph, parts, folder / "parts", "graph", num_parts=count)
            try:
                ThreadGroup.run(count, work, timeout=_TIMEOUT)
            except Exception as error:
                if all(run.error is None for run in runs):
                    raise
                failed = next((run for run in runs if run.error is error), runs[0])
                runs[0].error, runs[0].open = error, failed.open
        return runs

    def _model_of(self, given: Any) -> nn.Module:
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
        opened = () if self.looked_into is None else model.get_submodule(self.looked_into).modules()
        return parts_of_fused(model).difference(opened)

    def _train(
        self, model: nn.Module, given: Any, run: Run, seeds: SeedMaker, skipped: set[nn.Module]
    ) -> None:
        """Steps of training without an optimizer, noted in ``run``."""
        recorder = Recorder(run, model, skipped, self.aliased)
        run.rows = {n for n, p in model.named_parameters() if isinstance(p, ShardedParameter)}
        if self.jittered is not None:
            move = partial(moved, layout=seeds.layout, rank=seeds.rank)
            model.get_submodule(self.jittered).register_forward_pre_hook(
                lambda _, args, kwargs: mapped((args, kwargs), move), with_kwargs=True
            )
        own = registry.front_end(self.front_end).node_columns(given)
        columns = {
            (ntype, name): column
            for ntype, frame in own.items()
            for name, column in dict(frame).items()
            if isinstance(column, Tensor) and column.is_floating_point()
        }
        with recorder.noting(), torch.enable_grad():
            for step in range(STEPS):
                torch.manual_seed(self.seed + step)
                leaves = {key: x.clone().requires_grad_(step > 0) for key, x in columns.items()}
                for (ntype, name), leaf in leaves.items():
                    own[ntype][name] = leaf
                model.zero_grad()
                self._step(step, model, given, run, recorder, seeds)
                grads = {key: x.grad for key, x in leaves.items() if x.grad is not None}
                run.inputs |= {(step, *key): grad for key, grad in grads.items()}
        run.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}

    def _step(
        self, step: int, model: nn.Module, given: Any, run: Run, recorder: Recorder,
        seeds: SeedMaker,
    ) -> None:  # fmt: skip
        found: list[Any] = []
        mapped(self.call(model, given), found.append)
        found = [x.materialize() if isinstance(x, EdgeRows) else x for x in found]
        recorder.note("out", CALL, found)
        asked = [x for x in found if isinstance(x, Tensor) and x.requires_grad]
        if asked:
            grads = seeds.of(step, asked)
            recorder.hears = True
            torch.autograd.backward(asked, grads)
            recorder.hears = False
        for name, param in model.named_parameters():
            if param.grad is not None:
                dense = param.grad.to_dense() if param.grad.is_sparse else param.grad
                run.parameters[step, name] = dense.detach().clone()
