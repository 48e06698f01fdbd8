"""Models of torch_geometric.nn, prepared, against one process; those that need all nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import pyg as harness
from harness import run_threads
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, NUM_FEATURES, mixed
from harness.parts import Cutter
from harness.rows import made
from torch import Tensor, nn
from torch_geometric import nn as of_pyg
from torch_geometric.utils import scatter

import sar
import sar.pyg
from sar.comm import Group

WIDTH = NUM_FEATURES
Model = Callable[[], nn.Module]


class Edges(nn.Module):
    """What ``MetaLayer`` makes of edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.last = nn.Linear(2 * WIDTH + width + 2, 4)

    def forward(self, src: Any, dst: Any, edge_attr: Any, u: Any, batch: Any) -> Any:
        return self.last(torch.cat([src, dst, edge_attr, u[batch]], 1)).tanh()


class Nodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH + 4, 5), nn.Linear(WIDTH + 7, WIDTH)

    def forward(self, x: Any, edge_index: Any, edge_attr: Any, u: Any, batch: Any) -> Any:
        row, col = edge_index
        messages = self.first(torch.cat([x[row], edge_attr], 1))
        mean = scatter(messages, col, dim=0, dim_size=x.size(0), reduce="mean")
        return self.last(torch.cat([x, mean, u[batch]], 1))


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH + 2, 2)

    def forward(self, x: Any, edge_index: Any, edge_attr: Any, u: Any, batch: Any) -> Any:
        return self.last(torch.cat([u, scatter(x, batch, dim=0, reduce="mean")], 1))


class Meta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = of_pyg.MetaLayer(Edges(1), Nodes(), Graphs())
        self.last = of_pyg.MetaLayer(Edges(4), Nodes(), Graphs())

    def forward(self, x: Any, edge_index: Any, edge_attr: Any, batch: Any) -> Any:
        x, edges, u = self.first(x, edge_index, edge_attr, x.new_ones(1, 2), batch)
        return self.last(x, edge_index, edges, u, batch)[0]


class Infomax(nn.Module):
    """The rows, and what tells them from corrupted ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = of_pyg.DeepGraphInfomax(
            5, of_pyg.GCNConv(WIDTH, 5),
            lambda z, x, edge_index, batch: of_pyg.global_mean_pool(z, batch)[0].sigmoid(),
            lambda x, edge_index, batch: (x.flip(1), edge_index, batch),
        )  # fmt: skip
        self.inner.encoder.forward = lambda x, edge_index, batch: of_pyg.GCNConv.forward(
            self.inner.encoder, x, edge_index
        )

    def forward(self, *inputs: Any) -> Tensor:
        rows, corrupted, summary = self.inner(*inputs)
        return self.inner.discriminate(rows, summary).unsqueeze(1) + corrupted


def masked(x: Tensor) -> tuple[Tensor, Tensor]:
    """Labels and which are known."""
    return (x[:, 1] > 0).long(), x[:, 2] > 0


def corrected(model: Any, x: Tensor, edge_index: Any, columns: Any) -> Tensor:
    labels, known = masked(x)
    return model(x.softmax(1), labels[known], known, edge_index) + 0 * x


def decoded(model: Any, x: Tensor, edge_index: Any, columns: Any) -> Tensor:
    scores = model.decode(model.encode(x, edge_index), edge_index)
    return scatter(scores.unsqueeze(1), edge_index[1], 0, len(x))


def by_edges(model: Any, x: Tensor, edge_index: Any, columns: Any) -> Tensor:
    return model(x, edge_index)


def fingerprint(model: Any, x: Tensor, edge_index: Any, columns: Any) -> Tensor:
    return x[:, :4] * model(x, edge_index, columns["batch"])[columns["batch"]]


GCN = of_pyg.GCNConv
EXACT: dict[str, tuple[Model, Any]] = {
    "LabelPropagation": (
        lambda: of_pyg.LabelPropagation(3, 0.5),
        lambda m, x, e, c: m(x.detach().sigmoid(), e) + 0 * x,
    ),
    "CorrectAndSmooth": (
        lambda: of_pyg.CorrectAndSmooth(3, 0.5, 3, 0.5, autoscale=False), corrected,
    ),
    "RECT_L": (lambda: of_pyg.RECT_L(WIDTH, 8), by_edges),
    "PMLP": (lambda: of_pyg.PMLP(WIDTH, 8, 4, 3), by_edges),
    "PMLP, evaluated": (lambda: of_pyg.PMLP(WIDTH, 8, 4, 3).eval(), by_edges),
    "NeuralFingerprint": (lambda: of_pyg.NeuralFingerprint(WIDTH, 8, 4, 3), fingerprint),
    "MetaLayer": (Meta, lambda m, x, e, c: m(x, e, c["weight"].unsqueeze(1), c["batch"])),
    "GroupAddRev": (
        lambda: of_pyg.GroupAddRev(GCN(3, 3), num_groups=2),
        lambda m, x, e, c: m(x.clone(), e).clone(),
    ),
    "DeepGCNLayer, checkpoint": (
        lambda: of_pyg.DeepGCNLayer(
            of_pyg.GENConv(WIDTH, WIDTH), of_pyg.LayerNorm(WIDTH), nn.ReLU(), ckpt_grad=True,
            dropout=0.0,
        ),
        by_edges,
    ),
    "SignedGCN": (lambda: of_pyg.SignedGCN(WIDTH, 8, 2), lambda m, x, e, c: m(x, e, e)),
    "DeepGraphInfomax": (Infomax, lambda m, x, e, c: m(x, e, c["batch"])),
    "GAE": (lambda: of_pyg.GAE(GCN(WIDTH, 5)), decoded),
    "ARGA": (
        lambda: of_pyg.ARGA(GCN(WIDTH, 5), nn.Linear(5, 1)),
        lambda m, x, e, c: m.encode(x, e),
    ),
    "MaskLabel": (lambda: of_pyg.MaskLabel(2, WIDTH), lambda m, x, e, c: m(x, *masked(x))),
    "JumpingKnowledge": (
        lambda: of_pyg.JumpingKnowledge("lstm", WIDTH, 2), lambda m, x, e, c: m([x, x.tanh()]),
    ),
    "Sequential": (
        lambda: of_pyg.Sequential(
            "x, edge_index, batch",
            [(GCN(WIDTH, 8), "x, edge_index -> x"), (of_pyg.GraphNorm(8), "x, batch -> x")],
        ),
        lambda m, x, e, c: m(x, e, c["batch"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_models_are_those_of_one_process(name: str, partitioned: Cutter) -> None:
    """Outputs and gradients of input, edges and parameters, of a prepared model."""
    model, case = made(EXACT[name][0]), EXACT[name][1]
    columns = {"weight": mixed().edge_data[ETYPE_HOMO]["weight"].double()}
    x = mixed().node_data[NTYPE_HOMO]["feat"].double()

    def prepared(mine: Any, x: Tensor, edge_index: Any, columns: Any) -> Tensor:
        return case(sar.prepare(mine, edge_index), x, edge_index, columns)

    want = harness.whole(mixed(), model, case, x, columns)
    got = harness.sharded(partitioned(mixed(), 3), 3, model, prepared, x, columns)
    harness.compare(want, got, 1e-9)


def test_classes_of_labels_are_those_of_all_ranks(partitioned: Cutter) -> None:
    """The largest class is on one rank; one has no node."""
    graph, model = mixed(), of_pyg.LabelPropagation(3, 0.5)
    labels = torch.arange(57) % 4 + (torch.arange(57) == 56)
    want = model(labels, torch.stack(graph.edges[ETYPE_HOMO]), labels < 2)
    path = partitioned(graph, 3, [0] * 30 + [2] * 27)

    def case(group: Group) -> None:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        own = labels[data.n_id]
        for y in (own, own.unsqueeze(1)):
            torch.testing.assert_close(model(y, data.edge_index, own < 2), want[data.n_id])

    run_threads(3, case)


@pytest.mark.parametrize("layer", ["SAGEConv", "GINConv", "GATConv"])
def test_invertible_models_run_with_a_rank_of_one_node(layer: str, partitioned: Cutter) -> None:
    """Its columns are contiguous: a view of rows whose memory the model frees."""
    part = {"GINConv": lambda: of_pyg.GINConv(nn.Linear(3, 3))}
    kind = part.get(layer, lambda: getattr(of_pyg, layer)(3, 3))
    model, case = made(lambda: of_pyg.GroupAddRev(kind(), num_groups=2)), EXACT["GroupAddRev"][1]
    x = mixed().node_data[NTYPE_HOMO]["feat"].double()
    path = partitioned(mixed(), 3, [0] + [1] * 27 + [2] * 29)
    want = harness.whole(mixed(), model, case, x, {})
    harness.compare(want, harness.sharded(path, 3, model, case, x, {}), 1e-9)


REFUSED: dict[str, Any] = {
    "InnerProductDecoder.forward_all": lambda x, e: of_pyg.InnerProductDecoder().forward_all(x),
    "RECT_L.get_semantic_labels": lambda x, e: of_pyg.RECT_L(6, 8).get_semantic_labels(
        x, *masked(x)
    ),
    "LightGCN.get_embedding": lambda x, e: of_pyg.LightGCN(57, 6, 2).get_embedding(e),
    "GraphUNet": lambda x, e: of_pyg.GraphUNet(6, 8, 4, 2)(x, e),
    "negative_sampling": lambda x, e: of_pyg.GAE(GCN(6, 5)).recon_loss(x, e),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_need_all_nodes_are_refused(name: str, partitioned: Cutter) -> None:
    def case(group: Group, path: str) -> None:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        with pytest.raises(sar.NotSupportedError, match=name):
            REFUSED[name](data.x, data.edge_index)

    run_threads(3, case, partitioned(mixed(), 3, "adversarial"))
