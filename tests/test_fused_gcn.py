"""Graph convolution and graph isomorphism layers as one function each: DGL's numbers."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any
from weakref import ref

import dgl.nn
import pytest
import torch
from harness import run_threads
from harness.blocks import compare_blocks
from harness.covering import by_pairs
from harness.graphs import mixed, to_dgl
from harness.late import run_late
from harness.parts import Cutter
from harness.rows import Part, whole
from harness.sage import SIZE, WIDTH, Then, compare, fused_ones, sage
from torch import Tensor, nn
from torch.nn import functional as F

import sar
from sar.comm import Group

NORMS = ("none", "left", "right", "both")


def gcn(width: int = WIDTH, before: int = WIDTH, norm: str = "both", **options: Any) -> nn.Module:
    return dgl.nn.GraphConv(before, width, norm, allow_zero_in_degree=True, **options)


def gin(width: int = WIDTH, before: int = WIDTH, op: str = "sum", **options: Any) -> nn.Module:
    """Its eps is not zero."""
    return dgl.nn.GINConv(nn.Linear(before, width), op, 0.5, **options)


class Called(nn.Module):
    """A layer, called by a function."""

    def __init__(self, conv: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.conv, self.call = conv, call
        self.other = nn.Parameter(torch.linspace(-1, 1, WIDTH * 3).view(WIDTH, 3))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.call(self, graph, x) + self.other.sum() * 0


LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{f"gcn {n} wide": (lambda n=n: gcn(7, norm=n)) for n in NORMS},  # type: ignore[misc]
    **{f"gcn {n} narrow": (lambda n=n: gcn(2, norm=n)) for n in NORMS},  # type: ignore[misc]
    "gcn no bias": lambda: gcn(bias=False),
    "gcn no bias, narrow": lambda: gcn(2, bias=False),
    "gcn no weight": lambda: gcn(weight=False),
    "gcn no weight, none": lambda: gcn(weight=False, norm="none"),
    "gcn no weight nor bias": lambda: gcn(weight=False, bias=False, norm="right"),
    "gcn no weight, narrow": lambda: gcn(2, weight=False, bias=False),
    "gcn relu": lambda: gcn(activation=F.relu),
    "gcn tanh": lambda: gcn(3, activation=torch.tanh),
    "gcn two": lambda: Then(gcn(activation=F.relu), gcn(3)),
    "gcn two of none": lambda: Then(gcn(norm="none", activation=F.relu), gcn(norm="none")),
    "gcn twice the same rows": lambda: Then(gcn(), lambda x: x + x.sin(), gcn(2)),
    "gin sum": gin,
    "gin mean": lambda: gin(3, op="mean"),
    "gin eps": lambda: gin(learn_eps=True),
    "gin eps mean": lambda: gin(op="mean", learn_eps=True),
    "gin relu": lambda: gin(activation=F.relu),
    "gin exp": lambda: dgl.nn.GINConv(torch.exp, "mean", activation=F.relu),
    "gin alone": lambda: dgl.nn.GINConv(None, "sum", learn_eps=True),
    "gin two": lambda: Then(gin(learn_eps=True, activation=F.relu), gin(3, op="mean")),
}


@pytest.mark.parametrize("rounds", [1, SIZE - 1])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_dgl(name: str, rounds: int, partitioned: Cutter) -> None:
    """With rows that arrive at the last moment."""
    compare(fused_ones(LAYERS[name]()), partitioned, run=run_late, rounds=rounds)


POLICIES: list[dict[str, Any]] = [
    {"rematerialize": False}, {"memory_budget": "1MiB"}, {"exchange": "pull"},
    {"structure": "one"}, {"zeros": "skip"}, {"constant_inputs": "off"},
    {"constant_inputs": "mapped"},
]  # fmt: skip


@by_pairs(name=["gcn two", "gcn two of none", "gin two"], policy=POLICIES, donate=[False, True])
def test_policies(name: str, policy: dict[str, Any], donate: bool, partitioned: Cutter) -> None:
    compare(fused_ones(LAYERS[name](), donate=donate), partitioned, **policy)


@pytest.mark.parametrize("name", ["gcn both wide", "gcn both narrow", "gin eps"])
def test_frozen_layers(name: str, partitioned: Cutter) -> None:
    compare(fused_ones(LAYERS[name]().requires_grad_(False)), partitioned)


@pytest.mark.parametrize("name", ["gcn two", "gin two"])
def test_recomputed_layers(name: str, partitioned: Cutter) -> None:
    def recomputed(rank: int, layer: nn.Module) -> None:
        sar.set_activations(layer, "recompute")

    compare(fused_ones(LAYERS[name](), donate=True), partitioned, on_rank=recomputed)


KEPT = {name: LAYERS[name] for name in ("gcn both wide", "gcn both narrow", "gin eps")} | {
    f"sage {width}": lambda width=width: sage(width, activation=F.relu) for width in (2, WIDTH)
}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("name", KEPT)
def test_a_graph_that_is_kept_gives_its_gradients_again(
    name: str, activations: str, donate: bool, partitioned: Cutter
) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Group) -> None:
        part, layer = Part(group, path), fused_ones(KEPT[name]().double(), donate=donate)
        sar.set_activations(layer, activations)
        x = whole(57, (WIDTH,), seed=1)[part.nodes].requires_grad_()
        given = [x, *(one for one in layer.parameters() if one.requires_grad)]
        loss = layer(part.graph, x * 1).square().sum()
        first = torch.autograd.grad(loss, given, retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(loss, given, allow_unused=True)
        torch.testing.assert_close(again, first, rtol=0, atol=0)

    run_threads(2, case)


@by_pairs(
    size=[1, SIZE],
    make=[gcn, gin],
    widths=[(WIDTH, 3), (7, 2), (2, 5)],
    every=[4, 50],  # with 50, some ranks have nothing to compute
)
def test_blocks_give_some_rows_of_the_whole_graphs(
    size: int, make: Callable[..., Any], widths: tuple[int, int], every: int, partitioned: Cutter
) -> None:
    options = {"norm": "right"} if make is gcn else {}  # out-degrees are a block's own
    first = fused_ones(make(widths[0], activation=F.relu, **options), donate=True)
    second = fused_ones(make(widths[1], widths[0], **options))
    compare_blocks([first, second], WIDTH, every, size, partitioned)


# -- beside ranks that run DGL's own code -----------------------------------------------------


def hooked_on(ranks: tuple[int, ...]) -> Callable[[int, nn.Module], None]:
    """The layers of some ranks run DGL's code."""

    def on_rank(rank: int, layer: nn.Module) -> None:
        for conv in layer.modules():
            if rank in ranks and hasattr(conv, "reset_parameters") and conv is not layer:
                conv.register_forward_hook(lambda part, args, out: None)

    return on_rank


class WithPart(dgl.nn.GraphConv):
    """Has a part, which may have a hook."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, allow_zero_in_degree=True, **options)
        self.part = nn.Linear(1, 1, bias=False).requires_grad_(False)


MEETING: dict[str, Callable[[], nn.Module]] = {
    **{f"gcn {n}": (lambda n=n: WithPart(WIDTH, WIDTH, n)) for n in NORMS},  # type: ignore[misc]
    **{f"gcn {n} narrow": (lambda n=n: WithPart(WIDTH, 2, n)) for n in NORMS},  # type: ignore[misc]
    "gin sum": lambda: gin(learn_eps=True),
    "gin mean": lambda: gin(op="mean"),
    "sage": sage,
    "sage narrow": lambda: sage(2),
}


@pytest.mark.parametrize("policy", [{}, {"rounds": 1}, {"zeros": "skip"}])
@pytest.mark.parametrize("name", MEETING)
def test_fused_and_plain_ranks_meet(name: str, policy: dict[str, Any], partitioned: Cutter) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = MEETING[name]()
        compare(layer, partitioned, on_rank=hooked_on((1,)), **policy)
    assert any("Linear in it has a hook" in str(w.message) for w in caught)


@pytest.mark.parametrize("plain", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("name", MEETING)
def test_rows_that_nobody_trains(name: str, plain: tuple[int, ...], partitioned: Cutter) -> None:
    """Their sums are kept from the second epoch on, where they are summed before they are
    multiplied, whichever code computes them; nothing is sent in the third."""
    arrays, layer = mixed(), MEETING[name]().double()
    rows = whole(arrays.total_nodes, (WIDTH,), seed=1)
    whole_layer, path = copy.deepcopy(layer), partitioned(arrays, SIZE, "random")
    out = whole_layer(to_dgl(arrays), rows)
    out.square().sum().backward()

    def case(group: Group) -> None:
        part, mine, sent = Part(group, path), copy.deepcopy(layer), []
        hooked_on(plain)(group.rank, mine)
        x = rows[part.nodes]
        for _ in range(5):
            mine.zero_grad()
            before = group.counters.sent_bytes
            got = mine(part.graph, x)
            got.square().sum().backward()
            sent.append(group.counters.sent_bytes - before)
            torch.testing.assert_close(got, out[part.nodes], rtol=1e-11, atol=1e-11)
            for ours, theirs in zip(mine.parameters(), whole_layer.parameters(), strict=True):
                if theirs.grad is not None:
                    total = group.all_reduce(ours.grad.clone())
                    torch.testing.assert_close(total, theirs.grad, rtol=1e-11, atol=1e-11)
        assert sent[0] and (sum(sent[2:]) == 0) is ("narrow" not in name), sent

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_late(SIZE, case)


# -- how a layer is called --------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["none", "both"])
def test_an_external_weight(norm: str, partitioned: Cutter) -> None:
    layer = Called(
        gcn(3, norm=norm, weight=False), lambda self, graph, x: self.conv(graph, x, self.other)
    )
    compare(fused_ones(layer), partitioned)


# -- donation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("layer", [lambda: gcn(2), lambda: gin(learn_eps=True)], ids=["gcn", "gin"])
def test_donation_is_asked_for(
    layer: Callable[[], nn.Module], donate: bool, partitioned: Cutter
) -> None:
    """Backward writes over the input then, and torch counts it: a later use fails loudly."""
    path, mine = partitioned(mixed(), 1), fused_ones(layer().double(), donate=donate)

    def case(group: Group) -> None:
        part = Part(group, path)
        hidden = part.node_rows(whole(57, (WIDTH,), seed=1)) * 2
        before, version = hidden.detach().clone(), hidden._version
        later = hidden.square()
        mine(part.graph, hidden).sum().backward(retain_graph=False)
        assert torch.equal(hidden.detach(), before) is not donate
        assert (hidden._version > version) is donate
        if donate:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                later.sum().backward()

    run_threads(1, case)


@pytest.mark.parametrize("make", [gcn, gin, lambda: dgl.nn.SAGEConv(WIDTH, WIDTH, "mean")])
def test_a_graph_ends_with_its_last_reference(
    make: Callable[[], nn.Module], partitioned: Cutter
) -> None:
    """What a relation keeps for its layers does not hold the relation."""
    path, mine = partitioned(mixed(), 2), fused_ones(make().double())

    def case(group: Group) -> None:
        part = Part(group, path)
        x = part.node_rows(whole(57, (WIDTH,), seed=1))
        mine(part.graph, x).sum().backward()
        seen = ref(part.graph.sole_relation)
        gc.collect()
        gc.disable()
        try:
            del part
            assert seen() is None
        finally:
            gc.enable()

    run_threads(2, case)
