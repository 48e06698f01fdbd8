"""Runs of a model: on the whole graph in one process, and by ranks that are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sar import registry
from sar.comm import Group, ThreadGroup
from sar.files import scratch_folder
from sar.graph import load_partition_data
from sar.models.known import parts_of_fused
from sar.models.prepare import with_norms_of_ranks
from sar.models.validation.compare import layout_of
from sar.models.validation.neutral import neutral
from sar.models.validation.record import CALL, Recorder, Run, mapped
from sar.models.validation.seeds import moved, seeds_of
from sar.nn.params import ShardedParameter, replicated
from sar.partition.arrays import GraphArrays
from sar.partition.write import write_partitions
from sar.tracing.edge_rows import EdgeRows

_STEPS = 2  # the second asks for gradients of the input, and meets what the first has left behind
_TIMEOUT = 30.0  # seconds


def nobody(graph: GraphArrays) -> np.ndarray:
    """One part for all nodes."""
    return np.zeros(graph.total_nodes, np.int64)


@dataclass(frozen=True)
class Subject:
    """What is validated, and how it is run."""

    model: nn.Module  # in torch's default dtype, never run itself
    make: Callable[[Any], nn.Module] | None  # of a rank's graph, where that is how it is made
    front_end: str
    call: Callable[[nn.Module, Any], Any]  # of a model and its graph
    has_library: bool  # the whole graph is the front end's library's; else as one rank has it
    converts: bool = False  # ranks' models get the norms of all ranks
    closely: bool = False  # fused layers run their own code, and tensors are views
    seed: int = 0  # of random numbers
    jittered: str | None = None  # a module whose inputs are moved, so that no two are equal

    def whole(self, graph: GraphArrays) -> Run:
        """A run on the whole graph in one process; its error, if it has one."""
        if not self.has_library:
            return self.ranks(graph, nobody(graph))[0]
        front = registry.front_end(self.front_end)
        make = lambda: (copy.deepcopy(self.model), front.whole_graph(graph))  # noqa: E731
        return self._runs(graph, nobody(graph), make)[0]

    def ranks(self, graph: GraphArrays, parts: np.ndarray) -> list[Run]:
        """Runs of the ranks that have ``parts`` of the graph; the first has the error, if any."""

        def make() -> tuple[nn.Module, Any]:
            given = registry.front_end(self.front_end).rank_graph(load_partition_data(path))
            return self._model_of(given), given

        with scratch_folder() as folder:
            count = int(parts.max()) + 1
            path = write_partitions(graph, parts, folder / "parts", "graph", num_parts=count)
            return self._runs(graph, parts, make)

    def _runs(
        self, graph: GraphArrays, parts: np.ndarray, make: Callable[[], tuple[nn.Module, Any]]
    ) -> list[Run]:
        layout, runs = layout_of(graph, parts), [Run() for _ in range(int(parts.max()) + 1)]
        results: list[Any] = [None for _ in runs]

        def work(group: Group) -> None:
            run, move = runs[group.rank], partial(moved, layout, group.rank)
            try:
                self._train(*make(), run, partial(seeds_of, group, results), move)
            except Exception as error:
                run.error = error
                raise

        try:
            ThreadGroup.run(len(runs), work, timeout=_TIMEOUT)
        except Exception as error:
            if all(run.error is None for run in runs):
                raise
            failed = next((run for run in runs if run.error is error), runs[0])
            runs[0].error, runs[0].open = error, failed.open
        return runs

    def _model_of(self, given: Any) -> nn.Module:
        """A rank's model, which starts as the whole graph's."""
        model = copy.deepcopy(self.model) if self.make is None else neutral(self.make(given))
        own = replicated(self.model) | dict(self.model.named_buffers())
        with torch.no_grad():  # rows of nodes are what they start from
            for name, mine in (replicated(model) | dict(model.named_buffers())).items():
                if mine.shape == own[name].shape:
                    mine.copy_(own[name])
        return with_norms_of_ranks(model) if self.converts else model

    def _train(self, model: nn.Module, given: Any, run: Run, seeds: Any, move: Any) -> None:
        """Steps of training without an optimizer, noted in ``run``."""
        skipped = set() if self.closely else parts_of_fused(model)
        recorder = Recorder(run, model, skipped, self.closely, {self.jittered: move})
        frames = registry.front_end(self.front_end).node_columns(given)
        columns = {
            (ntype, name): column
            for ntype, frame in frames.items()
            for name, column in dict(frame).items()
            if isinstance(column, Tensor) and column.is_floating_point()
        }
        for recorder.step in range(_STEPS):
            torch.manual_seed(self.seed + recorder.step)
            leaves: dict[tuple[str, str], Tensor] = {
                ("rows" if isinstance(one, ShardedParameter) else "sum", name): one
                for name, one in model.named_parameters()
            }
            for (ntype, name), column in columns.items():
                leaf = frames[ntype][name] = column.clone().requires_grad_(recorder.step > 0)
                leaves["rows", f"{ntype}/{name}"] = leaf
            model.zero_grad()
            with torch.enable_grad():
                self._backward(model, given, recorder, seeds, leaves.values())
            for (what, name), leaf in leaves.items():
                grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.to_dense()
                run.ends[recorder.step, what, name] = grad.detach().clone()
        for name, buffer in model.named_buffers():
            run.ends[_STEPS, "buffer", name] = buffer.detach().clone()

    def _backward(
        self, model: nn.Module, given: Any, recorder: Recorder, seeds: Any, leaves: Iterable[Tensor]
    ) -> None:
        found: list[Any] = []
        mapped(self.call(model, given), found.append)
        found = [x.materialize() if isinstance(x, EdgeRows) else x for x in found]
        recorder.note("out", CALL, found)
        asked = [x for x in found if isinstance(x, Tensor) and x.requires_grad]
        if asked:
            grads = seeds(asked, [x for x in leaves if x.requires_grad])
            recorder.hears = True
            torch.autograd.backward(asked, grads)
            recorder.hears = False
