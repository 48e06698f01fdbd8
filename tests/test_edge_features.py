"""``--edge-features``: models get columns of edges, full-batch and sampled, as one process has."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import run_threads
from harness.commands import CPU, on_threads
from harness.graphs import ETYPE_HOMO, GraphArrays, mixed, shop, to_dgl
from harness.parts import Cutter
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from sar.__main__ import main, read_words
from sar.cli.train import make_trainer
from sar.models import build_model, read_call
from sar.plan.probe import Work, probe_bytes
from sar.run_options import ModelOptions

pytest.importorskip("dgl.nn")
pytest.importorskip("torch_geometric")
SOURCE = """
import dgl.function as fn
import dgl.nn
import torch
import torch_geometric.nn as pyg
from torch import nn


def both(graph):
    return graph if isinstance(graph, list) else [graph, graph]


class Weighted(nn.Module):
    num_blocks = 2

    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a = dgl.nn.SAGEConv(in_feats, 8, "mean")
        self.b = dgl.nn.SAGEConv(8, out_feats, "mean")

    def forward(self, graph, x, edge_weight):
        w = edge_weight if isinstance(edge_weight, list) else [edge_weight, edge_weight]
        first, last = both(graph)
        return self.b(last, self.a(first, x, w[0]).relu(), w[1])


class Reads(nn.Module):
    num_blocks = 1

    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.lin, self.own = nn.Linear(in_feats, out_feats), nn.Linear(in_feats, out_feats)

    def forward(self, graph, x):
        graph = both(graph)[0]
        with graph.local_scope():
            graph.srcdata["h"] = self.lin(x)
            graph.edata["w"] = graph.edata["weight"] * graph.edata["feat"].sum(1)
            graph.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "o"))
            return graph.dstdata["o"] + self.own(x[: graph.num_dst_nodes()])


class Gated(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a = pyg.GATv2Conv(in_channels, 8, edge_dim=3, add_self_loops=False)
        self.b = pyg.GraphConv(8, out_channels)

    def forward(self, x, edge_index, attr, strength):
        return self.b(self.a(x, edge_index, attr).relu(), edge_index, strength)


class Whole(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a = pyg.GATv2Conv(in_channels, 8, edge_dim=3, add_self_loops=False)
        self.b, self.c = pyg.GraphConv(8, 8), nn.Linear(16, out_channels)

    def forward(self, data):
        h = self.a(data.x, data.edge_index, data.edge_attr).relu()
        h = self.b(h, data.edge_index, data.w)
        mean = pyg.global_mean_pool(h, data.batch)
        return self.c(torch.cat([h, mean.expand(len(h), -1)], 1))


class ShopWhole(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = ShopPyg(in_channels, out_channels)

    def forward(self, batch):
        return self.conv(batch.x_dict, batch.edge_index_dict, batch.edge_weight_dict)


RELATIONS = {"buys": ("user", "item"), "marks": ("tag", "item")}
OTHERS = {"bought_by": ("item", "user"), "carries": ("item", "tag"), "follows": ("user", "user")}


class Shop(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        convs = {e: dgl.nn.SAGEConv((in_feats[s], in_feats[d]), out_feats, "mean")
                 for e, (s, d) in (RELATIONS | OTHERS).items()}
        self.conv = dgl.nn.HeteroGraphConv(convs)

    def forward(self, graph, x, edge_weight_dict):
        known = {e[1]: w for e, w in edge_weight_dict.items()}
        more = {e: {"edge_weight": known[e]} for e in known}
        return self.conv(graph, x, mod_kwargs=more)["item"]


class Blocks(Shop):
    num_blocks = 1

    def forward(self, graph, x, edge_weight_dict):
        if isinstance(graph, list):
            graph, edge_weight_dict = graph[0], edge_weight_dict[0]
        return super().forward(graph, x, edge_weight_dict)


class OneWeight(Shop):
    def forward(self, graph, x, edge_weight):
        return self.conv(graph, x)["item"]


class ShopPyg(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = pyg.HeteroConv({
            (s, e, d): pyg.GraphConv((in_channels[s], in_channels[d]), out_channels)
            for e, (s, d) in RELATIONS.items()})

    def forward(self, x_dict, edge_index_dict, edge_weight_dict):
        return self.conv(x_dict, edge_index_dict, edge_weight_dict)["item"]
"""
PYG_GCN = ["torch_geometric.nn:GCN", "--model-args", "hidden_channels=8"]
PYG_GCN += ["--model-args", "num_layers=2"]
PYG_GAT = ["torch_geometric.nn:GAT", *PYG_GCN[1:], "--model-args", "edge_dim=3"]
CASES: dict[str, tuple[list[str], list[str]]] = {
    "weights": (["mine.py:Weighted"], ["weight"]),
    "other name": (["mine.py:Weighted"], ["edge_weight=price"]),
    "in order": (["mine.py:Gated"], ["feat", "price"]),
    "said": (["mine.py:Gated"], ["strength=weight", "attr=feat"]),
    "read": (["mine.py:Reads"], ["weight", "_N:_E:_N/feat"]),
    "gcn": (PYG_GCN, ["weight"]),
    "gat": (PYG_GAT, ["feat"]),
    "whole": (["mine.py:Whole"], ["feat", "w=price"]),
    "shop whole": (["mine.py:ShopWhole"], ["weight"]),
    "shop": (["mine.py:Shop"], ["weight"]),
    "shop of blocks": (["mine.py:Blocks"], ["weight"]),
    "shop of pyg": (["mine.py:ShopPyg"], ["edge_weight_dict=weight"]),
}
LOOP = ["--no-progress", "--epochs", "3"]


@cache
def graph_of(name: str) -> GraphArrays:
    """With features, weights and a price of each edge, and masks of the nodes to learn."""
    graph, rng = (shop() if "shop" in name else mixed().with_orig_ids()), torch.Generator()
    edge_data = {}
    for etype, columns in graph.edge_data.items():
        count = len(columns["weight"])
        more = torch.rand(count, 3, generator=rng), torch.rand(count, generator=rng)
        edge_data[etype] = {**columns, "feat": more[0], "price": more[1]}
    ntype = "item" if "shop" in name else "_N"
    nodes = {t: dict(columns) for t, columns in graph.node_data.items()}
    nodes[ntype] |= dict.fromkeys(("val_mask", "test_mask"), ~nodes[ntype]["train_mask"].bool())
    for other in nodes.keys() - {ntype}:
        del nodes[other]["label"]
    return replace(graph, name=name.replace(" ", "-"), node_data=nodes, edge_data=edge_data)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(name: str) -> list[str]:
    (model, *args), columns = CASES[name]
    return ["--model", model, *args, "--edge-features", *columns]


def options_of(name: str) -> ModelOptions:
    (model, *words), columns = CASES[name]
    args = dict(word.split("=") for word in words[1::2])
    return ModelOptions(
        model, args={k: int(v) for k, v in args.items()}, edge_features=tuple(columns)
    )


def held(**columns: dict[Any, Tensor]) -> HeteroData:
    data = HeteroData()
    for name, by_kind in columns.items():
        for kind, rows in by_kind.items():
            data[kind][name] = rows
    return data


def called_alone(name: str, model: nn.Module) -> Tensor:
    """The model on the whole graph, in its own library's words."""
    graph = graph_of(name)
    kind = "item" if "shop" in name else "_N"
    if "shop" in name:
        x = {t: columns["feat"] for t, columns in graph.node_data.items()}
        weights = {e: columns["weight"] for e, columns in graph.edge_data.items()}
        if name in ("shop", "shop of blocks"):
            return model(to_dgl(graph), x, weights)
        index = {e: torch.stack(ends) for e, ends in graph.edges.items()}
        if name == "shop whole":
            return model(held(x=x, edge_index=index, edge_weight=weights))
        return model(x, index, weights)
    edges, x = graph.edge_data[ETYPE_HOMO], graph.node_data[kind]["feat"]
    index = torch.stack(graph.edges[ETYPE_HOMO])
    if name == "whole":
        batch = torch.zeros(len(x), dtype=torch.int64)
        return model(
            Data(x=x, edge_index=index, batch=batch, edge_attr=edges["feat"], w=edges["price"])
        )
    if name in ("weights", "other name"):
        return model(to_dgl(graph), x, edges["weight" if name == "weights" else "price"])
    if name == "read":
        return model(to_dgl(graph), x)
    if name in ("in order", "said"):
        return model(x, index, edges["feat"], edges["price" if name == "in order" else "weight"])
    named = {"edge_weight": edges["weight"]} if name == "gcn" else {"edge_attr": edges["feat"]}
    return model(x, index, **named)


def alone(name: str, start: dict[str, Tensor], epochs: int) -> tuple[list[float], Tensor]:
    """Losses and final logits of a plain loop."""
    graph = graph_of(name)
    nodes = graph.node_data["item" if "shop" in name else "_N"]
    widths = {t: columns["feat"].shape[1] for t, columns in graph.node_data.items()}
    model = build_model(
        options_of(name), widths if "shop" in name else widths["_N"], int(nodes["label"].max()) + 1
    )
    model._forward_hooks.clear()  # which looks for a sharded graph
    model.load_state_dict(start)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    rows = nodes["train_mask"].bool()
    for _ in range(epochs):
        loss = F.cross_entropy(called_alone(name, model)[rows], nodes["label"][rows].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, called_alone(name, model.eval()).detach()


def trained(path: str, size: int, *words: str) -> list[Any]:
    args = read_words(["train", path, *words])

    def rank(group: Any) -> Any:
        trainer = make_trainer(args, group, CPU)
        start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        return start, [record["loss"] for record in trainer.fit()]

    return run_threads(size, rank, timeout=60)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_predictions_of_one_process(name: str, partitioned: Cutter, place: Path) -> None:
    path = partitioned(graph_of(name), 3, "random")
    words = [*words_of(name), *LOOP, "--checkpoint", "run"]
    ranks = trained(path, 3, *words)
    want, logits = alone(name, ranks[0][0], 3)
    assert all(losses == pytest.approx(want, rel=2e-5) for _, losses in ranks)
    on_threads(3, "evaluate", path, "--checkpoint", "run", "--out", "out", "--gather", "--logits")
    with np.load(place / "out" / "predictions.npz") as found:
        torch.testing.assert_close(torch.from_numpy(found["logits"]), logits, rtol=1e-4, atol=1e-4)


SAMPLED = {
    "weights": "-1,-1", "read": "-1", "said": "-1,-1", "shop whole": "-1", "shop of pyg": "-1",
    "shop of blocks": "-1",
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_batches_have_the_columns(name: str, partitioned: Cutter) -> None:
    """A step on all in-edges is one on the whole graph, which the second epoch takes."""
    path = partitioned(graph_of(name), 2, "random")
    sampled = ["--sampled", "--sampled-epochs", "1", f"--fanouts={SAMPLED[name]}"]
    ranks = trained(path, 2, *words_of(name), *sampled, "--batch-size", "99", *LOOP)
    want, _ = alone(name, ranks[0][0], 3)
    assert ranks[0][1] == pytest.approx(want, rel=2e-4)


def test_a_run_goes_on_with_its_columns(partitioned: Cutter) -> None:
    path, words = partitioned(graph_of("weights"), 2, "random"), words_of("weights")
    begun = trained(path, 2, *words, "--no-progress", "--epochs", "2", "--checkpoint", "run")
    want, _ = alone("weights", begun[0][0], 3)

    def resumed(group: Any, args: Any) -> list[float]:
        trainer = make_trainer(args, group, CPU)
        trainer.resume()
        return [record["loss"] for record in trainer.fit()]

    more = [*LOOP, "--checkpoint", "run", "--resume"]
    losses = run_threads(2, resumed, read_words(["train", path, *words, *more]))
    assert losses[0] == losses[1] == pytest.approx(want, rel=2e-5)
    other = ["--model", "mine.py:Weighted", "--edge-features", "price"]
    with pytest.raises(ValueError, match="edge_features"):
        run_threads(2, resumed, read_words(["train", path, *other, *more]))


@pytest.mark.parametrize("name", ["weights", "read", "in order"])
def test_the_plan_knows_the_columns(name: str) -> None:
    columns = {
        "weight": {"shape": [], "dtype": "float32"}, "price": {"shape": [], "dtype": "float32"},
        "feat": {"shape": [3], "dtype": "float32"},
    }  # fmt: skip
    costs = probe_bytes(Work(options_of(name), 6, 4, columns=columns), 1, nodes=512)
    assert costs.pulled_bytes and costs.node_bytes > 4 * (6 + 4)


WRONG = [
    (["mine.py:Weighted", "wieght"], "expected a column of the edges: .*did you mean 'weight'?"),
    (["mine.py:Reads", "prise"], "'prise'.*did you mean 'price'?"),
    (["mine.py:Weighted", "edge_wieght=weight"], "expected one of .*did you mean edge_weight?"),
    (["mine.py:Weighted", "weight", "feat"], "got feat for the parameters none of forward"),
    (["mine.py:Gated", "price"], "got price for the parameters attr, strength.*attr=price"),
    (["mine.py:Gated", "attr=feat", "attr=price"], "two columns for attr: feat and price"),
    ([*PYG_GCN[:1], "price"], "for the parameters edge_weight, edge_attr.*edge_weight=price"),
    (["mine.py:Weighted", "a b"], "expected names of columns of edges, or PARAMETER=NAME"),
    (["sage", "weight"], "--edge-features: got one, which is for a model of your own, not sage"),
    (["mine.py:Weighted", "weight", "--call", "graph,x"], "--edge-features: got some and --call"),
    (["mine.py:Weighted", "buys/weight"], "got 'buys/weight', expected a column of the edges"),
]


@pytest.mark.parametrize(("words", "told"), WRONG, ids=lambda given: " ".join(given)[:40])
def test_told_before_a_rank_starts(
    words: list[str], told: str, partitioned: Cutter, capsys: pytest.CaptureFixture
) -> None:
    path = partitioned(graph_of("weights"), 2, "random")
    args = PYG_GCN[1:] if "GCN" in words[0] else []
    command = ["train", path, "--model", words[0], *args, "--edge-features", *words[1:]]
    assert main(command) in (1, 2)
    assert re.search(told, " ".join(capsys.readouterr().err.split()))


@pytest.mark.filterwarnings("error:untyped_storage on an edge tensor")
@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_what_computes_layers_is_shown_where_they_compute_again(
    name: str, partitioned: Cutter, capsys: pytest.CaptureFixture
) -> None:
    path = partitioned(graph_of(name), 2, "random")
    on_threads(2, "train", path, *words_of(name), *LOOP, "--activations", "recompute", "--explain")
    assert "edge program" in capsys.readouterr().out


def test_a_plan_tells_them_too(partitioned: Cutter, capsys: pytest.CaptureFixture) -> None:
    path = partitioned(graph_of("weights"), 2, "random")
    assert main(["plan", path, "--model", "mine.py:Weighted", "--edge-features", "wieght"]) == 2
    assert "did you mean 'weight'" in capsys.readouterr().err


def test_several_relations_want_a_parameter_by_relation(
    partitioned: Cutter, capsys: pytest.CaptureFixture
) -> None:
    path = partitioned(graph_of("shop"), 2, "random")
    assert main(["train", path, "--model", "mine.py:OneWeight", "--edge-features", "weight"]) == 2
    assert "expected weight_dict" in capsys.readouterr().err


class Keyword(nn.Module):
    def forward(self, graph: Any, x: Tensor, *, edge_weight: Tensor) -> Any: ...


class Whole(nn.Module):
    def forward(self, data: Any, scale: float = 1.0) -> Any: ...


class Between(nn.Module):
    def forward(self, edge_attr: Tensor, x: Tensor, edge_index: Tensor) -> Any: ...


def test_how_columns_are_given() -> None:
    assert str(read_call(Whole, edge_features=["feat", "w=x"])) == "(data, edge_attr=feat, w=x)"
    assert read_call(Whole).takes_data and read_call(Keyword, "data").takes_data
    with pytest.raises(ValueError, match="front_end: got 'dgl', which has no data"):
        read_call(Whole, front_end="dgl")
    assert str(read_call(Keyword)) == "(graph, x, edge_weight=edge_weight)"
    assert str(read_call(Keyword, edge_features=["weight"])) == "(graph, x, edge_weight=weight)"
    call = read_call(Between, edge_features=["price"])
    assert str(call) == "(edge_attr=price, x=x, edge_index=edge_index)"
    assert call.front_end == "pyg" and call.columns == ["price"]
