"""Biases that are added where the result of attention is: DGL's numbers, who ever writes there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import dgl.nn
import pytest
import torch
import torch.nn.functional as F
from harness import run_threads
from harness.graphs import mixed
from harness.parts import Cutter
from test_arriving import FEATURES, HEADS, WIDTH, check, make, on_ranks, trained, whole
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import sar
from sar.ops import bias as bias_module
from sar.ops.bias import Writes, add_bias


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The biases that were added in place."""
    seen: list[Tensor] = []
    add = Writes.add

    def noted(self: Writes, result: Tensor, bias: Tensor) -> Tensor:
        seen.append(bias)
        out = add(self, result, bias)
        assert out.data_ptr() == result.data_ptr()
        return out

    monkeypatch.setattr(Writes, "add", noted)
    return seen


class Then(nn.Module):
    """A GAT layer, and what its caller does with the result."""

    def __init__(self, use: Callable[[Tensor], Tensor], scale: float = 1.0, **options: Any) -> None:
        super().__init__()
        self.layer, self.use = make("gat", **options), use
        if self.layer.bias is not None:
            self.layer.bias.data.mul_(scale)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.use(self.layer(graph, x))


def twice(out: Tensor) -> Tensor:
    return out.mul_(2) + out


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda out: out,
    "elu": F.elu,
    "elu in place": lambda out: F.elu(out, inplace=True),
    "sigmoid in place, which saves it": lambda out: out.sigmoid_(),
    "written into twice": twice,
    "a view written into": lambda out: out.flatten(1)[:, ::2].mul_(2),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("size", [1, 3])
def test_layers_equal_dgl(size: int, use: str, partitioned: Cutter, added: list[Tensor]) -> None:
    path = partitioned(mixed(), size, "random")
    got, _ = on_ranks(path, size, lambda rank: Then(USES[use]))
    check(got, whole(Then(USES[use])))
    assert len(added) == size


@pytest.mark.parametrize("use", ["elu", "elu in place", "a view written into"])
def test_who_writes_into_sums_fetches_again_once(
    use: str, partitioned: Cutter, added: list[Tensor]
) -> None:
    """From the second pass on attention's own result is as it was, on every rank."""
    path = partitioned(mixed(), 3, "random")

    def case(group: Any) -> list[tuple[int, dict[str, Tensor]]]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph, model = sar.construct_full_graph(data), Then(USES[use])
        x, found = data.node_features["_N/feat"].double(), []
        for _ in range(3):
            model.zero_grad()
            before = group.counters.sent_bytes
            grads = trained(graph, x, torch.arange(len(x)), model)
            found.append((group.counters.sent_bytes - before, grads))
        return found

    for (first, grads), (second, again), (third, _) in run_threads(3, case):
        assert second == third
        assert (first > second) is (use != "elu")
        for name in grads:
            torch.testing.assert_close(again[name], grads[name], rtol=1e-11, atol=1e-11)
    assert len(added) == (9 if use == "elu" else 3)


def test_a_written_sum_says_nothing_of_other_layers(
    partitioned: Cutter, added: list[Tensor]
) -> None:
    graph, x = graph_and_rows(partitioned)
    written, other = Then(twice), Then(torch.tanh)
    for _ in range(2):
        written(graph, x).sum().backward()
        other(graph, x).sum().backward()
    assert len(added) == 1 + 2


APART: dict[str, dict[str, Any]] = {
    "no bias": {"bias": False},
    "a residual before it": {"residual": True},
    "a bias that is much larger": {"scale": 1e3},
}


@pytest.mark.parametrize("name", APART)
def test_layers_that_add_it_as_ever(name: str, partitioned: Cutter, added: list[Tensor]) -> None:
    path = partitioned(mixed(), 2, "random")
    got, _ = on_ranks(path, 2, lambda rank: Then(torch.tanh, **APART[name]))
    check(got, whole(Then(torch.tanh, **APART[name])))
    assert not added


def test_gradients_have_the_digits_that_they_had(partitioned: Cutter, added: list[Tensor]) -> None:
    """Of the scores' vectors, whose gradients the bias is taken out of, in float32."""
    path = partitioned(mixed(), 1, "random")
    data = sar.load_dgl_partition_data(path, 0, "cpu")
    x = data.node_features["_N/feat"]
    ids = torch.arange(len(x))
    found = []
    for dtype in (torch.float32, torch.float64):
        layer = Then(torch.tanh).to(dtype)
        layer.layer.bias.data[..., 0] = 2.0
        graph = sar.construct_full_graph(data)
        found.append(trained(graph, x.to(dtype), ids, layer))
    for name, exact in found[1].items():
        error = (found[0][name].double() - exact).abs().max() / exact.abs().max()
        assert error < 2e-6, name
    assert len(added) == 2


def graph_and_rows(partitioned: Cutter) -> tuple[Any, Tensor]:
    data = sar.load_dgl_partition_data(partitioned(mixed(), 1, "random"), 0, "cpu")
    return sar.construct_full_graph(data), data.node_features["_N/feat"].double()


def gradients(layer: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    weights = torch.cos(torch.arange(HEADS * WIDTH)).double().view(HEADS, WIDTH)
    (run() * weights).sum().backward()
    grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    return grads


def test_who_moves_saved_tensors_finds_the_result(partitioned: Cutter, added: list[Tensor]) -> None:
    """Copies are made when a tensor is saved, which is before the bias is added."""
    graph, x = graph_and_rows(partitioned)
    layer = make("gat")
    want = gradients(layer, lambda: layer(graph, x))
    assert len(added) == 1

    def moved() -> Tensor:
        with save_on_cpu():
            return layer(graph, x)

    for run in (moved, lambda: checkpoint(layer, graph, x, use_reentrant=False)):
        got = gradients(layer, run)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-10)
    assert len(added) == 1


def test_the_bias_of_the_forward_pass_is_taken_out(partitioned: Cutter) -> None:
    """Whatever has become of it since; and as often as somebody asks."""
    graph, x = graph_and_rows(partitioned)
    layer = make("gat")
    want = gradients(layer, lambda: layer(graph, x))
    out = layer(graph, x)
    with torch.no_grad():
        layer.bias.add_(7)
    weights = torch.cos(torch.arange(HEADS * WIDTH)).double().view(HEADS, WIDTH)
    loss = (out * weights).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    got = [p.grad / 2 for p in layer.parameters()]
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-10)


def test_without_gradients_nothing_is_written(partitioned: Cutter, added: list[Tensor]) -> None:
    graph, x = graph_and_rows(partitioned)
    layer = make("gat")
    want = layer(graph, x).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(layer(graph, x), want)
    assert len(added) == 1


def test_who_adds_what_to_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter like one row, to the whole result of attention, once."""

    class Result(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out = x.clone()
            ctx.writes = Writes(out)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Tensor:
            return dout

    def result() -> Tensor:
        return Result.apply(torch.ones(4, HEADS * WIDTH, requires_grad=True)).view(4, HEADS, WIDTH)

    bias = nn.Parameter(torch.ones(1, HEADS, WIDTH))
    assert add_bias(result(), bias) is not None
    assert add_bias(result(), bias.view(1, HEADS, WIDTH)) is not None
    assert add_bias(result(), torch.ones(1, HEADS, WIDTH)) is None
    assert add_bias(result(), bias[0]) is None and add_bias(result(), 1.0) is None
    assert add_bias(result(), nn.Parameter(torch.ones(4, HEADS, WIDTH))) is None
    assert add_bias(result(), nn.Parameter(torch.ones(1, 1, WIDTH))) is None
    assert add_bias(result(), bias.double()) is None
    assert add_bias(result()[:2], bias) is None
    turned = nn.Parameter(torch.ones(1, WIDTH, HEADS)).transpose(1, 2)
    assert add_bias(result(), turned) is None
    assert add_bias(result().view(4, WIDTH, HEADS).transpose(1, 2), bias) is None
    assert add_bias(torch.ones(4, HEADS, WIDTH, requires_grad=True) * 1, bias) is None
    again = result()
    assert add_bias(again, bias) is not None and add_bias(again, bias) is None
    written = result()
    written.mul_(2)
    assert add_bias(written, bias) is None
    unseen = result()
    with torch.no_grad():
        unseen.mul_(2)
    assert add_bias(unseen, bias) is None
    with torch.no_grad():
        assert add_bias(result(), bias) is None
    monkeypatch.setattr(bias_module, "_LARGER", 0.5)
    assert add_bias(result(), bias) is None
    assert add_bias(result(), nn.Parameter(torch.full((1, HEADS, WIDTH), 0.5))) is not None


@pytest.mark.parametrize("which", ["result", "sum"])
def test_writes_into_either_are_seen(which: str) -> None:
    result, bias = torch.ones(4, HEADS, WIDTH), torch.ones(1, HEADS, WIDTH)
    writes = Writes(result)
    total = writes.add(result, bias)
    assert not writes.happened and torch.equal(total, result) and total[0, 0, 0] == 2
    {"result": result, "sum": total}[which].mul_(2)
    assert writes.happened


class Apart(nn.Module):
    """A layer that one of the ranks treats in its own way; its result is written into."""

    def __init__(self, way: str, mine: bool) -> None:
        super().__init__()
        self.layer, self.way = make("gat"), way if mine else "as all"
        if self.way == "hook":
            self.layer.fc.register_forward_hook(lambda *seen: None)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with save_on_cpu() if self.way == "saved tensors moved" else nullcontext():
            out = self.layer(graph, x)
        return out if self.way == "not written" else out.mul_(2) / 2


WAYS = ["as all", "hook", "saved tensors moved", "not written"]


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_differ_wait_for_nobody(way: str, partitioned: Cutter) -> None:
    """A result that was written into on some is computed again on all."""
    path = partitioned(mixed(), 3, "random")
    for mine in range(3):
        got, _ = on_ranks(path, 3, lambda rank, mine=mine: Apart(way, rank == mine))
        check(got, whole(Apart("as all", False)))


def test_ranks_decide_for_themselves(partitioned: Cutter, added: list[Tensor]) -> None:
    """A part has no nodes: nothing that a bias could be smaller than."""
    path = partitioned(mixed(), 3, "adversarial")
    got, _ = on_ranks(path, 3, lambda rank: Then(twice))
    check(got, whole(Then(twice)))
    assert 0 < len(added) < 3


class Copied(dgl.nn.GATConv):
    """A subclass of somebody's own: its forward pass is not DGL's code."""

    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        with graph.local_scope():
            rows = self.fc(feat).view(-1, HEADS, WIDTH)
            graph.srcdata.update({"ft": rows, "el": (rows * self.attn_l).sum(-1, keepdim=True)})
            graph.dstdata["er"] = (rows * self.attn_r).sum(-1, keepdim=True)
            graph.apply_edges(dgl.function.u_add_v("el", "er", "e"))
            graph.edata["a"] = dgl.nn.functional.edge_softmax(graph, graph.edata.pop("e"))
            graph.update_all(dgl.function.u_mul_e("ft", "a", "m"), dgl.function.sum("m", "ft"))
            plain = graph.dstdata["ft"]
            biased = plain + self.bias.view(1, HEADS, WIDTH)
            return biased + graph.dstdata["ft"]


def test_code_of_others_comes_back_to_the_result(partitioned: Cutter, added: list[Tensor]) -> None:
    def make_layer(_: int = 0) -> nn.Module:
        layer = Copied(FEATURES, WIDTH, HEADS, allow_zero_in_degree=True).double()
        for parameter in layer.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(7))
        return layer

    got, _ = on_ranks(partitioned(mixed(), 2, "random"), 2, make_layer)
    check(got, whole(make_layer()))
    assert not added
