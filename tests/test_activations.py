"""Layers that keep, recompute, page or round what backward needs: the same results from each."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl.nn
import pytest
import torch
from harness import run_threads
from harness.graphs import NUM_FEATURES, looped, mixed
from harness.parts import Cutter
from torch import Tensor, nn
from torch.nn import functional as F

import sar
from sar.memory import paging
from sar.models.activations import layers_of
from sar.train import ModelOptions, build_model

WIDTHS = (NUM_FEATURES, 8, 8, 4)
LAYERS = {
    "sage": lambda a, b: dgl.nn.SAGEConv(a, b, "mean", feat_drop=0.2),
    "sage-pool": lambda a, b: dgl.nn.SAGEConv(a, b, "pool"),
    "gcn": lambda a, b: dgl.nn.GraphConv(a, b),
    "gat": lambda a, b: dgl.nn.GATConv(a, b // 2, 2, 0.1, 0.3, activation=F.elu),
    "gatv2": lambda a, b: dgl.nn.GATv2Conv(a, b // 2, 2, attn_drop=0.3),
    "gin": lambda a, b: dgl.nn.GINConv(
        nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Linear(b, b)), "sum"
    ),
}


class Model(nn.Module):
    """Three layers with dropout, batch norm and a nonlinearity between them."""

    def __init__(self, kind: str, dropout: float = 0.3) -> None:
        super().__init__()
        self.convs = nn.ModuleList(LAYERS[kind](a, b) for a, b in zip(WIDTHS, WIDTHS[1:]))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = conv(graph, self.dropout(x)).flatten(1)
            if i < 2:
                x = F.elu(self.norms[i](x))
        return x


@pytest.fixture(autouse=True)
def every_tensor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs are small, and so are the tensors that would be left alone."""
    monkeypatch.setattr(paging, "LEAST_BYTES", 1)


def trained(group: Any, path: str, model: nn.Module, activations: str, *policy: Any) -> list:
    """Everything that two steps leave behind: outputs, gradients, buffers."""
    data = sar.load_dgl_partition_data(path, group.rank)
    graph = sar.construct_full_graph(data, sar.Policy(*policy))
    model = copy.deepcopy(model).double()
    names = list(model.state_dict())
    sar.set_activations(model, activations)
    assert list(model.state_dict()) == names
    x = data.node_features["_N/feat"].double().requires_grad_()
    sar.manual_seed(3, group=group)
    outputs = []
    for _ in range(2):
        outputs.append(model(graph, x))
        sar.global_mean(outputs[-1].sin()).backward()
    sar.gather_grads(model)
    found = [*(out.detach() for out in outputs), x.grad, *(b.clone() for b in model.buffers())]
    return found + [p.grad for p in model.parameters()]


def same(
    got: list[list], want: list[list], equal: Callable[[Tensor, Tensor], bool] = torch.equal
) -> bool:
    pairs = [pair for ranks in zip(got, want, strict=True) for pair in zip(*ranks, strict=True)]
    return all((a is None and b is None) or equal(a, b) for a, b in pairs)


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "size", "policy"),
    [
        *((kind, 3, ()) for kind in LAYERS),
        *((kind, 4, (1, None, False)) for kind in LAYERS),
        *((kind, size, ()) for kind in ("sage", "gat") for size in (1, 2)),
    ],
)
def test_results_are_those_of_keeping(
    kind: str, size: int, policy: tuple, partitioned: Cutter
) -> None:
    """With dropout of features and attention, and batch norm of all ranks: bit for bit, but where
    a recomputed GraphSAGE layer sums gradients in another order."""
    torch.manual_seed(0)
    model = sar.convert_dropout(sar.convert_batch_norm(Model(kind)))
    path = partitioned(looped(), size)
    want = run_threads(size, trained, path, model, "keep", *policy)
    for activations in ("recompute", "offload"):
        equal = close if (kind, activations) == ("sage", "recompute") else torch.equal
        got = run_threads(size, trained, path, model, activations, *policy)
        assert same(got, want, equal)


def test_torch_dropout_is_replayed(partitioned: Cutter) -> None:
    """nn.Dropout draws from torch's generator, nn.BatchNorm1d counts in buffers of its own.

    A recomputed GraphSAGE layer sums gradients in another order; masks of another draw would differ
    by far more.
    """

    def case(group: Any, activations: str) -> list:
        return [*trained(group, path, model, activations), torch.rand(3)]

    model, path = Model("sage"), partitioned(looped(), 1)
    want, got = (run_threads(1, case, activations) for activations in ("keep", "recompute"))
    assert same(got, want, close)


def saved_bytes(run: Any) -> int:
    """Bytes of different storages that autograd keeps while ``run``'s result lives."""
    kept: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        out = run()
    del out
    return sum(kept.values())


def test_a_recomputed_layer_keeps_its_input_alone(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(path, 0)
        graph, x = sar.construct_full_graph(data), data.node_features["_N/feat"].requires_grad_()
        conv = dgl.nn.GATConv(NUM_FEATURES, 8, 4)
        whole = saved_bytes(lambda: conv(graph, x))
        sar.set_activations(conv, "recompute")
        assert saved_bytes(lambda: conv(graph, x)) <= x.nbytes + 64 < whole / 4
        sar.set_activations(conv, "keep")
        assert saved_bytes(lambda: conv(graph, x)) == whole
        assert "forward" not in conv.__dict__

    path = partitioned(looped(), 1)
    run_threads(1, case)


def test_backward_may_run_twice_and_copies_have_the_setting(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(path, 0)
        graph, x = sar.construct_full_graph(data), data.node_features["_N/feat"].requires_grad_()
        model = sar.convert_dropout(sar.convert_batch_norm(Model("sage")))
        for activations in ("recompute", "offload"):
            sar.set_activations(model, activations)
            for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                sar.manual_seed(1)
                buffers = [b.clone() for b in one.buffers()]
                loss = one(graph, x).square().sum()
                assert any(not torch.equal(a, b) for a, b in zip(buffers, one.buffers()))
                first = torch.autograd.grad(loss, [*one.parameters(), x], retain_graph=True)
                again = torch.autograd.grad(loss, [*one.parameters(), x])
                assert same([list(first)], [list(again)])
            states = [layer.__dict__.get("forward") for layer in copy.deepcopy(model).modules()]
            assert any(states)

    path = partitioned(looped(), 1)
    run_threads(1, case)


def test_the_last_setting_counts(partitioned: Cutter) -> None:
    model = Model("sage")
    for activations in ("recompute", "offload", "lossy_bfloat16", "recompute", "keep"):
        sar.set_activations(model, activations)
        changed = [m for m in model.modules() if "forward" in m.__dict__]
        want = {"recompute": list(model.convs), "keep": []}.get(activations, [model])
        assert changed == want
    sar.set_activations([model.convs[1], model.norms[0]], "recompute")
    assert {"forward"} <= model.norms[0].__dict__.keys() & model.convs[1].__dict__.keys()
    sar.set_activations(model, "keep")
    assert not any("forward" in m.__dict__ for m in model.modules())


class Block(nn.Module):
    def __init__(self, convs: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(LAYERS["sage"](8, 8) for _ in range(convs))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, g: Any, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.norm(conv(g, x))
        return x


def test_layers_are_found() -> None:
    one, two = Block(1), Block(2)
    hetero = dgl.nn.HeteroGraphConv({"a": LAYERS["gcn"](8, 8), "b": LAYERS["gcn"](8, 8)})
    assert layers_of(nn.ModuleList([one, two, hetero])) == [one, *two.convs, hetero]
    linear = nn.Linear(2, 2)
    assert layers_of(linear) == [linear]
    stack = build_model(ModelOptions(batch_norm=True), 4, 3)
    names = ["convs.0.bias", "norms.1.weight"]
    assert set(names) <= set(stack.state_dict()) and len(layers_of(stack)) == 3
    assert not any("layer" in name for name in stack.state_dict())


@pytest.mark.parametrize(
    ("module", "activations", "directory", "error", "message"),
    [
        (nn.Linear(1, 1), "recomputed", None, ValueError, "got 'recomputed', expected one of keep"),
        (nn.Linear(1, 1), None, None, ValueError, "activations: got None"),
        (lambda x: x, "keep", None, TypeError, "module: got function"),
        ([], "keep", None, TypeError, "module: got an empty list"),
        ([nn.ReLU(), 3], "keep", None, TypeError, "module: got a list with int"),
        (nn.Linear(1, 1), "keep", ".", ValueError, "directory: got '.' with 'keep'"),
        (nn.Linear(1, 1), "offload", "/nowhere", ValueError, "directory: got '/nowhere'"),
    ],
)
def test_bad_arguments(
    module: Any, activations: Any, directory: Any, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        sar.set_activations(module, activations, directory=directory)


def test_offloaded_tensors_lie_in_a_file_once_and_go(tmp_path: Path) -> None:
    hooks = paging.Offload(str(tmp_path))
    x = torch.randn(3000, 5)
    held = torch.randn(4)
    other = x.t()
    packed = [hooks.pack(t, {held.data_ptr()}) for t in (x, other, x.view(-1), held, x[:7])]
    assert packed[3].tensor is held
    assert len({id(p[0]) for p in packed[:3]}) == 1 and hooks.file.used_bytes < 1.2 * x.nbytes
    assert os.listdir(tmp_path) == []  # without a name it cannot be left behind
    want = [t.clone() for t in (x, other, x.view(-1), held, x[:7])]
    x.zero_()
    for p, t in zip(packed, want, strict=True):
        assert torch.equal(hooks.unpack(p), t) and hooks.unpack(p).stride() == t.stride()
    again = hooks.pack(x, set())
    assert again[0] is not packed[0][0] and not hooks.unpack(again).any()  # written since
    read = hooks.unpack(packed[0])
    del packed, p
    assert hooks.file.used_bytes > 0 and torch.equal(read, want[0])
    del read, again
    assert hooks.file.used_bytes == 0


@pytest.mark.parametrize("activations", ["offload", "lossy_bfloat16"])
def test_a_write_into_what_stays_in_memory_is_an_error(activations: str) -> None:
    """As it is with "keep": arguments are not copied, so backward would read other values."""
    linear, x = nn.Linear(4, 4), torch.randn(5, 4)
    sar.set_activations(linear, activations)
    y = linear(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="written into after the forward pass"):
        y.sum().backward()


def test_pages_that_go_while_others_are_taken_are_not_handed_out_twice() -> None:
    """Finalizers run whenever the interpreter likes, also in the middle of a search for room."""

    file, gone = paging.PageFile(None), [4096]

    class Span(tuple):
        def __iter__(self) -> Any:
            while gone:
                file.give(gone.pop(), 4096)
            return super().__iter__()

    assert file.take(4096 * 4) == 0
    file._free = [Span((0, 4096)), (8192, 8192)]
    assert file.take(8192) == 8192
    assert file.take(8192) == 0 and file.used_bytes == 4096 * 4


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(50, 4)
    sar.set_activations(model, "offload", directory=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(sar.SarError, match=f"cannot be written in '{tmp_path}'.*No space left"):
            model(x)
    model(x).sum().backward()


def test_lossy_bfloat16_says_what_it_does() -> None:
    linear, x = nn.Linear(64, 64), torch.randn(50, 64)
    sar.set_activations(linear, "lossy_bfloat16")
    block = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), linear)
    want, _ = block(x), sar.set_activations(block, "lossy_bfloat16")
    assert torch.equal(block(x), want)
    want.square().sum().backward()
    exact = linear.weight.grad.clone()
    linear.weight.grad = None
    block(x).square().sum().backward()
    apart = (linear.weight.grad - exact).norm() / exact.norm()
    assert 0 < apart < 0.01


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_a_layer_that_fails_cleans_up(activations: str, partitioned: Cutter) -> None:
    class Fails(nn.Module):
        fails = False

        def forward(self, graph: Any, x: Tensor) -> Tensor:
            y = graph.aggregate(x.exp(), "sum").sin()
            if self.fails:
                raise ArithmeticError("as asked")
            return y.square()

    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(path, group.rank)
        graph, x = sar.construct_full_graph(data), data.node_features["_N/feat"].requires_grad_()
        layer, drop = Fails(), sar.nn.Dropout(0.5, graph)
        sar.set_activations(layer, activations)
        layer.fails = True
        with pytest.raises(ArithmeticError):
            layer(graph, x)
        layer.fails = False
        y = layer(graph, x)
        layer.fails = activations == "recompute"
        if layer.fails:
            with pytest.raises(ArithmeticError):
                y.sum().backward()
            layer.fails = False
        drop(x).sum()  # refused where a repetition is thought to be under way in backward
        assert saved_bytes(lambda: x.exp()) > 0 and not group.seeds.replays
        want = graph.aggregate(x.exp(), "sum").sin().square()
        grads = [torch.autograd.grad(out.sum(), x)[0] for out in (layer(graph, x), want)]
        assert torch.equal(*grads)

    path = partitioned(mixed(), 2)
    run_threads(2, case)
