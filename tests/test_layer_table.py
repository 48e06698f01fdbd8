"""The table of DGL's modules in the docs: complete, and what it says of each holds."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl.nn
import pytest
import torch
from harness import models, run_threads
from harness.graphs import mixed, to_dgl
from harness.parts import Cutter
from torch import Tensor, nn

import sar
from sar.frontends.dgl.undistributed import UNDISTRIBUTED

DOCS = Path(__file__).resolve().parent.parent / "docs" / "wrapping.md"
ROW = re.compile(r"^\| `(\w+)` \| (exact|no graph|raises) \| (.*) \|$", re.M)
TABLE = {name: (kind, text) for name, kind, text in ROW.findall(DOCS.read_text())}
# Tested elsewhere than in the matrix of models: in test_readout.py, test_edge_inputs.py and below.
ELSEWHERE = {
    "AvgPooling", "GlobalAttentionPooling", "LabelPropagation", "MaxPooling", "Sequential",
    "Set2Set", "SortPooling", "SumPooling", "WeightAndSum", "TWIRLSUnfoldingAndAttention",
}  # fmt: skip


def test_every_class_has_a_row() -> None:
    classes = {name for name, kind in inspect.getmembers(dgl.nn, inspect.isclass)}
    assert classes == set(TABLE)


def test_rows_say_what_is_raised() -> None:
    raises = {name: text for name, (kind, text) in TABLE.items() if kind == "raises"}
    assert raises == UNDISTRIBUTED


def test_exact_layers_are_in_the_matrix() -> None:
    exact = {name for name, (kind, _) in TABLE.items() if kind == "exact"}
    tested = {name.split("-")[0] for name in [*models.layers(), *models.HETERO]}
    assert exact - ELSEWHERE <= tested


REFUSED: dict[str, Callable[[Any, Tensor], Any]] = {
    "SetTransformerEncoder": lambda g, x: dgl.nn.SetTransformerEncoder(6, 2, 3, 8)(g, x),
    "SetTransformerDecoder": lambda g, x: dgl.nn.SetTransformerDecoder(6, 2, 3, 8, 1, 2)(g, x),
    "GNNExplainer": lambda g, x: dgl.nn.GNNExplainer(Named(), 2, log=False).explain_node(0, g, x),
    "HeteroGNNExplainer": lambda g, x: dgl.nn.HeteroGNNExplainer(Named(), 2).explain_graph(
        g, {"_N": x}
    ),
    "SubgraphX": lambda g, x: dgl.nn.SubgraphX(Named(), 2).explain_graph(g, x, 0),
    "HeteroSubgraphX": lambda g, x: dgl.nn.HeteroSubgraphX(Named(), 2).explain_graph(
        g, {"_N": x}, 0
    ),
    "DeepWalk": lambda g, x: dgl.nn.DeepWalk(g),
    "MetaPath2Vec": lambda g, x: dgl.nn.MetaPath2Vec(g, ["_E"] * 5, 5),
    "DenseGraphConv": lambda g, x: dgl.nn.DenseGraphConv(6, 4)(g, x),
    "DenseSAGEConv": lambda g, x: dgl.nn.DenseSAGEConv(6, 4)(g, x),
    "DenseChebConv": lambda g, x: dgl.nn.DenseChebConv(6, 4, 2)(g, x),
}


class Named(nn.Module):
    """A model with the arguments that explainers give."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = dgl.nn.GraphConv(6, 4, allow_zero_in_degree=True)

    def forward(self, graph: Any, feat: Any, eweight: Any = None) -> Tensor:
        return self.conv(graph, feat["_N"] if isinstance(feat, dict) else feat)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_distributed_says_why(name: str, partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph = sar.construct_full_graph(data)
        with pytest.raises(sar.NotSupportedError) as caught:
            REFUSED[name](graph, data.node_features["_N/feat"])
        assert str(caught.value) == f"{name} cannot be distributed: it {UNDISTRIBUTED[name]}"

    path = partitioned(mixed(), 2, "random")
    run_threads(2, case)


def test_cugraph_layers_are_refused_by_dgl() -> None:
    """They cannot be made without cuGraph; with it, they would ask the graph for its arrays."""
    assert set(UNDISTRIBUTED) - set(REFUSED) == {n for n in TABLE if n.startswith("CuGraph")}


def test_sequential_takes_one_graph(partitioned: Cutter) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        convs = [dgl.nn.GraphConv(6, 6, allow_zero_in_degree=True) for _ in range(2)]
    whole = to_dgl(mixed())
    want = convs[1](whole, convs[0](whole, whole.ndata["feat"]))
    torch.testing.assert_close(dgl.nn.Sequential(*convs)(whole, whole.ndata["feat"]), want)

    def case(group: Any) -> tuple[Tensor, Tensor, Tensor]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph, x = sar.construct_full_graph(data), data.node_features["_N/feat"]
        model = dgl.nn.Sequential(*convs)
        return model(graph, x), model([graph, graph], x), data.node_features["_N/orig_id"]

    path = partitioned(mixed(), 2, "random")
    for one, several, ids in run_threads(2, case):
        torch.testing.assert_close(one, want[ids], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(several, want[ids], rtol=1e-5, atol=1e-6)
