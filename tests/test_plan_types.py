"""The planner on graphs of several types: its bytes are those of runs, its memory close to it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_threads
from harness.graphs import GraphArrays, bibliography, mixed, shop
from harness.parts import Cutter
from torch import nn

import sar
from sar.__main__ import main
from sar.models import ModelOptions, build_model, call_of
from sar.plan import Hardware, Setting, Work, from_parts, measure_costs, other_number, predict
from sar.plan.probe import probe_bytes

pytest.importorskip("dgl.nn")
pytest.importorskip("torch_geometric")
WIDTHS, CLASSES = {"item": 12, "tag": 7, "user": 5}, 4
SOURCE = """
import dgl.nn
import torch
import torch_geometric.nn as pyg
from torch import nn

ENDS = [("item", "bought_by", "user"), ("item", "carries", "tag"), ("tag", "marks", "item"),
        ("user", "buys", "item"), ("user", "follows", "user")]

class Hetero(nn.Module):
    def __init__(self, in_feats, out_feats, kind="sage"):
        super().__init__()
        make = {
            "sage": lambda s, d, o: dgl.nn.SAGEConv((s, d), o, "mean"),
            "sum": lambda s, d, o: dgl.nn.GraphConv(s, o, norm="right"),
            "gat": lambda s, d, o: dgl.nn.GATConv((s, d), o, 1),
        }[kind]
        self.kind, wide = kind, dict.fromkeys(in_feats, 9)
        self.a, self.b = (
            dgl.nn.HeteroGraphConv({e: make(w[s], w[d], o) for s, e, d in ENDS})
            for w, o in ((in_feats, 9), (wide, out_feats)))

    def forward(self, graph, x):
        h = {t: rows.flatten(1).relu() for t, rows in self.a(graph, x).items()}
        return self.b(graph, h)["item"].flatten(1)

class Weighted(Hetero):
    def forward(self, graph, x, edge_weight_dict):
        more = {e[1]: {"edge_weight": w} for e, w in edge_weight_dict.items()}
        h = {t: rows.relu() for t, rows in self.a(graph, x, mod_kwargs=more).items()}
        return self.b(graph, h, mod_kwargs=more)["item"]

class Pyg(nn.Module):
    def __init__(self, in_channels, out_channels, kind="sage"):
        super().__init__()
        make = {"sage": pyg.SAGEConv, "gat": lambda i, o: pyg.GATConv(i, o, add_self_loops=False)}
        wide = dict.fromkeys(in_channels, 9)
        self.a, self.b = (
            pyg.HeteroConv({(s, e, d): make[kind]((w[s], w[d]), o) for s, e, d in ENDS})
            for w, o in ((in_channels, 9), (wide, out_channels)))

    def forward(self, x_dict, edge_index_dict):
        h = {t: rows.relu() for t, rows in self.a(x_dict, edge_index_dict).items()}
        return self.b(h, edge_index_dict)["item"]

class Hgt(nn.Module):
    def __init__(self, in_channels, out_channels, metadata):
        super().__init__()
        self.conv = pyg.HGTConv(in_channels, out_channels, metadata)

    def forward(self, x_dict, edge_index_dict):
        return self.conv(x_dict, edge_index_dict)["item"]
"""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "rgcn": ("rgcn", {"layers": 2, "hidden": 10}),
    "dgl sage": ("mine.py:Hetero", {}),
    "dgl sums": ("mine.py:Hetero", {"args": {"kind": "sum"}}),
    "dgl gat": ("mine.py:Hetero", {"args": {"kind": "gat"}}),
    "weights": ("mine.py:Weighted", {"edge_features": ("weight",)}),
    "pyg sage": ("mine.py:Pyg", {}),
    "pyg gat": ("mine.py:Pyg", {"args": {"kind": "gat"}}),
    "pyg hgt": ("mine.py:Hgt", {}),
}


@cache
def graph(learned: bool = False) -> GraphArrays:
    """The shop, whose items alone have labels; users have no features if ``learned``."""
    rng, nodes = torch.Generator().manual_seed(0), dict[str, dict]()
    for ntype, count in shop().num_nodes.items():
        nodes[ntype] = {"feat": torch.rand(count, WIDTHS[ntype], generator=rng)}
    if learned:
        del nodes["user"]["feat"]
    nodes["item"]["label"] = torch.arange(shop().num_nodes["item"]) % CLASSES
    name = "learned" if learned else "shop"
    return replace(shop(), name=name, node_data=nodes).with_orig_ids()


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)


def trained_bytes(group: Any, path: str, options: ModelOptions) -> int:
    """Bytes that a rank sends in the third epoch, when what is constant is kept."""
    data = sar.load_partition_data(path)
    view = sar.construct_full_graph(data, sar.Policy())
    x = {t: data.node_features[f"{t}/feat"] for t in WIDTHS if f"{t}/feat" in data.node_features}
    widths = {ntype: rows.shape[1] for ntype, rows in x.items()}
    model: nn.Module = build_model(options, widths, CLASSES, graph=view, target_type="item")
    call = call_of(options, model)
    before = 0
    for _ in range(3):
        before = group.counters.sent_bytes
        call(model, view, x).sum().backward()
    return group.counters.sent_bytes - before


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_a_model(partitioned: Cutter, name: str) -> None:
    model, more = MODELS[name]
    options = ModelOptions(model, **more)
    path = partitioned(graph(learned="rgcn" in name), 3, "random")
    found = from_parts(path)
    assert found.types is not None and found.types.target == "item"
    work = Work(options, 0, CLASSES, columns=found.columns, types=found.types)
    costs = probe_bytes(work, 1, nodes=512)
    predicted = predict(found, costs, Setting("", 2), Hardware())
    assert predicted.sent_bytes == sum(run_threads(3, trained_bytes, path, options))
    scaled = predict(other_number(found, 6), costs, Setting("", 5), Hardware())
    assert scaled.sent_bytes > predicted.sent_bytes and scaled.memory_bytes < predicted.memory_bytes


def test_commands_plan_graphs_of_several_types(
    partitioned: Cutter, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, costs = partitioned(bibliography(300), 2, "random"), list[Any]()

    def measured_once(*work: Any, **how: Any) -> Any:
        costs.append(costs[0] if costs else measure_costs(*work, **how))
        return costs[0]

    monkeypatch.setattr(import_module("sar.plan.predict"), "measure_costs", measured_once)
    words = ["inspect", path, "--hidden", "16", "--layers", "2"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["predicted"]
    assert told["model"]["model"] == "rgcn" and min(told["memory_bytes"]) > 50e6
    assert main(words) == 0
    assert "2-layer rgcn, hidden 16" in capsys.readouterr().out
    one = partitioned(mixed(), 2, "random")
    for words, text in (
        ([path, "--model", "sage"], "got 'sage' and a graph of several node or edge types"),
        ([path, "--model", "rgcn", "--target-type", "papr"], "did you mean 'paper'"),
        ([one, "--model", "rgcn"], "rgcn, which is for several node types"),
    ):
        assert main(["plan", *words]) == 2
        assert text in capsys.readouterr().err
    assert main(["inspect", path, "--model", "gcn"]) == 2
