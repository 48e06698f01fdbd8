"""GraphSAGE layers of means by blocks of columns: DGL's numbers, and no whole mean is ever held."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import dgl.nn
import numpy as np
import pytest
import torch
from harness import run_threads
from harness.graphs import mixed, to_dgl
from harness.parts import Cutter
from harness.rows import Part, assert_share, results, whole
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sar
from sar.memory.forwards import Forward
from sar.ops.callers import is_mean_layer
from sar.ops.column_blocks import BLOCK
from sar.ops.frugal import Frugal

blocks_module = sys.modules["sar.ops.column_blocks"]


class Then(nn.Module):
    """A layer, and what follows it."""

    def __init__(self, conv: nn.Module, *then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.then = conv, then
        self.parts = nn.ModuleList(one for one in then if isinstance(one, nn.Module))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        x = self.conv(graph, x)
        for step in self.then:
            x = step(x)
        return x


def sage(before: int, after: int, **kwargs: Any) -> nn.Module:
    return dgl.nn.SAGEConv(before, after, "mean", **kwargs)


def compare(
    layer: nn.Module, widths: tuple[int, int], partitioned: Cutter, size: int = 3, **policy: Any
) -> None:
    """``layer`` recomputed on some ranks is DGL's on the whole graph."""
    arrays, layer = mixed(), layer.double()
    rows = whole(arrays.total_nodes, (widths[0],), seed=1)
    factor = whole(arrays.total_nodes, (widths[1],), seed=2)
    want = results(to_dgl(arrays), copy.deepcopy(layer), rows, factor)
    path = partitioned(arrays, size, "adversarial" if size > 3 else "random")

    def case(group: Any) -> None:
        part, mine = Part(group, path), copy.deepcopy(layer)
        graph = part.graph.with_policy(sar.Policy(**policy))
        sar.set_activations(mine, "recompute")
        got = results(graph, mine, rows[part.nodes], factor[part.nodes])
        assert_share(group, got, want, part.nodes)

    run_threads(size, case)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The widths that means are computed in."""
    found: list[int] = []
    forward = blocks_module.aggregate_forward

    def noted(relation: Any, x: Tensor, *args: Any) -> Tensor:
        found.append(x.shape[1])
        return forward(relation, x, *args)

    monkeypatch.setattr(blocks_module, "aggregate_forward", noted)
    return found


@pytest.mark.parametrize("widths", [(1, 3), (BLOCK, BLOCK), (BLOCK + 1, 70), (100, 100), (70, 5)])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_results_are_those_of_dgl(
    widths: tuple[int, int], size: int, partitioned: Cutter, sums: list[int]
) -> None:
    compare(sage(*widths), widths, partitioned, size)
    assert sums and max(sums) <= (widths[1] if widths[0] > widths[1] else BLOCK)


LAYERS = {
    "no bias": lambda: sage(40, 40, bias=False),
    "activation": lambda: sage(40, 40, activation=F.relu),
    "activation and norm": lambda: sage(40, 40, activation=torch.tanh, norm=nn.LayerNorm(40)),
    "relu": lambda: Then(sage(40, 40), F.relu),
    "value needed": lambda: Then(sage(40, 40), torch.exp, torch.tanh),
    "relu, value needed": lambda: Then(sage(40, 40, activation=F.relu), torch.exp),
    "twice relu": lambda: Then(sage(40, 40), F.relu, lambda x: F.relu(x) + F.relu(-x)),
    "residual": lambda: Then(sage(40, 40), lambda x: F.relu(x) + x),
    "relu of columns": lambda: Then(sage(40, 40), lambda x: F.relu(x.t()).t()),
    "relu in place": lambda: Then(sage(40, 40), nn.ReLU(inplace=True)),
    "relu in place, value needed": lambda: Then(sage(40, 40), F.relu_, torch.exp),
    "relu in place of columns": lambda: Then(sage(40, 40), lambda x: F.relu_(x.t() * 1).t()),
    "elu": lambda: Then(sage(40, 40), F.elu),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("size", [3, 5])
def test_what_surrounds_the_sum(kind: str, size: int, partitioned: Cutter, sums: list[int]) -> None:
    """On five ranks one has a single row and one has none."""
    torch.manual_seed(0)
    compare(LAYERS[kind](), (40, 40), partitioned, size)
    assert sums


@pytest.mark.parametrize(
    "policy",
    [{"rounds": 1}, {"memory_budget": "1MiB"}, {"exchange": "pull"}, {"structure": "one"}],
)
def test_policies(policy: dict[str, Any], partitioned: Cutter, sums: list[int]) -> None:
    compare(sage(40, 40), (40, 40), partitioned, **policy)
    assert sums


@pytest.mark.parametrize("name", ["fc_self", "fc_neigh"])
def test_frozen_weights(name: str, partitioned: Cutter, sums: list[int]) -> None:
    layer = sage(40, 40)
    getattr(layer, name).weight.requires_grad_(False)
    compare(layer, (40, 40), partitioned)
    assert sums


def test_means_travel_once_in_each_pass(
    partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks cost no bytes, also where the value is computed again: the means are kept then."""
    layers = [sage(70, 70), Then(sage(70, 70), torch.exp, torch.tanh)]

    def case(group: Any) -> list[int]:
        part, sent = Part(group, path), []
        for layer in layers:
            mine = copy.deepcopy(layer).double()
            sar.set_activations(mine, "recompute")
            results(part.graph, mine, rows[part.nodes], rows[part.nodes])
            start = group.counters.sent_bytes
            results(part.graph, mine, rows[part.nodes], rows[part.nodes])
            sent.append(group.counters.sent_bytes - start)
        return sent

    path, rows = partitioned(mixed(), 3), whole(mixed().total_nodes, (70,), seed=1)
    got = run_threads(3, case)
    module = sys.modules["sar.frontends.dgl.mean_layer"]
    monkeypatch.setattr(module, "is_mean_layer", lambda part: False)
    assert got == run_threads(3, case)


def seen(x: Tensor, places: list[int]) -> Tensor:
    """``x`` computed; notes where it and its gradient lie."""
    out = x * 1
    places.append(out.data_ptr())
    out.register_hook(lambda dout: places.append(dout.data_ptr()))
    return out


@pytest.mark.parametrize("widths", [(40, 40), (40, 8)])
def test_the_gradient_takes_the_place_of_the_input(
    widths: tuple[int, int], partitioned: Cutter
) -> None:
    """Unless somebody has the input, or the graph is kept."""

    def case(group: Any) -> list[bool]:
        part, found, held = Part(group, path), [], []
        layer = sage(*widths)
        sar.set_activations(layer, "recompute")
        for use in (lambda x: x, lambda x: held.append(x) or x):
            for keep in (False, True):
                x = torch.ones(part.graph.num_nodes(), widths[0], requires_grad=True)
                places: list[int] = []
                layer(part.graph, use(seen(x, places))).sum().backward(retain_graph=keep)
                found.append(places[0] == places[1])
        return found

    path = partitioned(mixed(), 2)
    assert run_threads(2, case) == [[True, False, False, False]] * 2


def test_backward_may_run_twice(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        part = Part(group, path)
        for layer in (sage(40, 40), Then(sage(40, 40), F.relu, torch.exp)):
            sar.set_activations(layer, "recompute")
            x = rows[part.nodes].float().requires_grad_()
            out = layer(part.graph, x * 1).sum()
            once = torch.autograd.grad(out, [x, *layer.parameters()], retain_graph=True)
            again = torch.autograd.grad(out, [x, *layer.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))

    path, rows = partitioned(mixed(), 2), whole(mixed().total_nodes, (40,), seed=1)
    run_threads(2, case)


class OwnSage(dgl.nn.SAGEConv):
    """Somebody's own."""


class Doubled(nn.Linear):
    """A part that does something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def patched(layer: nn.Module) -> nn.Module:
    forward = layer.forward
    layer.forward = lambda graph, x: 2 * forward(graph, x)
    return layer


def doubled(layer: nn.Module) -> nn.Module:
    layer.fc_neigh = Doubled(40, 40, bias=False)
    return layer


def biased(layer: nn.Module, before: int = 40) -> nn.Module:
    layer.fc_neigh = nn.Linear(before, 40)
    return layer


def hooked(layer: nn.Module) -> nn.Module:
    layer.fc_self.register_forward_hook(lambda part, args, out: 2 * out)
    return layer


OTHERS = {
    "subclass": lambda: OwnSage(40, 40, "mean"),
    "gcn": lambda: dgl.nn.SAGEConv(40, 40, "gcn"),
    "pool": lambda: dgl.nn.SAGEConv(40, 40, "pool"),
    "another part": lambda: doubled(sage(40, 40)),
    "a bias of the mean": lambda: biased(sage(40, 40)),
    "one part twice": lambda: setattr(layer := sage(40, 40), "fc_neigh", layer.fc_self) or layer,
    "a hook on a part": lambda: hooked(sage(40, 40)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_others_are_computed_as_they_say(kind: str, partitioned: Cutter, sums: list[int]) -> None:
    compare(OTHERS[kind](), (40, 40), partitioned)
    assert not sums


@pytest.mark.parametrize("of", [dgl.nn.SAGEConv, nn.Linear])
def test_changed_classes(
    of: type[nn.Module], partitioned: Cutter, sums: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = of.forward
    monkeypatch.setattr(of, "forward", lambda layer, *args: 2 * forward(layer, *args))
    compare(sage(40, 40), (40, 40), partitioned)
    assert not sums


def test_a_checkpoint_inside(partitioned: Cutter, sums: list[int]) -> None:
    """Somebody's own repetition of a part of the layer knows nothing of ours."""

    class Inside(Then):
        def forward(self, graph: Any, x: Tensor) -> Tensor:
            if not isinstance(graph, sar.ShardedGraph):
                return super().forward(graph, x)
            return checkpoint(super().forward, graph, x, use_reentrant=False)

    compare(Inside(sage(40, 40)), (40, 40), partitioned)
    compare(Inside(sage(40, 40), F.relu), (40, 40), partitioned)
    assert not sums


@pytest.mark.parametrize("policy", [{"zeros": "skip"}, {"lossy": sar.Lossy(boundary_rate=0.5)}])
def test_what_travels_otherwise_travels_otherwise(
    policy: dict[str, Any], partitioned: Cutter, sums: list[int]
) -> None:
    def case(group: Any) -> None:
        part, layer = Part(group, path), sage(8, 8)
        sar.set_activations(layer, "recompute")
        x = torch.ones(part.graph.num_nodes(), 8, requires_grad=True)
        layer(part.graph.with_policy(sar.Policy(**policy)), x).sum().backward()

    path = partitioned(mixed(), 2)
    run_threads(2, case)
    assert not sums


@pytest.mark.parametrize("widths", [(40, 40), (40, 8)])
@pytest.mark.parametrize("what", ["hook", "no gradient"])
def test_ranks_go_one_way(
    what: str, widths: tuple[int, int], partitioned: Cutter, sums: list[int]
) -> None:
    """A hook on one rank alone keeps all of them from it; so do rows that ask for no gradient."""

    def case(group: Any) -> None:
        part, layer = Part(group, path), sage(*widths)
        if group.rank == 1 and what == "hook":
            layer.fc_self.register_forward_hook(lambda part, args, out: None)
        sar.set_activations(layer, "recompute")
        asks = what == "hook" or widths[1] == 8 and group.rank != 1
        x = torch.ones(part.graph.num_nodes(), widths[0], requires_grad=asks)
        for _ in range(2):
            layer(part.graph, x).sum().backward()

    path = partitioned(mixed(), 3)
    run_threads(3, case)
    assert not sums


def test_a_replaced_forward_stays(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        part, layer = Part(group, path), patched(sage(8, 8))
        mine = layer.forward
        x = torch.ones(part.graph.num_nodes(), 8, requires_grad=True)
        want = layer(part.graph, x)
        for _ in range(2):
            sar.set_activations(layer, "recompute")
            torch.testing.assert_close(layer(part.graph, x), want)
        sar.set_activations(layer, "keep")
        assert layer.forward is mine

    path = partitioned(mixed(), 1)
    run_threads(1, case)


def test_nothing_is_left_behind() -> None:
    model = nn.ModuleList([sage(4, 4), Then(sage(4, 4), F.relu)])
    for setting in ("recompute", "recompute", "offload", "recompute", "keep"):
        sar.set_activations(model, setting)
    assert not any(isinstance(m.__dict__.get("forward"), Forward) for m in model.modules())
    assert not is_mean_layer(model[1]) and is_mean_layer(model[0])


SPECIAL = torch.tensor([-0.0, 0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-40])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("relu", [F.relu, torch.relu, Tensor.relu, nn.ReLU()])
def test_relu_of_special_numbers(dtype: torch.dtype, relu: Callable[[Tensor], Tensor]) -> None:
    found = []
    for mode in (Frugal(), torch.enable_grad()):
        x = SPECIAL.to(dtype).repeat(9).view(8, 9).requires_grad_()
        with mode:
            out = relu(x * 1)
        (out * torch.arange(1, 73).view(8, 9)).sum().backward()
        found.append((out, x.grad))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))


def test_relu_takes_the_place_of_a_temporary_alone() -> None:
    linear, x, held = nn.Linear(3, 3), torch.randn(5, 3), []

    def same(out: Tensor) -> bool:
        return out._version > 0

    with Frugal():
        alone = [same(F.relu(linear(x)))]
        named = linear(x)
        alone.append(same(F.relu(named)))
        listed = [linear(x)]
        alone.append(same(F.relu(listed[0])))
        alone.append(same(F.relu(linear(x).sin())))
        alone.append(same(F.relu(linear(x)[1:])))
        alone.append(same(nn.ReLU()(linear(x))))
        handle = linear.register_forward_hook(lambda part, args, out: held.append(out))
        alone.append(same(F.relu(linear(x))))
        handle.remove()
    assert alone == [True] + [False] * 6
    assert all(torch.equal(out, linear(x)) for out in [named, *listed, *held])


IN_PLACE: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.relu(x, inplace=True),
    nn.ReLU(inplace=True),
    torch.relu_,
    Tensor.relu_,
    lambda x: F.relu(x, True),
    lambda x: F.relu(x[:2], inplace=True),
    lambda x: F.relu_(x.t()),
]


@pytest.mark.parametrize("make", [lambda x: x * 1, lambda x: (x * 1).t() * 1], ids=["", "strides"])
@pytest.mark.parametrize("relu", IN_PLACE)
def test_relu_in_place(relu: Callable[[Tensor], Tensor], make: Callable[[Tensor], Tensor]) -> None:
    """Torch's numbers, written where the caller says, whoever else has that memory."""
    found = []
    for mode in (Frugal(), torch.enable_grad()):
        x = SPECIAL[:6].repeat(4).view(6, 4).roll(1, 0).contiguous().requires_grad_()
        with mode:
            h = make(x)
            place, out = h.data_ptr(), relu(h)
            assert out.data_ptr() == place
        factor = torch.arange(1, 1 + h.numel()).view(h.shape)
        (h * factor).sum().backward()
        found.append((h.detach(), x.grad))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_relu_in_place_saves_no_rows() -> None:
    x, nodes = torch.randn(5, 3, requires_grad=True), []
    with Frugal():
        for relu in IN_PLACE[:4]:
            nodes.append(type(relu(x * 1).grad_fn).__name__)
        leaf = torch.randn(5, 3, requires_grad=True)
        with pytest.raises(RuntimeError, match="leaf"):
            F.relu(leaf, inplace=True)
        saved = (x * 1).sigmoid()
        F.relu(saved, inplace=True)
    assert nodes == ["_ReluBackward"] * 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_the_gradient_of_relu_lies_where_the_one_that_came_did() -> None:
    x, places = torch.randn(6, 4, requires_grad=True), []
    with Frugal():
        h = x * 1
        out = F.relu(h)
    for tensor in (out, h):
        tensor.register_hook(lambda grad: places.append(grad.data_ptr()))
    (out * 2).sum().backward()
    assert places[0] == places[1]


def test_a_gradient_that_others_have_is_not_written_into() -> None:
    """A user's own, one that a hook keeps, one that flows to two places."""
    x, given, kept = torch.randn(6, 4, requires_grad=True), torch.ones(6, 4), []
    with Frugal():
        F.relu(x * 1).backward(given)
        assert torch.equal(given, torch.ones(6, 4))
        out = F.relu(x * 1)
        out.register_hook(kept.append)
        (out * 2).sum().backward()
        assert torch.equal(kept[0], torch.full((6, 4), 2.0))
        x.grad = None
        (F.relu(x * 1) + F.relu(x * -1) + x).mul(3).sum().backward()
        assert torch.equal(x.grad, 3 * x.sign() + 3)
        out = F.relu(x * 1)
        dout, dx = torch.autograd.grad((out * 2).sum(), [out, x])
    assert torch.equal(dout, torch.full((6, 4), 2.0)) and torch.equal(dx, 2.0 * (x > 0))


class Arrays(Function):
    """Hands out memory of numpy's, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arrays: list[np.ndarray]) -> Tensor:
        ctx.arrays = arrays
        return torch.from_numpy(arrays[0])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return torch.from_numpy(ctx.arrays[1]), None


def test_memory_of_others_is_not_written_into(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        part, layer = Part(group, path), sage(8, 8)
        sar.set_activations(layer, "recompute")
        shape = (part.graph.num_nodes(), 8)
        arrays = [np.full(shape, number, dtype=np.float32) for number in (3, -1)]
        x = torch.ones(shape, requires_grad=True)
        layer(part.graph, Arrays.apply(x, arrays)).sum().backward()
        with Frugal():
            Arrays.apply(F.relu(x - 2), arrays).sum().backward()
        assert (arrays[0] == 3).all() and (arrays[1] == -1).all()

    path = partitioned(mixed(), 2)
    run_threads(2, case)


def test_second_gradients_of_relu() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    x, found = torch.randn(5, 6, dtype=torch.float64, requires_grad=True), []
    for setting in ("keep", "recompute"):
        sar.set_activations([net], setting)
        out = net(x).square().sum()
        (dx,) = torch.autograd.grad(out, x, create_graph=True)
        found.append(torch.autograd.grad(out + dx.square().sum(), list(net.parameters())))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
