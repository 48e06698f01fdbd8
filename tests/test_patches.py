"""What is changed in DGL: where, once, undone, and put in place for modules that come later."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import dgl
import dgl.nn
import pytest
import torch
from harness import run_threads
from harness.graphs import mixed, to_dgl
from harness.parts import Cutter
from torch import Tensor, nn

import sar
from sar.errors import NotSupportedError, UnsupportedMember
from sar.frontends.dgl import patches
from sar.train import NodeData, Trainer, TrainOptions


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    patches.uninstall()
    yield
    patches.uninstall()


def members() -> dict[tuple[str, str], Any]:
    """What all modules of DGL and the classes in them hold, by name."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "dgl" and module is not None:
            for key, value in list(vars(module).items()):
                if key.startswith("__"):
                    continue
                found[name, key] = value
                if isinstance(value, type) and issubclass(value, nn.Module):
                    own = {k: v for k, v in vars(value).items() if callable(v)}
                    found |= {(f"{name}.{key}", k): v for k, v in own.items()}
    return found


def differing(before: dict, after: dict) -> set[tuple[str, str]]:
    return {key for key in before | after if before.get(key) is not after.get(key)}


def on_a_part(partitioned: Cutter, case: Any) -> None:
    path = partitioned(mixed(), 2, "random")

    def run(group: Any) -> None:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        case(sar.construct_full_graph(data), data.node_features["_N/feat"])

    run_threads(2, run)


def test_uninstall_puts_every_original_back() -> None:
    before = members()
    patches.install()
    changed = differing(before, members())
    assert ("dgl", "reverse") in changed and ("dgl.nn.SAGEConv", "forward") in changed
    assert ("dgl.nn.DeepWalk", "__init__") in changed
    patches.uninstall()
    assert not differing(before, members())


def test_the_first_graph_installs_and_the_next_does_so_again(partitioned: Cutter) -> None:
    before = members()
    layer = dgl.nn.GraphConv(6, 3, allow_zero_in_degree=True)
    for _ in range(2):
        on_a_part(partitioned, lambda graph, x: layer(graph, x))
        assert differing(before, members())
        patches.uninstall()
        assert not differing(before, members())


def test_a_module_that_comes_later_is_patched_at_the_next_use(
    partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = sys.modules["dgl.readout"]
    monkeypatch.delitem(sys.modules, "dgl.readout")
    on_a_part(partitioned, lambda graph, x: None)
    original = late._topk_on
    monkeypatch.setitem(sys.modules, "dgl.readout", late)

    def case(graph: Any, x: Tensor) -> None:
        with graph.local_scope():
            assert late._topk_on is not original

    on_a_part(partitioned, case)


def test_a_trainer_patches_what_its_model_imported(partitioned: Cutter) -> None:
    """A layer's first call is that of all later ones, though DGL came after the graph."""

    def case(graph: Any, x: Tensor) -> None:
        graph.group.agree(None)  # both have their graph
        patches.uninstall()
        graph.group.agree(None)
        data = NodeData(x, torch.zeros(len(x)).long(), {"train": torch.arange(len(x))}, 2, False)
        model = dgl.nn.GraphConv(x.shape[1], 2, allow_zero_in_degree=True)
        Trainer(model, graph, data, TrainOptions(epochs=1), group=graph.group)
        assert hasattr(dgl.nn.GraphConv.forward, "__wrapped__")

    on_a_part(partitioned, case)


def test_what_others_replaced_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    patches.install()
    monkeypatch.setattr(dgl.nn.SAGEConv, "forward", before := lambda *_: None)
    patches.uninstall()
    assert dgl.nn.SAGEConv.forward is before
    monkeypatch.undo()
    patches.install()
    patches.uninstall()
    dgl.nn.SAGEConv.forward = inspect.unwrap(dgl.nn.SAGEConv.forward)  # as it came


def test_graphs_of_dgl_go_on_as_before() -> None:
    graph, layer = to_dgl(mixed()), dgl.nn.SAGEConv(6, 3, "mean")
    want = layer(graph, graph.ndata["feat"])
    patches.install()
    assert torch.equal(layer(graph, graph.ndata["feat"]), want)
    assert isinstance(dgl.reverse(graph), dgl.DGLGraph)
    assert list(inspect.signature(dgl.nn.SAGEConv.forward).parameters)[1:3] == ["graph", "feat"]


class Asks(nn.Module):
    """A layer of one's own that asks for what there is not, maybe through one of DGL's."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, graph: Any, x: Tensor) -> Any:
        return self.inner[0](graph, x) if self.inner else graph.adjacency_matrix()


def test_errors_begin_with_the_innermost_layer_of_dgl(partitioned: Cutter) -> None:
    def case(graph: Any, x: Tensor) -> None:
        with pytest.raises(UnsupportedMember, match="^a sharded graph has no member 'adj") as plain:
            Asks()(graph, x)
        assert plain.value.layer is None and isinstance(plain.value, AttributeError)
        with pytest.raises(UnsupportedMember, match="^Sequential: a sharded graph has") as caught:
            dgl.nn.Sequential(Asks())(graph, x)
        assert caught.value.layer == "Sequential"
        assert type(caught.value.__cause__) is UnsupportedMember
        with pytest.raises(NotSupportedError, match="^Broken: ") as inner:
            dgl.nn.Sequential(dgl.nn.Sequential(Broken()))(graph, x)
        assert str(inner.value).count(": ") == 1

    on_a_part(partitioned, case)


class Broken(dgl.nn.GraphConv):
    """A class without a forward of its own."""

    def __init__(self) -> None:
        super().__init__(6, 6)

    @property
    def _allow_zero_in_degree(self) -> bool:
        raise NotSupportedError("it does not run")

    @_allow_zero_in_degree.setter
    def _allow_zero_in_degree(self, value: bool) -> None:
        pass
