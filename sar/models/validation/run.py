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

_STEPS = 2  # the second asks for gradients of the input, and meets what the first has left behind
_TIMEOUT = 30.0  # seconds


@dataclass(frozen=True)
class Subject:
    """What is validated, and how it is run.

    Attributes:
        model: in torch's default dtype, never run itself; ``make`` makes one of a rank's graph,
            where that is how it is made.
        front_end: see :mod:`sar.registry`. call: of a model and its graph.
        has_library: the whole graph is the front end's library's; else as one rank has it.
        converts: ranks' models get the norms of all ranks.
        closely: parts of fused layers get hooks, so that their own code runs, and tensors are
            views, see :class:`Recorder`.
        seed: of random numbers.
        jittered: a module whose inputs are moved a little, so that no two are equal.
    """

    model: nn.Module
    make: Callable[[Any], nn.Module] | None
    front_end: str
    call: Callable[[nn.Module, Any], Any]
    has_library: bool
    converts: bool = False
    closely: bool = False
    seed: int = 0
    jittered: str | None = None

    def whole(self, graph: GraphArrays, like: tuple[Layout, Seeds] | None = None) -> Run:
        """A run on the whole graph; its error, if it has one.

        Args:
            like: where the graph was made of another: which of its rows are whose, and the
                gradients that the other's results were given.
        """
        nobody = np.zeros(graph.total_nodes, np.int64)
        layout, seeds = like or (layout_of(graph, nobody), None)
        if not self.has_library:
            return self._ranks(graph, nobody, layout, seeds)[0]
        run, front = Run(), registry.front_end(self.front_end)
        with use_group(LocalGroup()) as group, suppress(Exception), run.noting_errors():
            maker = SeedMaker(layout, seeds, group, [None])
            self._train(copy.deepcopy(self.model), front.whole_graph(graph), run, maker)
        return run

    def ranks(self, graph: GraphArrays, parts: np.ndarray, seeds: Seeds) -> list[Run]:
        """Runs of the ranks that have ``parts`` of the graph, whose results get their share of
        ``seeds``; of all an error, if one has it."""
        return self._ranks(graph, parts, layout_of(graph, parts), seeds)

    def _ranks(
        self, graph: GraphArrays, parts: np.ndarray, layout: Layout, seeds: Seeds | None
    ) -> list[Run]:
        count = int(parts.max()) + 1
        runs, gathered = [Run() for _ in range(count)], [None] * count

        def work(group: Group) -> None:
            data = load_partition_data(path)
            with runs[group.rank].noting_errors():
                given = registry.front_end(self.front_end).rank_graph(data)
                maker = SeedMaker(layout, seeds, group, gathered)
                self._train(self._model_of(given), given, runs[group.rank], maker)

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
        """A rank's model, which starts as the whole graph's."""
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

    def _train(self, model: nn.Module, given: Any, run: Run, seeds: SeedMaker) -> None:
        """Steps of training without an optimizer, noted in ``run``."""
        skipped = set() if self.closely else parts_of_fused(model)
        recorder = Recorder(run, model, skipped, self.closely)
        if self.jittered is not None:
            move = partial(moved, layout=seeds.layout, rank=seeds.rank)
            model.get_submodule(self.jittered).register_forward_pre_hook(
                lambda _, args, kwargs: mapped((args, kwargs), move), with_kwargs=True
            )
        frames = registry.front_end(self.front_end).node_columns(given)
        columns = {
            (ntype, name): column
            for ntype, frame in frames.items()
            for name, column in dict(frame).items()
            if isinstance(column, Tensor) and column.is_floating_point()
        }
        with recorder.noting(), torch.enable_grad():
            for recorder.step in range(_STEPS):
                torch.manual_seed(self.seed + recorder.step)
                leaves = {
                    k: x.clone().requires_grad_(recorder.step > 0) for k, x in columns.items()
                }
                for (ntype, name), leaf in leaves.items():
                    frames[ntype][name] = leaf
                self._step(model, given, run, recorder, seeds, leaves)
        run.ends |= {
            (_STEPS, "buffer", name): one.detach().clone() for name, one in model.named_buffers()
        }

    def _step(
        self, model: nn.Module, given: Any, run: Run, recorder: Recorder, seeds: SeedMaker,
        columns: dict[tuple[str, str], Tensor],
    ) -> None:  # fmt: skip
        model.zero_grad()
        found: list[Any] = []
        mapped(self.call(model, given), found.append)
        found = [x.materialize() if isinstance(x, EdgeRows) else x for x in found]
        recorder.note("out", CALL, found)
        leaves = {
            ("rows" if isinstance(p, ShardedParameter) else "sum", name): p
            for name, p in model.named_parameters()
        } | {("rows", "/".join(key)): x for key, x in columns.items()}
        asked = [x for x in found if isinstance(x, Tensor) and x.requires_grad]
        if asked:
            learned = [x for x in leaves.values() if x.requires_grad]
            grads = run.seeds[recorder.step] = seeds.of(recorder.step, asked, learned)
            recorder.hears = True
            torch.autograd.backward(asked, grads)
            recorder.hears = False
        for (what, name), leaf in leaves.items():
            grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.to_dense()
            run.ends[recorder.step, what, name] = grad.detach().clone()
