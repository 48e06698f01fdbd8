"""Which code computes a layer: the fused one however it is called, the layer's own, with a word,
where somebody looks into it; and what a fused layer may write over."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import dgl.nn
import pytest
import torch
from harness import RankFailed, run_threads
from harness.graphs import mixed, shop
from harness.late import run_late
from harness.parts import Cutter
from harness.rows import Part, results, whole
from harness.sage import SIZE, WIDTH, Then, compare, fused_ones, sage
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import sar
from sar.comm import Group
from sar.frontends.dgl import patches
from sar.models import LayerOptions


class Own(dgl.nn.SAGEConv):
    """A subclass that computes something else."""

    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        return 2 * self.fc_self(feat) + graph.num_dst_nodes() * 0


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Noting(TorchFunctionMode):
    """Sees every function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Around(nn.Module):
    """A layer, called by a function."""

    def __init__(self, conv: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.conv, self.call = conv, call

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.call(self.conv, graph, x)


def changed(conv: nn.Module, **parts: Any) -> nn.Module:
    for name, part in parts.items():
        setattr(conv, name, part)
    return conv


def hooked(conv: Any) -> nn.Module:
    conv.fc_self.register_forward_hook(lambda part, args, out: 2 * out)
    return conv


def watched(conv: nn.Module, graph: Any, x: Tensor) -> Tensor:
    with Noting():
        return conv(graph, x)


def weighted(conv: nn.Module, graph: Any, x: Tensor) -> Tensor:
    return conv(graph, x, edge_weight=x.new_full((graph.num_edges(), 1), 0.5))


def of_pair(conv: nn.Module, graph: Any, x: Tensor) -> Tensor:
    return conv(graph, (x, x))


def gcn() -> nn.Module:
    return dgl.nn.GraphConv(WIDTH, WIDTH, allow_zero_in_degree=True)


def gin(op: str = "sum") -> nn.Module:
    return dgl.nn.GINConv(nn.Linear(WIDTH, WIDTH), op, 0.5)


# The layer, and the warning where the user's doing keeps it from being fused.
OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gcn": (lambda: sage(kind="gcn"), ""),
    "pool": (lambda: sage(kind="pool"), ""),
    "another part": (lambda: changed(sage(), fc_neigh=Doubled(WIDTH, WIDTH, bias=False)), ""),
    "a bias of the mean": (lambda: changed(sage(), fc_neigh=nn.Linear(WIDTH, WIDTH)), ""),
    "broadcast": (lambda: changed(sage(), fc_neigh=nn.Linear(WIDTH, 1, bias=False)), ""),
    "one part twice": (lambda: changed(conv := sage(bias=False), fc_neigh=conv.fc_self), ""),
    "edge weights": (lambda: Around(sage(), weighted), ""),
    "a pair": (lambda: Around(sage(), of_pair), ""),
    "gcn weights": (lambda: Around(gcn(), weighted), ""),
    "gcn pair": (lambda: Around(gcn(), of_pair), ""),
    "gcn more dimensions": (
        lambda: Around(gcn(), lambda c, graph, x: c(graph, torch.stack([x, 2 * x], 1)).sum(1)),
        "",
    ),
    "gin weights": (lambda: Around(gin(), weighted), ""),
    "gin pair": (lambda: Around(gin(), of_pair), ""),
    "gin max": (lambda: gin("max"), ""),
    "a hook on a part": (lambda: hooked(sage()), "Linear in it has a hook"),
    "a mode": (lambda: Around(sage(), watched), "the mode Noting looks"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_others_are_computed_as_they_say(kind: str, partitioned: Cutter) -> None:
    """With one warning for each layer and reason, where the user is the reason."""
    make, reason = OTHERS[kind]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(make(), partitioned, run=run_late)
    told = [str(w.message) for w in caught if "not the fused layer" in str(w.message)]
    assert len(told) == (SIZE if reason else 0)
    assert all(one.startswith("SAGEConv: ") and reason in one for one in told)
    with pytest.raises((RankFailed, sar.NotSupportedError), match="fused, as strict=True asks"):
        compare(fused_ones(make()), partitioned)


@pytest.mark.parametrize("kind", ["hook", "global hook", "autocast"])
def test_a_change_later_is_heeded_and_said_once(kind: str, partitioned: Cutter) -> None:
    path, layer = partitioned(mixed(), 1), sage().double()
    seen: list[Any] = []

    def change(mine: Any) -> Any:
        note = lambda part, args, out: seen.append(out.shape)  # noqa: E731
        if kind == "hook":
            return mine.fc_neigh.register_forward_hook(note)
        if kind == "global hook":
            return nn.modules.module.register_module_forward_hook(note)
        context = torch.autocast("cpu", dtype=torch.bfloat16, enabled=True)
        context.__enter__()
        return context

    def case(group: Group) -> None:
        part, rows = Part(group, path), whole(57, (WIDTH,), seed=1)
        inputs = rows[part.nodes], rows[part.nodes]
        before = results(part.graph, layer, *inputs)
        handle = change(layer)
        try:
            for _ in range(2):
                layer.zero_grad()
                after = results(part.graph, layer, *inputs)
        finally:
            handle.__exit__(None, None, None) if kind == "autocast" else handle.remove()
        assert seen or kind == "autocast"
        for name in before:  # products of float64 stay what they are under autocast
            torch.testing.assert_close(after[name], before[name], rtol=1e-11, atol=1e-11)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(1, case)
    told = [str(w.message) for w in caught if "not the fused layer" in str(w.message)]
    assert len(told) == 1 and kind.split()[-1] in told[0]


@pytest.mark.parametrize("kind", ["own forward", "replaced forward"])
def test_a_forward_of_ones_own_is_said(kind: str, partitioned: Cutter) -> None:
    """Once; what it computes is what it says."""
    layer = Own(WIDTH, WIDTH, "mean") if kind == "own forward" else sage()
    if kind == "replaced forward":
        layer.forward = lambda graph, x: 2 * layer.fc_self(x)
    with pytest.warns(UserWarning, match="a forward of its own") as told:
        sar.optimize(nn.ModuleList([layer]))
        sar.optimize(layer)
    assert len(told) == 1
    with pytest.raises(sar.NotSupportedError, match="strict=True: .* a forward of its own"):
        sar.optimize(layer, strict=True)
    if kind == "own forward":
        compare(layer, partitioned)


@pytest.mark.parametrize("of", [dgl.nn.SAGEConv, nn.Linear])
def test_changed_classes(
    of: type[nn.Module], partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches.uninstall()
    forward = of.forward
    monkeypatch.setattr(of, "forward", lambda layer, *args: 2 * forward(layer, *args))
    if of is nn.Linear:
        compare(sage(), partitioned)
        return
    with pytest.warns(UserWarning, match="not that of a known version"):
        compare(sage(), partitioned)


class First(nn.Module):
    """A module of a layer of several relations, for which it reads one side."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = fused_ones(sage())

    def forward(self, graph: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.conv(graph, pair[0])


@pytest.mark.parametrize("alone", [False, True])
def test_rows_that_relations_share(alone: bool, partitioned: Cutter) -> None:
    """Travel once for all that read them; as a whole each layer would fetch its own."""
    path = partitioned(shop(), 2, "random")

    def case(group: Group) -> None:
        graph = sar.construct_full_graph(sar.load_dgl_partition_data(path, group.rank))
        modules: dict[str, nn.Module] = {name: sage() for name in graph.etypes}
        layer = dgl.nn.HeteroGraphConv({**modules, "follows": First()})
        inputs = {
            ntype: torch.ones(graph.num_nodes(ntype), WIDTH, requires_grad=True)
            for ntype in graph.ntypes
        }
        if alone:
            layer.mods["follows"](graph["follows"], (inputs["user"], None)).sum().backward()
            return
        with pytest.raises(sar.NotSupportedError, match="which travel once for all"):
            layer(graph, inputs)

    run_threads(2, case)


def test_what_is_narrow_is_plain(partitioned: Cutter) -> None:
    path, rows = partitioned(mixed(), 2), whole(mixed().total_nodes, (WIDTH,), seed=1)

    def case(group: Group) -> None:
        part, layer = Part(group, path), fused_ones(sage())
        x = rows[part.nodes].float().requires_grad_()
        with pytest.raises(sar.NotSupportedError, match="rows are torch.bfloat16"):
            layer.bfloat16()(part.graph, x.bfloat16())
        layer.float()(part.graph, x)

    run_threads(2, case)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_ranks_that_choose_differently_meet(activations: str, partitioned: Cutter) -> None:
    """A hook on one rank alone: the others send it what it waits for, in both passes."""

    def on_rank(rank: int, layer: nn.Module) -> None:
        for conv in layer.parts:
            if rank == 1:
                conv.fc_self.register_forward_hook(lambda part, args, out: None)
            else:
                fused_ones(conv)
        sar.set_activations(layer, activations)

    for rounds in (1, SIZE - 1):
        compare(Then(sage(activation=F.relu), sage(3)), partitioned, on_rank=on_rank, rounds=rounds)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("width", [2, WIDTH])
def test_the_input_is_written_over_where_that_was_asked_for(
    width: int, donate: bool, activations: str, partitioned: Cutter
) -> None:
    """Not a leaf, not a view, and not while the graph is kept."""
    path = partitioned(mixed(), 2, "random")

    def case(group: Group) -> None:
        part, layer = Part(group, path), fused_ones(sage(width).double(), donate=donate)
        sar.set_activations(layer, activations)
        leaf = whole(57, (WIDTH,), seed=1)[part.nodes].requires_grad_()
        was = leaf.detach().clone()
        for x, keep, may in [
            (leaf * 1, False, donate), (leaf * 1, True, False), (leaf, False, False),
            (leaf[:], False, False), ((leaf * 1)[:], False, False),
        ]:  # fmt: skip
            (dx,) = torch.autograd.grad(layer(part.graph, x).sum(), x, retain_graph=keep)
            assert (x.data_ptr() == dx.data_ptr()) is may
            assert torch.equal(x, was) is not may
        with torch.no_grad():
            layer(part.graph, leaf)
        assert torch.equal(leaf, was)

    run_threads(2, case)


@pytest.mark.parametrize("width", [2, WIDTH])
def test_whoever_reads_a_donated_input_later_is_told(width: int, partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Group) -> None:
        part, layer = Part(group, path), fused_ones(sage(width), donate=True)
        x = torch.ones(part.graph.num_nodes(), WIDTH, requires_grad=True)
        rows = (x * 2).relu()  # which saves its result
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            layer(part.graph, rows).sum().backward()
        rows = x * 2
        squares = rows.square().sum()
        layer(part.graph, rows).sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.backward()

    run_threads(2, case)


@pytest.mark.parametrize("width", [2, WIDTH])
def test_gradients_of_gradients_raise(width: int, partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Group) -> None:
        part, conv = Part(group, path), fused_ones(sage(width))
        x = torch.ones(part.graph.num_nodes(), WIDTH, requires_grad=True)
        with pytest.raises(sar.NotSupportedError, match="create_graph"):
            torch.autograd.grad(conv(part.graph, x).sum(), x, create_graph=True)
        with pytest.raises(sar.NotSupportedError, match="create_graph"):  # never comes to the rows
            out = conv(part.graph, x * 1).sum()
            torch.autograd.grad(out, conv.fc_neigh.weight, create_graph=True)

    run_threads(2, case)


def test_what_was_asked_for_stays_with_the_layer() -> None:
    model = sar.optimize(nn.Sequential(sage(), nn.ReLU()), donate=True)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert one[0].sar_options == LayerOptions(donate=True)
    assert not hasattr(model[1], "sar_options") and "sar_options" not in model.state_dict()
    assert sar.optimize(model) is model and not model[0].sar_options.donate
    with pytest.raises(TypeError, match="model: got list"):
        sar.optimize([sage()])
    with pytest.raises(TypeError, match="donate: got int"):
        sar.optimize(model, donate=1)
    with pytest.raises(ValueError, match="expected one with a known layer"):
        sar.optimize(nn.ReLU(), strict=True)


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "alone": lambda h: h,
    "beside another": lambda h: h + 0.5 * h.sin(),
    "a residual behind": lambda h: h * 1,
}


@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize("width", [2, WIDTH])
def test_gradients_of_donated_results_of_relus(width: int, kind: str, partitioned: Cutter) -> None:
    """What two read is not handed over; numbers are DGL's."""
    use = USES[kind]

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = sage(activation=F.relu), sage(activation=F.relu)
            self.last = sage(width)

        def forward(self, graph: Any, x: Tensor) -> Tensor:
            first = self.first(graph, x)
            second = self.second(graph, use(first))
            both = use(second) + first if kind == "a residual behind" else use(second)
            return self.last(graph, both)

    compare(fused_ones(Residual(), donate=True), partitioned)
