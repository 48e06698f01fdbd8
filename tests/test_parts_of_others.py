"""Layers with parts that somebody changed or looks at, and gradients where saved tensors were:
DGL's numbers, and nobody sees what was written over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import dgl.function as fn
import dgl.nn
import pytest
import torch
from harness import run_threads
from harness.graphs import mixed, to_dgl
from harness.parts import Cutter
from harness.rows import Part, assert_share, results, whole
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import sar

WIDTH = 4


class Sage(dgl.nn.SAGEConv):
    """A class of somebody's own, without code of its own."""


def compare(layer: nn.Module, partitioned: Cutter, size: int = 3) -> None:
    """``layer`` on some ranks equals DGL on the whole graph."""
    arrays, layer = mixed(), layer.double()
    rows = whole(arrays.total_nodes, (WIDTH,), seed=1)
    factor = whole(arrays.total_nodes, (WIDTH,), seed=2)
    want = results(to_dgl(arrays), copy.deepcopy(layer), rows, factor)
    path = partitioned(arrays, size, "random")

    def case(group: Any) -> None:
        part, mine = Part(group, path), copy.deepcopy(layer)
        got = results(part.graph, mine, rows[part.nodes], factor[part.nodes])
        with torch.no_grad():
            again = mine(part.graph, rows[part.nodes])
            if isinstance(getattr(mine, "fc_neigh", None), Kept):
                torch.testing.assert_close(
                    mine.fc_self(rows[part.nodes]) + mine.fc_neigh.last, again
                )
        torch.testing.assert_close(again, want["out"][part.nodes], rtol=1e-11, atol=1e-11)
        assert_share(group, got, want, part.nodes)

    run_threads(size, case)


class Kept(nn.Linear):
    """A part that keeps what it returned."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Rectified(nn.Linear):
    """A part that hands its result to a function that torch cannot see into."""

    class _Relu(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return dy * (ctx.saved_tensors[0] > 0)

    def forward(self, x: Tensor) -> Tensor:
        return self._Relu.apply(super().forward(x))


@pytest.mark.parametrize("part", [Kept, Rectified])
def test_parts_of_others_compute_what_they_say(part: type[nn.Linear], partitioned: Cutter) -> None:
    conv = Sage(WIDTH, WIDTH, "mean")
    conv.fc_neigh = part(WIDTH, WIDTH, bias=False)
    compare(conv, partitioned)


@pytest.mark.parametrize("where", ["forward", "pre", "full backward", "everywhere"])
def test_hooks_see_what_they_saw(where: str, partitioned: Cutter) -> None:
    """And keep it: nothing is written over."""
    path = partitioned(mixed(), 1, "random")
    seen: list[Tensor] = []

    def note(*given: Any) -> None:
        seen.extend(t for t in torch.utils._pytree.tree_leaves(given) if isinstance(t, Tensor))

    def hooked(part: nn.Module) -> Any:
        if where == "everywhere":
            return nn.modules.module.register_module_forward_hook(note)
        register = {
            "forward": part.register_forward_hook,
            "pre": part.register_forward_pre_hook,
            "full backward": part.register_full_backward_hook,
        }
        return register[where](note)

    def case(group: Any) -> None:
        part, conv = Part(group, path), Sage(WIDTH, WIDTH, "mean").double()
        handle = hooked(conv.fc_neigh)
        try:
            x = whole(57, (WIDTH,), seed=1)[part.nodes].requires_grad_()
            out = conv(part.graph, x * 1)
            before = [t.detach().clone() for t in seen]
            out.sum().backward()
        finally:
            handle.remove()
        assert seen and all(torch.equal(a, b) for a, b in zip(seen, before, strict=False))

    run_threads(1, case)


def test_a_mode_of_the_user_sees_every_function(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    class Linears(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.count += func is F.linear
            return func(*args, **(kwargs or {}))

    def case(group: Any) -> int:
        part, conv = Part(group, path), Sage(WIDTH, WIDTH, "mean").double()
        with Linears() as linears:
            conv(part.graph, whole(57, (WIDTH,), seed=1)[part.nodes])
        return linears.count

    assert run_threads(2, case) == [2, 2]


class Smoothed(nn.Module):
    """A layer whose input is itself the very result of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Sage(WIDTH, WIDTH, "mean")

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        graph.ndata["h"] = x
        graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
        return self.conv(graph, graph.ndata.pop("h"))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "both terms wait": Smoothed,
    "weight norm": lambda: _with(nn.utils.parametrizations.weight_norm),
}


def _with(change: Callable[[nn.Module], Any]) -> nn.Module:
    conv = Sage(WIDTH, WIDTH, "mean")
    change(conv.fc_neigh)
    return conv


@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_dgl(name: str, partitioned: Cutter) -> None:
    torch.manual_seed(0)
    compare(LAYERS[name](), partitioned)


def test_gradients_are_plain_tensors(partitioned: Cutter) -> None:
    """Hooks may keep them: they neither ask for gradients nor hold the graph."""
    path, got = partitioned(mixed(), 1, "random"), []

    def case(group: Any) -> None:
        part, conv = Part(group, path), Sage(WIDTH, WIDTH, "mean").double()
        x = whole(57, (WIDTH,), seed=1)[part.nodes].requires_grad_()
        norm = sar.DistributedBN1D(WIDTH).double()
        h = conv(part.graph, x * 1)
        h.register_hook(got.append)
        out = norm(h)
        del h
        out.square().sum().backward()

    run_threads(1, case)
    assert len(got) == 1 and not got[0].requires_grad and got[0].grad_fn is None


def test_a_recomputed_layer_lets_its_input_go(partitioned: Cutter) -> None:
    """When backward has taken it, unless the graph is kept."""
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> None:
        part, conv = Part(group, path), Sage(WIDTH, WIDTH, "mean").double()
        sar.set_activations(conv, "recompute")
        x = whole(57, (WIDTH,), seed=1)[part.nodes].requires_grad_()
        out = conv(part.graph, x * 1)
        params = list(conv.parameters())
        first = torch.autograd.grad(out.sum(), params, retain_graph=True)
        second = torch.autograd.grad(out.sum(), params)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        with pytest.raises(RuntimeError, match="retain_graph"):
            torch.autograd.grad(out.sum(), params)

    run_threads(2, case)
