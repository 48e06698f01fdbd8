"""Attention layers that are computed as a whole: DGL's numbers, whoever writes where."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import dgl
import dgl.nn
import pytest
import torch
import torch.nn.functional as F
from harness import run_threads
from harness.blocks import compare_blocks
from harness.covering import by_pairs
from harness.graphs import mixed, to_dgl
from harness.parts import Cutter
from harness.rows import Part, join_nodes, results
from harness.rows import whole as whole_rows
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import sar
from sar.comm.meter import LayerNotes, Meter

FEATURES, WIDTH, HEADS = 6, 5, 3
TOTAL = mixed().total_nodes
LAYERS = {"gat": dgl.nn.GATConv, "gatv2": dgl.nn.GATv2Conv}
Make = Callable[[], nn.Module]


def make(kind: str = "gat", features: int = FEATURES, **options: Any) -> nn.Module:
    generator = torch.Generator().manual_seed(7)  # ranks are threads
    layer = LAYERS[kind](features, WIDTH, HEADS, allow_zero_in_degree=True, **options).double()
    for parameter in layer.parameters():  # a bias begins with zeros
        parameter.data.normal_(generator=generator)
    return layer


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What computed each layer of the table."""

    class Ways(list[Any]):
        def append(self, way: tuple[str, str, str | None]) -> None:
            if way[1] in ("fused", "plain"):
                super().append(way[1])

    told, begin = LayerNotes(ways=Ways()), Meter.__post_init__

    def listening(self: Meter) -> None:
        begin(self)
        self.notes = told

    monkeypatch.setattr(Meter, "__post_init__", listening)
    return told.ways


def whole(make_model: Make, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Of DGL on the whole graph: result and gradients of rows and of parameters."""
    model, twin = make_model().to(dtype), to_dgl(mixed())
    x = whole_rows(TOTAL, (FEATURES,), seed=1).to(dtype)
    factor = whole_rows(TOTAL, model(twin, x).shape[1:], seed=2).to(dtype)
    return results(twin, model, x, factor)


def on_ranks(
    path: str, size: int, make_model: Callable[..., nn.Module], *,
    dtype: torch.dtype = torch.float64, by_rank: bool = False, **policy: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """The same of ranks, put together."""

    def case(group: Any) -> dict[str, Tensor]:
        part = Part(group, path, sar.Policy(**policy))
        model = (make_model(group.rank) if by_rank else make_model()).to(dtype)
        x = whole_rows(TOTAL, (FEATURES,), seed=1).to(dtype)
        width = model(part.graph, x[part.nodes]).shape[1:]
        factor = whole_rows(TOTAL, width, seed=2).to(dtype)
        return {
            "nodes": part.nodes,
            **results(part.graph, model, x[part.nodes], factor[part.nodes]),
        }

    ranks = run_threads(size, case)
    joined = {name: join_nodes(ranks, name, TOTAL) for name in ("out", "x")}
    names = [name for name in ranks[0] if name not in ("nodes", "out", "x")]
    return joined | {name: sum(rank[name] for rank in ranks) for name in names}


def check(got: dict[str, Tensor], want: dict[str, Tensor], digits: float = 1e-11) -> None:
    assert got.keys() == want.keys()
    for name in want:
        size = max(1.0, float(want[name].abs().max()))
        error = (got[name].double() - want[name].double()).abs().max()
        assert error <= digits * size, (name, float(error), size)


POLICIES: list[dict] = [{}, {"rounds": 1}, {"rematerialize": False}]


@by_pairs(kind=LAYERS, size=[1, 2, 3, 8], policy=POLICIES)
def test_layers_equal_dgl(
    kind: str, size: int, policy: dict, partitioned: Cutter, fused: list[str]
) -> None:
    path = partitioned(mixed(), size, "random")
    check(on_ranks(path, size, lambda: make(kind), **policy), whole(lambda: make(kind)))
    assert fused == ["fused"] * 2 * size


OPTIONS: dict[str, tuple[str, dict]] = {
    "residual": ("gat", {"residual": True}),
    "residual of the same width": ("gat", {"residual": True, "out": FEATURES}),
    "no bias": ("gat", {"bias": False}),
    "residual, no bias": ("gat", {"bias": False, "residual": True}),
    "slope": ("gat", {"negative_slope": 1.0}),
    "activation": ("gat", {"activation": F.elu}),
    "v2 residual": ("gatv2", {"residual": True}),
    "v2 no bias": ("gatv2", {"bias": False}),
    "v2 shared": ("gatv2", {"share_weights": True}),
    "v2 shared, residual": ("gatv2", {"share_weights": True, "residual": True}),
    "v2 activation": ("gatv2", {"activation": torch.tanh}),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("cut", ["contiguous", "random"])
def test_options(name: str, cut: str, partitioned: Cutter, fused: list[str]) -> None:
    kind, options = OPTIONS[name]

    def made() -> nn.Module:
        own = {key: value for key, value in options.items() if key != "out"}
        if "out" not in options:
            return make(kind, **own)
        layer = dgl.nn.GATConv(FEATURES, FEATURES // 2, 2, allow_zero_in_degree=True, **own)
        for parameter in layer.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(7))
        return layer.double()

    path = partitioned(mixed(), 3, cut)
    check(on_ranks(path, 3, made), whole(made))
    assert set(fused) == {"fused"}


class Dropped(nn.Module):
    """A layer with dropout of rows and of weights, whose parts somebody may look into."""

    def __init__(self, kind: str, look: bool) -> None:
        super().__init__()
        self.layer = make(kind, feat_drop=0.3, attn_drop=0.4)
        if look:
            self.layer.leaky_relu.register_forward_hook(lambda *seen: None)
        sar.nn.convert_dropout(self)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.layer(graph, x)


@pytest.mark.filterwarnings("ignore:.*its own code runs")
@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_has_the_bits_of_the_layers_own_code(
    kind: str, partitioned: Cutter, fused: list[str]
) -> None:
    """Of the rows as of the weights, on any number of ranks."""
    found = []
    for size in (1, 3):
        path = partitioned(mixed(), size, "random")
        for look in (False, True):

            def made(look: bool = look) -> nn.Module:
                sar.manual_seed(5)
                return Dropped(kind, look)

            fused.clear()
            found.append(on_ranks(path, size, made))
            assert set(fused) == {"plain" if look else "fused"}
    for other in found[1:]:
        check(other, found[0])


@pytest.mark.parametrize("kind", LAYERS)
def test_blocks_of_a_graph(kind: str, partitioned: Cutter, fused: list[str]) -> None:
    """A block has more sources than destinations, which are the first of them."""
    first, last = make(kind, residual=True), make(kind, HEADS * WIDTH, residual=True)
    compare_blocks([Flat(first), Flat(last)], FEATURES, 4, 3, partitioned)
    assert fused == ["fused"] * 6


class Flat(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.layer(graph, x).flatten(1)


# Who writes into the result


class Then(nn.Module):
    """A layer, and what its caller does with the result."""

    def __init__(
        self, use: Callable[[Tensor], Tensor], kind: str = "gat", scale: float = 1.0, **options: Any
    ) -> None:
        super().__init__()
        self.layer, self.use = make(kind, **options), use
        if kind == "gat" and self.layer.bias is not None:
            self.layer.bias.data.mul_(scale)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.use(self.layer(graph, x))


def twice(out: Tensor) -> Tensor:
    return out.mul_(2) + out


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": F.elu,
    "elu in place": lambda out: F.elu(out, inplace=True),
    "sigmoid in place, which saves it": lambda out: out.sigmoid_(),
    "written into twice": twice,
    "a view written into": lambda out: out.flatten(1)[:, ::2].mul_(2),
}


@by_pairs(kind=LAYERS, size=[1, 3], use=USES)
def test_results_that_are_written_into(kind: str, size: int, use: str, partitioned: Cutter) -> None:
    path = partitioned(mixed(), size, "random")
    check(on_ranks(path, size, lambda: Then(USES[use], kind)), whole(lambda: Then(USES[use], kind)))


@pytest.mark.parametrize("use", ["elu", "written into twice"])
def test_a_bias_that_is_much_larger(use: str, partitioned: Cutter) -> None:
    """It is added beside the result, whose digits it would take."""
    made = lambda: Then(USES[use], scale=1e3)  # noqa: E731
    check(on_ranks(partitioned(mixed(), 2, "random"), 2, made), whole(made))


def test_gradients_keep_their_digits(partitioned: Cutter) -> None:
    """Of the scores' vectors, whose gradients the bias is taken out of, in float32."""

    def made() -> nn.Module:
        layer = Then(torch.tanh)
        layer.layer.bias.data[..., 0] = 2.0
        return layer

    got = on_ranks(partitioned(mixed(), 1, "random"), 1, made, dtype=torch.float32)
    for name, exact in whole(made).items():
        error = (got[name].double() - exact).abs().max() / exact.abs().max()
        assert error < 3e-6, name


class Apart(nn.Module):
    """A layer that one of the ranks treats in its own way; its result is written into."""

    def __init__(self, way: str, mine: bool, kind: str) -> None:
        super().__init__()
        self.layer, self.way = make(kind), way if mine else "as all"
        if self.way == "hook":
            self.layer.leaky_relu.register_forward_hook(lambda *seen: None)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with save_on_cpu() if self.way == "saved tensors moved" else nullcontext():
            out = self.layer(graph, x)
        return out if self.way == "not written" else out.mul_(2) / 2


@pytest.mark.filterwarnings("ignore:.*its own code runs")
@pytest.mark.parametrize("way", ["hook", "saved tensors moved", "not written"])
@pytest.mark.parametrize("kind", LAYERS)
def test_ranks_that_differ_wait_for_nobody(kind: str, way: str, partitioned: Cutter) -> None:
    """A result that was written into on some is computed again on all; each chooses for itself."""
    path, want = partitioned(mixed(), 3, "random"), whole(lambda: Apart("as all", False, kind))
    for mine in range(3):
        got = on_ranks(
            path, 3, lambda rank, mine=mine: Apart(way, rank == mine, kind), by_rank=True
        )
        check(got, want)


# Backward more than once, later, elsewhere


def graph_and_rows(partitioned: Cutter) -> tuple[Any, Tensor]:
    part = sar.load_dgl_partition_data(partitioned(mixed(), 1, "random"), 0, "cpu")
    return sar.construct_full_graph(part), part.node_features["_N/feat"].double()


def gradients(layer: nn.Module, run: Callable[[], Tensor], times: int = 1) -> list[Tensor]:
    weights = torch.cos(torch.arange(HEADS * WIDTH)).double().view(HEADS, WIDTH)
    loss = (run() * weights).sum()
    for left in reversed(range(times)):
        loss.backward(retain_graph=left > 0)
    grads = [p.grad / times for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    return grads


@pytest.mark.parametrize("kind", LAYERS)
def test_graphs_that_are_kept(kind: str, partitioned: Cutter) -> None:
    graph, x = graph_and_rows(partitioned)
    layer, x = make(kind), x.requires_grad_()
    want = gradients(layer, lambda: layer(graph, x * 1))
    got = gradients(layer, lambda: layer(graph, x * 1), times=3)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("kind", LAYERS)
def test_saved_tensors_that_are_moved(kind: str, partitioned: Cutter) -> None:
    graph, x = graph_and_rows(partitioned)
    layer = make(kind)
    want = gradients(layer, lambda: layer(graph, x))

    def moved() -> Tensor:
        with save_on_cpu():
            return layer(graph, x)

    for run in (moved, lambda: checkpoint(layer, graph, x, use_reentrant=False)):
        torch.testing.assert_close(gradients(layer, run), want, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize(("kind", "name"), [("gat", "attn_l"), ("gat", "fc.weight")])
def test_parameters_that_get_other_memory_before_backward(
    kind: str, name: str, asks: bool, partitioned: Cutter
) -> None:
    """As averages of weights do it; DGL's backward sees what they are by then."""

    def run(graph: Any, x: Tensor) -> list[Tensor]:
        layer, x = make(kind), x.clone().requires_grad_(asks)
        out = layer(graph, x * 1)
        changed = layer.get_parameter(name)
        changed.data = changed.data * 2
        out.square().sum().backward()
        return [*([x.grad] if asks else []), *(p.grad for p in layer.parameters())]  # type: ignore

    graph, x = graph_and_rows(partitioned)
    twin = next(iter(mixed().node_data.values()))["feat"].double()
    torch.testing.assert_close(run(graph, x), run(to_dgl(mixed()), twin), rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("frozen", ["fc", "attn", "all but the bias"])
def test_parameters_that_ask_for_no_gradient(frozen: str, partitioned: Cutter) -> None:
    def made() -> nn.Module:
        layer = make("gat")
        for name, parameter in layer.named_parameters():
            keep = name == "bias" if frozen == "all but the bias" else not name.startswith(frozen)
            parameter.requires_grad_(keep)
        return layer

    check(on_ranks(partitioned(mixed(), 3, "random"), 3, made), whole(made))


# Donation


def donated(kind: str, features: int, before: Callable[[Tensor], Tensor]) -> Any:
    """Gradients with and without it, and whether input and result were written into."""

    def run(graph: Any, x: Tensor, donate: bool) -> tuple[list[Tensor], list[bool]]:
        first, layer = nn.Linear(FEATURES, features).double(), make(kind, features)
        nn.init.constant_(first.weight, 0.1)
        nn.init.zeros_(first.bias)
        sar.optimize(layer, donate=donate)
        hidden = before(first(x))
        out = layer(graph, hidden)
        versions = hidden._version, out._version
        (out * torch.arange(WIDTH)).sum().backward()
        written = [hidden._version > versions[0], out._version > versions[1]]
        return [p.grad for p in (*first.parameters(), *layer.parameters())], written

    return run


@pytest.mark.parametrize("features", [HEADS * WIDTH, 4])
@pytest.mark.parametrize("kind", LAYERS)
def test_donated_rows(kind: str, features: int, partitioned: Cutter) -> None:
    graph, x = graph_and_rows(partitioned)
    run = donated(kind, features, lambda rows: rows)
    (want, never), (got, written) = run(graph, x, False), run(graph, x, True)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert never == [False, False]
    assert written == [features != HEADS * WIDTH, False], "values have the memory otherwise"


def test_a_graph_that_is_kept_gives_nothing_away(partitioned: Cutter) -> None:
    graph, x = graph_and_rows(partitioned)
    layer = sar.optimize(make("gat", 4), donate=True)
    x = x[:, :4].clone().requires_grad_()
    want = gradients(layer, lambda: layer(graph, x * 1))
    got = gradients(layer, lambda: layer(graph, x * 1), times=2)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-10)


# What is not fused


def weighted(layer: nn.Module, graph: Any, x: Tensor) -> Tensor:
    return layer(graph, x, edge_weight=x.new_full((graph.num_edges(),), 0.5))


PLAIN: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "weights": ("gat", weighted),
    "attention": ("gat", lambda layer, graph, x: layer(graph, x, get_attention=True)[0]),
    "attention of v2": ("gatv2", lambda layer, graph, x: layer(graph, x, get_attention=True)[0]),
    "a pair": ("gat", lambda layer, graph, x: layer(graph, (x, x * 1))),
    "a third axis": ("gat", lambda layer, graph, x: layer(graph, x.view(-1, 1, FEATURES))[:, 0]),
}


class Used(nn.Module):
    def __init__(self, kind: str, use: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.use = make(kind), use

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.use(self.layer, graph, x)


@pytest.mark.parametrize("name", PLAIN)
def test_calls_that_run_the_layers_own_code(
    name: str, partitioned: Cutter, fused: list[str]
) -> None:
    made = lambda: Used(*PLAIN[name])  # noqa: E731
    check(on_ranks(partitioned(mixed(), 2, "random"), 2, made), whole(made))
    assert set(fused) == {"plain"}


def test_nodes_without_edges_are_dgls_error(partitioned: Cutter) -> None:
    graph, x = graph_and_rows(partitioned)
    layers = [kind(FEATURES, WIDTH, HEADS) for kind in LAYERS.values()]
    for layer in (*layers, dgl.nn.GraphConv(FEATURES, WIDTH)):
        with pytest.raises(dgl.DGLError, match="0-in-degree nodes"):
            layer(graph, x.float())
