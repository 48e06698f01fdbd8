"""`sar validate`, and what the page about it shows."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from test_docs import blocks
from test_tutorials import assert_same_text

import sar
from sar.__main__ import main
from sar.partition.sources.generate import bibliography_graph, community_graph

pytest.importorskip("dgl")
pytest.importorskip("torch_geometric")

from torch_geometric.data import Data  # noqa: E402
from torch_geometric.nn import SAGEConv  # noqa: E402

MODELS = """
import dgl.nn
import torch
from torch_geometric.nn import HeteroConv, SAGEConv


class Right(torch.nn.Module):
    def __init__(self, in_feats, out_feats, width=8):
        super().__init__()
        self.first = dgl.nn.SAGEConv(in_feats, width, "mean", activation=torch.relu)
        self.norm = torch.nn.BatchNorm1d(width)
        self.second = dgl.nn.SAGEConv(width, out_feats, "mean")

    def forward(self, graph, x):
        return self.second(graph, self.norm(self.first(graph, x)))


class Wrong(Right):
    def forward(self, graph, x):
        h = self.first(graph, x)
        return self.second(graph, h / len(h))


class Weighted(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = SAGEConv(in_channels, out_channels)
        self.scale = torch.nn.Linear(1, 1)

    def forward(self, x, edge_index, weight):
        row, col = edge_index
        sums = x.new_zeros(x.shape).index_add(0, col, x[row] * self.scale(weight.unsqueeze(1)))
        return self.conv(sums, edge_index)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, and partitions of one type and of several."""
    folder = tmp_path_factory.mktemp("validate")
    (folder / "checked_net.py").write_text(MODELS)
    graph = community_graph(120, 700, features=6)
    (ends,) = graph.edges.values()
    graph.edge_data[("_N", "_E", "_N")] = {"weight": torch.rand(len(ends[0]))}
    sar.partition_graph(graph, folder / "parts", 3, method="random", name="small")
    sar.partition_graph(bibliography_graph(60), folder / "types", 2, method="random", name="types")
    return folder


@pytest.mark.parametrize(
    "words, status, text",
    [
        ("small --model sage --layers 2 --hidden 8 --batch-norm", 0, "same on ranks"),
        ("small --model gat --layers 2 --hidden 8 --heads 2 --parts 3", 0, "3 ranks against"),
        ("small --model checked_net.py:Right --model-args width=5", 0, "against dgl"),
        ("small --model checked_net.py:Wrong", 1, "Wrong (Wrong), between first and second"),
        ("small --model checked_net.py:Weighted", 0, "against pyg"),
        ("types --model rgcn --layers 2 --hidden 8", 0, "RelationalStack"),
        ("small --model torch_geometric.nn:GCN --model-args hidden_channels=8 "
         "--model-args num_layers=2 --call x,edge_index,edge_weight=weight", 0, "GCNConv"),
    ],
)  # fmt: skip
def test_models_of_partitions(
    words: str, status: int, text: str, place: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(place)
    name, *rest = words.split()
    folder = {"small": "parts", "types": "types"}[name]
    assert main(["validate", f"{folder}/{name}.json", *rest]) == status
    assert text in capsys.readouterr().out


def test_json(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(place)
    words = ["validate", "parts/small.json", "--model", "checked_net.py:Wrong", "--json"]
    assert main(words) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and found["first"]["class_name"] == "Wrong"
    assert [row["name"] for row in found["rows"]] == ["first", "second", "Wrong", "(call)"]


@pytest.mark.parametrize(
    "words, text",
    [
        ("--model checked_net.py:Rigth", "did you mean Right?"),
        ("--parts 1", "--parts: got '1'"),
        ("--labels lable", "labels: got 'lable'"),
        ("--features fate", "features: got 'fate'"),
        ("--model checked_net.py:Right --front-end dlg", "did you mean 'dgl'"),
    ],
)
def test_mistakes(
    words: str, text: str, place: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(place)
    try:
        status = main(["validate", "parts/small.json", *words.split()])
    except SystemExit as ended:
        status = ended.code  # type: ignore[assignment]
    assert status == 2 and text in capsys.readouterr().err


def test_the_page_shows_what_is_printed() -> None:
    code, shown = (block.text for block in list(blocks("docs/validate.md"))[:2])
    with redirect_stdout(io.StringIO()) as printed:
        exec(code, {"__name__": "page"})
    assert_same_text(printed.getvalue(), shown)


def test_large_partitions_are_read_in_part(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sar.models.validation.source._MOST_READ", 100)
    monkeypatch.chdir(place)
    assert main(["validate", "types/types.json", "--model", "rgcn", "--hidden", "8"]) == 0
    assert "a piece of part 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"model": 3}, TypeError, "model: got int"),
        ({"graph": 3}, TypeError, "source is int"),
        ({"call": "x"}, TypeError, "call: got str"),
        ({"parts": 1}, ValueError, "parts: got 1"),
        ({"parts": 1000}, ValueError, "parts: got 1000"),
        ({"front_end": "pgy"}, ValueError, "did you mean 'pyg'"),
        ({"features": "fate"}, ValueError, "fate"),
        ({"call": lambda model, data: model(data.y)}, ValueError, "on the whole graph, too"),
    ],
)
def test_wrong_arguments(change: dict, error: type, text: str) -> None:
    data = Data(torch.randn(50, 3), torch.randint(50, (2, 200)), y=torch.zeros(50))
    given = {"model": SAGEConv(3, 2), "graph": data} | change
    with pytest.raises(error, match=text):
        sar.validate(**given)
