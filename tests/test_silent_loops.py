"""Training loops with a mistake that torch alone would train on: told; right loops are not.

Each mistake is an error on every rank, or a warning, that names the line to change.
"""

from __future__ import annotations

import copy
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl.function as fn
import dgl.nn
import pytest
import torch
import torch.nn.functional as F
from harness import run_threads
from harness.graphs import NUM_CLASSES, NUM_FEATURES, mixed
from harness.nursery import Nursery
from harness.parts import Cutter
from harness.pool import WorkerPool
from test_examples import ENVIRONMENT, free_ports, wait_for_all
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import sar
from sar.comm import Group


class OfDGL(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(NUM_FEATURES, 8, "mean")
        self.last = dgl.nn.SAGEConv(8, NUM_CLASSES, "mean")

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.last(graph, self.first(graph, x).relu())


class OfMyOwn(nn.Module):
    """Torch's modules around ``update_all``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 8)
        self.last = nn.Linear(8, NUM_CLASSES)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = self.first(x).relu()
            graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
            return self.last(graph.ndata["h"])


class Aggregating(nn.Module):
    """Only ``graph.aggregate``, of rows without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.layer(graph.aggregate(x, "mean"))


MODELS = {"dgl": OfDGL, "own": OfMyOwn, "aggregate": Aggregating}


@dataclass
class Loop:
    """A loop of somebody's own; each method is a line that may be wrong."""

    model: nn.Module
    graph: Any
    x: Tensor
    labels: Tensor
    mask: Tensor
    group: Group
    lr: float = 0.01

    def start(self) -> None:
        sar.sync_params(self.model)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=self.lr)

    def loss(self) -> Tensor:
        values = F.cross_entropy(self.model(self.graph, self.x), self.labels, reduction="none")
        return sar.global_mean(values, self.mask)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        self.loss().backward()
        sar.gather_grads(self.model)
        optimizer.step()

    def run(self, steps: int) -> None:
        self.start()
        optimizer = self.optimizer()
        for _ in range(steps):
            self.step(optimizer)


def nothing(*_: Any) -> None:
    return None


class NotSynchronized(Loop):
    start = nothing


class Prepared(Loop):
    def start(self) -> None:
        sar.prepare(self.model, self.graph)


class NotSummed(Loop):
    def step(self, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.loss().backward()
        optimizer.step()


class NotSummedNorPrepared(NotSummed):
    start = nothing


class PreparedNotSummed(NotSummed, Prepared):
    pass


class LocalLoss(NotSummed):
    def loss(self) -> Tensor:
        out = self.model(self.graph, self.x)
        return F.cross_entropy(out[self.mask], self.labels[self.mask], reduction="sum")


class LayerAdded(Prepared):
    """After ``prepare``, with other numbers on each rank."""

    def start(self) -> None:
        super().start()
        self.model.last = type(self.model.last)(8, NUM_CLASSES, *self.kind())
        with torch.no_grad():
            for parameter in self.model.last.parameters():
                parameter.add_(self.group.rank)

    def kind(self) -> tuple[str, ...]:
        return ("mean",) if isinstance(self.model, OfDGL) else ()


class LayerAddedLate(Loop):
    """After 35 steps: said at the next sum, not fifteen steps later."""

    def run(self, steps: int) -> None:
        self.start()
        optimizer = self.optimizer()
        for number in range(steps):
            if number == 35:
                self.model.extra = nn.Parameter(torch.full((3,), float(self.group.rank)))
            assert number < 37
            self.step(optimizer)


class OtherRate(Loop):
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.01 * (1 + self.group.rank))


class Twice(Loop):
    def step(self, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.loss().backward()
        sar.gather_grads(self.model)
        sar.gather_grads(self.model)
        optimizer.step()


class NoZeroGrad(Loop):
    def step(self, optimizer: Any) -> None:
        self.loss().backward()
        sar.gather_grads(self.model)
        optimizer.step()


class OverlappedNoZeroGrad(Loop):
    def step(self, optimizer: Any) -> None:
        with sar.overlap_gradients(self.model):
            self.loss().backward()
        optimizer.step()


class ClippedBefore(Loop):
    def step(self, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.loss().backward()
        clip_grad_norm_(self.model.parameters(), 1e-3)
        sar.gather_grads(self.model)
        optimizer.step()


class SecondModel(Loop):
    """A head that nobody synchronizes, beside a model that is."""

    def start(self) -> None:
        super().start()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.group.rank)
            self.head = nn.Linear(NUM_CLASSES, NUM_CLASSES)

    def loss(self) -> Tensor:
        logits = self.head(self.model(self.graph, self.x))
        return sar.global_mean(F.cross_entropy(logits, self.labels, reduction="none"), self.mask)


SYNC, GATHER = r"sar.sync_params\(model\)", r"sar.gather_grads\(model\)"
NOBODY = f"was not given to .*{SYNC} .*{GATHER}"
ZERO = r"optimizer.zero_grad\(\) before the next backward"

# model, loop, error, words, steps until it is told
WRONG: list[tuple[str, type[Loop], type[Exception], str, int]] = [
    ("dgl", NotSynchronized, sar.DriftError, f"nobody called {SYNC} before the first", 1),
    ("own", NotSynchronized, sar.DriftError, f"nobody called {SYNC} before the first", 1),
    ("dgl", NotSummed, sar.DriftError, f"nobody called {GATHER} after each", 2),
    ("own", NotSummed, sar.DriftError, NOBODY, 2),
    ("aggregate", NotSummed, sar.DriftError, NOBODY, 2),
    ("dgl", NotSummedNorPrepared, sar.DriftError, f"{SYNC} .* and {GATHER}", 2),
    ("own", NotSummedNorPrepared, sar.DriftError, NOBODY, 2),
    ("aggregate", NotSummedNorPrepared, sar.DriftError, NOBODY, 2),
    ("own", PreparedNotSummed, sar.DriftError, f"nobody called {GATHER}", 2),
    ("dgl", LocalLoss, sar.DriftError, f"nobody called {GATHER}", 2),
    ("own", LocalLoss, sar.DriftError, NOBODY, 5),
    ("dgl", LayerAdded, sar.DriftError, f"model: last.* nobody called {SYNC}", 1),
    ("own", LayerAdded, sar.DriftError, f"model: last.* nobody called {SYNC}", 1),
    ("own", LayerAddedLate, sar.DriftError, f"model: extra .*added after {SYNC}", 36),
    ("dgl", OtherRate, sar.DriftError, r"the same options \(learning rate\)", 2),
    ("dgl", SecondModel, sar.DriftError, NOBODY, 1),
    ("dgl", Twice, ValueError, f"called again without a backward.* {ZERO}", 1),
    ("own", NoZeroGrad, ValueError, f"summed over ranks before.* {ZERO}", 2),
    ("dgl", OverlappedNoZeroGrad, ValueError, f"summed over ranks before.* {ZERO}", 2),
    ("dgl", ClippedBefore, sar.MistakeWarning, f"clip, .* after {GATHER}", 2),
]  # fmt: skip


def train(group: Group, path: str, kind: str, loop: type[Loop], steps: int) -> str:
    """What a loop ends with on this rank."""
    data = sar.load_partition_data(path)
    graph = sar.construct_full_graph(data)
    columns = [data.node_features[f"_N/{name}"] for name in ("feat", "label", "train_mask")]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(group.rank)
        model = MODELS[kind]()
    try:
        loop(model, graph, *columns, group).run(steps)
    except (ValueError, sar.DriftError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture
def path(partitioned: Cutter) -> str:
    return partitioned(mixed(), 2, "random")


def ends(path: str, *case: Any) -> tuple[list[str], list[str]]:
    """What the ranks end with, and warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = run_threads(2, train, path, *case)
    return found, [str(one.message) for one in told if one.category is sar.MistakeWarning]


@pytest.mark.parametrize("kind, loop, error, words, steps", WRONG)
def test_a_mistake_is_told(
    kind: str, loop: type[Loop], error: type[Exception], words: str, steps: int, path: str
) -> None:
    found, told = ends(path, kind, loop, steps)
    if error is sar.MistakeWarning:
        assert found == ["", ""] and len(told) == 1 and re.search(words, told[0]), (found, told)
        return
    assert not told and all(re.search(words, one, re.S) for one in found), found
    assert all(one.startswith(error.__name__) for one in found), found
    if steps > 1:
        assert ends(path, kind, loop, steps - 1)[0] == ["", ""], "earlier than the table says"


def test_in_processes(path: str, processes: WorkerPool) -> None:
    words = next(words for kind, one, _, words, _ in WRONG if one is NotSummed)
    for found in processes.run(2, train, path, "dgl", NotSummed, 4):
        assert re.search(words, found), found


# ---------------------------------------------------------------- right loops


class ZeroInPlace(Loop):
    """And before backward, after forward."""

    def step(self, optimizer: Any) -> None:
        loss = self.loss()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        sar.gather_grads(self.model)
        optimizer.step()


class Accumulating(Loop):
    def step(self, optimizer: Any) -> None:
        for _ in range(3):
            self.loss().backward()
        sar.gather_grads(self.model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


class Scaled(Loop):
    """AMP's scaler; gradients of all ranks are scaled alike before they are summed."""

    def run(self, steps: int) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=96.0, growth_interval=2)
        super().run(steps)

    def step(self, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        self.scaler.unscale_(optimizer)
        sar.gather_grads(self.model)
        self.scaler.step(optimizer)
        self.scaler.update()


class ScaledAsDocumented(Scaled):
    def step(self, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        sar.gather_grads(self.model)
        self.scaler.unscale_(optimizer)
        clip_grad_norm_(self.model.parameters(), 1e-3)
        self.scaler.step(optimizer)
        self.scaler.update()


class DividedByHand(Loop):
    def step(self, optimizer: Any) -> None:
        optimizer.zero_grad()
        for _ in range(3):
            self.loss().backward()
        for param in self.model.parameters():
            param.grad /= 3
        sar.gather_grads(self.model)
        clip_grad_norm_(self.model.parameters(), 1e-3)
        optimizer.step()


class Frozen(Loop):
    def start(self) -> None:
        super().start()
        for param in self.model.first.parameters():
            param.requires_grad_(False)

    def step(self, optimizer: Any) -> None:
        super().step(optimizer)
        if self.group.losses == 5:  # unfrozen on the way
            self.model.requires_grad_(True)


class Overlapped(Loop):
    def run(self, steps: int) -> None:
        self.start()
        optimizer, overlapped = self.optimizer(), sar.overlap_gradients(self.model)
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=False)
            self.loss().backward()
            overlapped.backward(self.loss())
            clip_grad_norm_(self.model.parameters(), 1e-3)
            optimizer.step()


class Momentum(Loop):
    """Nesterov's writes into gradients."""

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, nesterov=True)


class RowsOfItsOwn(Loop):
    """Learned rows of this rank's nodes: sharded, and a plain parameter that nobody sums."""

    def start(self) -> None:
        super().start()
        number = self.graph.num_nodes()
        self.rows = nn.Parameter(torch.rand(number, NUM_FEATURES) * (1 + self.group.rank))
        self.table = sar.nn.ShardedEmbedding(self.graph, "_N", NUM_FEATURES)

    def optimizer(self) -> torch.optim.Optimizer:
        params = [*self.model.parameters(), self.rows, *self.table.parameters()]
        return torch.optim.SGD(params, lr=0.01)

    def loss(self) -> Tensor:
        kept, self.x = self.x, self.x + self.rows + self.table.weight
        try:
            return super().loss()
        finally:
            self.x = kept


class Shared(Loop):
    """Two models that share a layer, trained in turn."""

    def start(self) -> None:
        self.other = type(self.model)()
        self.other.first = self.model.first
        sar.sync_params(self.model)
        sar.sync_params(self.other)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.model.parameters(), *self.other.last.parameters()], lr=0.01)

    def step(self, optimizer: Any) -> None:
        for model in (self.other, self.model):
            optimizer.zero_grad()
            values = F.cross_entropy(model(self.graph, self.x), self.labels, reduction="none")
            sar.global_mean(values, self.mask).backward()
            sar.gather_grads(model)
            optimizer.step()


class InPieces(Loop):
    """Gradients summed layer by layer."""

    def step(self, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        self.loss().backward()
        sar.gather_grads(self.model.first)
        sar.gather_grads(self.model.last)
        optimizer.step()


def halve(param: Any) -> None:
    param.grad.mul_(0.5)


class WithHooks(Loop):
    def start(self) -> None:
        super().start()
        for param in self.model.parameters():
            param.register_hook(lambda grad: grad * 2)
            param.register_post_accumulate_grad_hook(halve)


class SummedByHand(Loop):
    """As somebody does it who has always done so."""

    def step(self, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.loss().backward()
        for param in self.model.parameters():
            self.group.all_reduce(param.grad)
        optimizer.step()


class Evaluating(Loop):
    """Metrics with gradients on, and without."""

    def step(self, optimizer: Any) -> None:
        super().step(optimizer)
        sar.global_mean((self.model(self.graph, self.x).argmax(1) == self.labels).float())
        with torch.no_grad():
            self.loss()


class Exporting(Loop):
    """Rank 0 alone loads the best numbers in the end."""

    def run(self, steps: int) -> None:
        best = copy.deepcopy(self.model.state_dict())
        super().run(steps)
        if self.group.rank == 0:
            self.model.load_state_dict(best)
        KEPT.append(self.model)


class Compiled(Loop):
    """With a hook on a parameter of a compiled part, as on any."""

    def run(self, steps: int) -> None:
        self.model.last.compile(backend="aot_eager")
        super().run(steps)
        torch._dynamo.reset()


KEPT: list[nn.Module] = []
RIGHT: list[tuple[str, type[Loop]]] = [
    *[(kind, loop) for kind in MODELS for loop in (Loop, Prepared)],
    *[("dgl", loop) for loop in (ZeroInPlace, Accumulating, Scaled)],
    *[("own", loop) for loop in (ScaledAsDocumented, DividedByHand, Frozen, Overlapped, Momentum)],
    *[("dgl", loop) for loop in (RowsOfItsOwn, Shared, InPieces, WithHooks, SummedByHand)],
    *[("own", loop) for loop in (RowsOfItsOwn, SummedByHand, Evaluating, Exporting)],
]


@pytest.mark.parametrize("kind, loop", RIGHT)
def test_a_right_loop_is_left_alone(kind: str, loop: type[Loop], path: str) -> None:
    try:
        assert ends(path, kind, loop, 10) == (["", ""], [])
    finally:
        KEPT.clear()


@pytest.mark.parametrize("loop", [Compiled, Scaled, Overlapped])
def test_right_loops_in_processes(loop: type[Loop], path: str, processes: WorkerPool) -> None:
    assert processes.run(2, strictly, path, "own", loop, 5) == ["", ""]


def strictly(group: Group, *case: Any) -> str:
    """The same where a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", sar.MistakeWarning)
        return train(group, *case)


def test_looking_costs_six_collectives_in_fifty_steps(path: str) -> None:
    """And one in every fifty later."""

    def case(group: Group, path: str) -> list[int]:
        graph = sar.construct_full_graph(sar.load_partition_data(path))
        model, counts = sar.prepare(OfDGL(), graph), []
        x = torch.ones(graph.num_nodes(), NUM_FEATURES)
        for _ in range(110):
            model.zero_grad()
            before = group.counters.collectives
            sar.global_mean(model(graph, x)).backward()
            sar.gather_grads(model)
            counts.append(group.counters.collectives - before)
        return counts

    for counts in run_threads(2, case, path):
        usual = min(counts)
        more = [step for step, count in enumerate(counts, 1) if count > usual]
        assert set(more) <= {1, 2, 4, 8, 16, 32, 50, 100}, more
        assert [counts[step - 1] - usual for step in more[2:]] == [1] * len(more[2:])


# ---------------------------------------------------------------- the end of a group


def five_epochs(group: Group, rate: float) -> nn.Module:
    """A loop whose last step differs between ranks."""
    model = nn.Linear(2, 2)
    sar.sync_params(model)
    for _ in range(5):
        model.zero_grad()
        sar.global_mean(model(torch.ones(1, 2))).backward()
        sar.gather_grads(model)
    with torch.no_grad():
        model.weight -= rate * (1 + group.rank) * model.weight.grad
    return model


def test_threads_that_end_unequal() -> None:
    with pytest.warns(sar.MistakeWarning, match="Linear: at the end weight of rank 1 is not"):
        run_threads(2, five_epochs, 0.1)
    run_threads(2, five_epochs, 0.0)


SCRIPT = """
import os, sys, time, torch, sar
from torch import nn
group = sar.initialize_comms(timeout=20)
model = nn.Linear(2, 2)
how, late = sys.argv[1:]
if how != "unequal":
    sar.sync_params(model)
for _ in range(5):
    model.zero_grad()
    sar.global_mean(model(torch.ones(1, 2))).backward()
    sar.gather_grads(model)
    with torch.no_grad():
        model.weight -= 0.1 * model.weight.grad
with torch.no_grad():
    model.weight -= 0.1 * (group.rank if how == "drifts" else 1)
if late == "late" and group.rank == 1:
    time.sleep(3)
begin = time.monotonic()
if how != "exits":
    sar.shutdown()
    assert time.monotonic() - begin < 10
print("done", flush=True)
"""


@pytest.mark.system
@pytest.mark.parametrize("how, late, told", [
    ("drifts", "soon", True), ("drifts", "late", False), ("equal", "soon", False),
])  # fmt: skip
def test_processes_that_end_unequal(
    how: str, late: str, told: bool, nursery: Nursery, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ranks = []
    try:
        (port,) = free_ports(1)
        for rank in range(2):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
            env = {**ENVIRONMENT, **place, "MASTER_ADDR": "127.0.0.1"}
            ranks.append(nursery.start([str(script), how, late], env, tmp_path))
        wait_for_all(ranks, seconds=60)
        assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].text("err")
        words = "MistakeWarning: Linear: at the end weight of rank 1 is not the same as rank 0's"
        assert (words in ranks[0].text("err")) == told
        assert "MistakeWarning" not in ranks[1].text("err")
    finally:
        for rank in ranks:
            rank.kill()
