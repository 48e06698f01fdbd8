"""Autocast, gradient scaling and ``torch.compile``: what works, and what says that it does not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import dgl.function as fn
import dgl.nn
import pytest
import torch
import torch.nn.functional as F
from harness import run_threads
from harness.graphs import NUM_CLASSES, NUM_FEATURES, mixed
from harness.parts import Cutter
from torch import Tensor, nn

import sar
from sar.comm import Group, use_group

LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "sage": lambda i, o: dgl.nn.SAGEConv(i, o, "mean"),
    "pool": lambda i, o: dgl.nn.SAGEConv(i, o, "pool"),
    "gcn": lambda i, o: dgl.nn.GraphConv(i, o, allow_zero_in_degree=True),
    "gin": lambda i, o: dgl.nn.GINConv(nn.Linear(i, o)),
    "gat": lambda i, o: dgl.nn.GATConv(i, o // 2, 2, allow_zero_in_degree=True),
    "gatv2": lambda i, o: dgl.nn.GATv2Conv(i, o // 2, 2, allow_zero_in_degree=True),
    "dot": lambda i, o: dgl.nn.DotGatConv(i, o // 2, 2, allow_zero_in_degree=True),
}


class Model(nn.Module):
    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = layer(NUM_FEATURES, 8), layer(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, NUM_CLASSES))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(graph, x).flatten(1)).relu())
        return self.head(self.last(graph, hidden).flatten(1))


def state_of(kind: str) -> dict[str, Tensor]:
    """The same first parameters for all ranks and runs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(LAYERS[kind]).state_dict()


def train(
    group: Group,
    path: str,
    model: nn.Module,
    call: Callable[..., Tensor],
    scaler: torch.amp.GradScaler | None = None,
    autocast: bool = False,
) -> list[float]:
    data = sar.load_partition_data(path)
    graph, nodes = sar.construct_full_graph(data), data.node_features
    sar.prepare(model, graph)
    sar.manual_seed(0)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            values = F.cross_entropy(
                call(graph, nodes["_N/feat"]), nodes["_N/label"], reduction="none"
            )
            loss = sar.global_mean(values, nodes["_N/train_mask"])
        optimizer.zero_grad()
        (loss if scaler is None else scaler.scale(loss)).backward()
        sar.gather_grads(model)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    sar.check(model, optimizer)
    return losses


def with_state(kind: str) -> nn.Module:
    model = Model(LAYERS[kind])
    model.load_state_dict(states[kind])
    return model


states = {kind: state_of(kind) for kind in LAYERS}


@pytest.mark.parametrize("kind", LAYERS)
def test_autocast_to_bfloat16(kind: str, partitioned: Cutter) -> None:
    """Close to float32, on one rank and on several; known layers say once that their own code
    runs."""

    def case(group: Group, path: str, autocast: bool) -> list[float]:
        model = with_state(kind)
        return train(group, path, model, model, autocast=autocast)

    want = run_threads(1, case, partitioned(mixed(), 1), False)[0]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        alone = run_threads(1, case, partitioned(mixed(), 1), True)[0]
        first, second = run_threads(2, case, partitioned(mixed(), 2, "random"), True)
    words = {str(one.message) for one in told}
    assert first == second == pytest.approx(alone, rel=5e-3)
    assert alone == pytest.approx(want, rel=2e-2) and alone != want
    assert len(words) == (kind != "dot") and len(told) == 6 * len(words), "a layer, once on a rank"
    assert all("its own code runs, not the fused layer: autocast is on" in one for one in words)


def test_all_ranks_skip_a_step_that_overflows_on_one() -> None:
    def case(group: Group) -> tuple[Tensor, float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        big = torch.full((1, 1), float("inf") if group.rank else 1.0)
        scaler.scale(sar.global_mean(model(big))).backward()
        sar.gather_grads(model)
        scaler.step(optimizer)
        scaler.update()
        return model.weight.detach(), scaler.get_scale()

    assert run_threads(2, case) == [(torch.ones(1, 1), 32.0)] * 2


# ---------------------------------------------------------------- torch.compile


@pytest.fixture(autouse=True)
def compiler_forgets() -> Any:
    yield
    torch._dynamo.reset()


def alone(case: Callable[[Group], Any]) -> Any:
    """In this thread: the compiler belongs to a process, not to a rank that is a thread."""
    from sar.comm import LocalGroup

    with use_group(LocalGroup()) as group:
        return case(group)


@pytest.mark.parametrize("kind", ["sage", "gat"])
@pytest.mark.parametrize("what", ["model", "head"])
def test_compiled_models_give_the_same_losses(
    kind: str, what: str, partitioned: Cutter, recwarn: pytest.WarningsRecorder
) -> None:
    path = partitioned(mixed(), 1)

    def case(group: Group, compiled: bool) -> list[float]:
        model = with_state(kind)
        if compiled and what == "head":
            model.head.compile(backend="aot_eager")
        whole = compiled and what == "model"
        call = torch.compile(model, backend="aot_eager") if whole else model
        return train(group, path, model, call)

    want = alone(partial(case, compiled=False))
    assert alone(partial(case, compiled=True)) == pytest.approx(want, rel=1e-6)
    assert not [one for one in recwarn if "its own code runs" in str(one.message)], "fused as well"


@pytest.mark.filterwarnings("error:Dynamo does not know how to trace")
def test_prepared_models_compile_on_ranks_that_are_threads(partitioned: Cutter) -> None:
    """What prepare added is not looked into: its counts of calls, and its groups, change."""
    path = partitioned(mixed(), 2, "random")

    def case(group: Group, compiled: bool) -> list[float]:
        graph, found = sar.construct_full_graph(sar.load_partition_data(path)), list[float]()
        model = with_state("gat")
        sar.prepare(model, graph)
        call = torch.compile(model, backend="eager") if compiled else model
        x = torch.ones(graph.num_nodes(), NUM_FEATURES)
        for _ in range(4):
            found.append(float(sar.global_sum(call(graph, x).sum(1).detach())))
        return found

    want = run_threads(2, partial(case, compiled=False))
    assert run_threads(2, partial(case, compiled=True)) == want


class OfEdges(nn.Module):
    """A layer whose own code handles tensors of edges."""

    def __init__(self, column: bool) -> None:
        super().__init__()
        self.linear, self.score = nn.Linear(NUM_FEATURES, NUM_CLASSES), nn.Linear(NUM_CLASSES, 1)
        self.column = column

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        with graph.local_scope():
            graph.srcdata["h"] = hidden
            if self.column:
                graph.edata["s"] = torch.ones(graph.num_edges(), 1)
            else:
                graph.apply_edges(lambda edges: {"s": self.score(edges.src["h"])})
            graph.edata["w"] = graph.edata["s"].sigmoid()
            graph.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "out"))
            return hidden + graph.dstdata["out"]


class Apart(OfEdges):
    @torch.compiler.disable
    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return super().forward(graph, x)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(NUM_CLASSES, NUM_CLASSES)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        hidden = self.inner(graph, x)
        return self.head(hidden + graph.aggregate(hidden, "mean")).relu()


@pytest.mark.parametrize(
    "column, what", [(True, r"graph.edata\['s'\]"), (False, "graph.apply_edges")]
)
def test_layers_that_hold_edges_are_left_out(column: bool, what: str, partitioned: Cutter) -> None:
    path = partitioned(mixed(), 1)

    def case(group: Group, kind: type[OfEdges], compiled: bool) -> list[float]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Around(kind(column))
        call = torch.compile(model, backend="eager") if compiled else model
        return train(group, path, model, call)

    with pytest.raises(sar.NotSupportedError, match=f"{what} in code that torch.compile compiles"):
        alone(partial(case, kind=OfEdges, compiled=True))
    want = alone(partial(case, kind=Apart, compiled=False))
    assert alone(partial(case, kind=Apart, compiled=True)) == pytest.approx(want, rel=1e-6)
