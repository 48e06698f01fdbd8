"""The command line with models of PyG: the losses of one process, on every way that runs go."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from foreign_files import write_pyg
from harness import run_threads
from harness.commands import on_threads, trainer_of
from harness.graphs import ETYPE_HOMO, GraphArrays, bibliography, hetero, mixed
from harness.parts import Cutter, node_parts
from torch import Tensor

from sar.__main__ import main
from sar.errors import NotSupportedError
from sar.models import build_model
from sar.plan.probe import Work, probe_bytes
from sar.run_options import ModelOptions

PYG = "torch_geometric.nn:"
SMALL = {"hidden_channels": 8, "num_layers": 2}
LOOP = ["--no-progress", "--epochs"]


def graph() -> GraphArrays:
    """The mixed graph, whose edges have features, too."""
    rng = torch.Generator().manual_seed(4)
    columns = dict(mixed().edge_data[ETYPE_HOMO])
    columns["feat"] = torch.rand(len(columns["type"]), 3, generator=rng)
    nodes = dict(mixed().node_data["_N"])
    nodes["test_mask"] = ~nodes["train_mask"].bool()
    nodes["val_mask"] = nodes["test_mask"]
    return replace(mixed(), name="own", edge_data={ETYPE_HOMO: columns}, node_data={"_N": nodes})


def words_of(model: str, args: dict[str, Any], *more: str) -> list[str]:
    """Of a model of PyG, or of a file."""
    named = model if ":" in model else f"{PYG}{model}"
    pairs = [word for pair in args.items() for word in ("--model-args", "=".join(map(str, pair)))]
    return ["--model", named, *pairs, *more]


# By name: the model, its arguments, --call, and what of the edges a plain loop hands over, by name.
CASES: dict[str, tuple[str, dict[str, Any], str | None, dict[str, str]]] = {
    "GAT": ("GAT", SMALL | {"heads": 2, "v2": True}, None, {}),
    "SAGE": ("GraphSAGE", SMALL | {"jk": "cat", "norm": "layer"}, None, {}),
    "weights": ("GCN", SMALL, "x,edge_index,edge_weight=edge_weight", {"edge_weight": "weight"}),
    "features": (
        "GAT", SMALL | {"edge_dim": 3}, "x,edge_index,edge_attr=edge_attr", {"edge_attr": "feat"},
    ),
    "types": (
        "RGCNConv", {"num_relations": 3}, "x,edge_index,edge_type=type", {"edge_type": "type"},
    ),
}  # fmt: skip
RANKS = [("GAT", 1), ("GAT", 3), ("SAGE", 2), ("weights", 2), ("features", 3), ("types", 2)]


def trained(path: str, size: int, *words: str) -> list[Any]:
    """What each rank's trainer started from, and its losses."""

    def rank(group: Any) -> Any:
        trainer = trainer_of(group, path, *words)
        start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        return start, [record["loss"] for record in trainer.fit()]

    return run_threads(size, rank, timeout=60)


def plain_losses(name: str, start: dict[str, Tensor], epochs: int) -> list[float]:
    """As a script of PyG's computes them on the whole graph."""
    whole, (kind, args, _, columns) = graph(), CASES[name]
    model = build_model(ModelOptions(f"{PYG}{kind}", args=args), 6, 4)
    model.load_state_dict(start)
    nodes, edges = whole.node_data["_N"], torch.stack(whole.edges[ETYPE_HOMO])
    given = {word: whole.edge_data[ETYPE_HOMO][column] for word, column in columns.items()}
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    rows = nodes["train_mask"].bool()
    for _ in range(epochs):
        out = model(nodes["feat"], edges, **given)
        loss = F.cross_entropy(out[rows], nodes["label"][rows].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("name", "size"), RANKS)
def test_losses_of_one_process(name: str, size: int, partitioned: Cutter) -> None:
    kind, args, call, _ = CASES[name]
    more = [] if call is None else ["--call", call]
    words = words_of(kind, args, *more, *LOOP, "4")
    ranks = trained(partitioned(graph(), size), size, *words)
    want = plain_losses(name, ranks[0][0], 4)
    assert all(losses == pytest.approx(want, rel=2e-5) for _, losses in ranks)
    assert want[-1] < want[0]


@pytest.mark.parametrize("name", ["GAT", "weights", "features"])
def test_sampled_batches_of_all_neighbors(name: str, partitioned: Cutter) -> None:
    """One step on all in-edges is a step on the whole graph, which the second epoch takes."""
    kind, args, call, _ = CASES[name]
    more = [] if call is None else ["--call", call]
    sampled = ["--sampled", "--sampled-epochs", "1", "--fanouts=-1,-1", "--batch-size", "99"]
    words = words_of(kind, args, *more, *sampled, *LOOP, "3")
    ranks = trained(partitioned(graph(), 2), 2, *words)
    want = plain_losses(name, ranks[0][0], 3)
    if name == "weights":  # GCN's degrees are those of the drawn edges until the last hop
        want[0] = ranks[0][1][0]
    assert ranks[0][1] == pytest.approx(want, rel=2e-4 if name != "weights" else 0.2)


def test_a_resumed_run_goes_on_bit_for_bit(
    tmp_path: Path, partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout of rows and of attention, on two ranks."""
    monkeypatch.chdir(tmp_path)
    words = [partitioned(graph(), 2), *words_of("GAT", SMALL | {"heads": 2, "dropout": 0.5})]
    shown = []
    for epochs, *kept in (["4"], ["2", "--checkpoint", "kept"], ["4", "--resume"]):
        kept = ["--checkpoint", "kept", *kept] if "--resume" in kept else kept
        on_threads(2, "train", *words, *LOOP, epochs, *kept, "--json", "told.json")
        told = json.loads(Path("told.json").read_text())["epochs"]
        shown.append([(e["epoch"], e["loss"], e["test_acc"]) for e in told])
    assert shown[0] == shown[2] and len(shown[0]) == 4 and shown[1] == shown[0][:2]


# ---------------------------------------------------------------- the other commands


def test_evaluated_as_trained(
    tmp_path: Path, partitioned: Cutter, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also what is explained on the way; columns of edges are found again."""
    kind, args, call, _ = CASES["features"]
    path, run = partitioned(graph(), 2), str(tmp_path / "run")
    args, call = args | {"norm": "graph_norm"}, f"{call},batch=batch"
    words = words_of(kind, args, "--call", call, *LOOP, "3", "--checkpoint", run, "--explain")
    on_threads(2, "train", path, *words)
    shown = capfd.readouterr().out
    assert "called   (x, edge_index, edge_attr=edge_attr, batch=batch), front end pyg" in shown
    assert "convs.0  GATConv" in shown and "convs.1  GATConv" in shown
    last = shown.partition("epoch 3: ")[2].split("test ")[1].split()[0]
    on_threads(2, "evaluate", path, "--checkpoint", run, "--out", str(tmp_path), "--gather")
    assert f"test {last}" in capfd.readouterr().out
    with np.load(tmp_path / "predictions.npz") as found:
        assert sorted(found["node_id"]) == list(range(57))


def test_planned() -> None:
    """The probe's graph has the columns that the model is called with; bytes are of this model."""
    kind, args, call, columns = CASES["features"]
    own = graph().edge_data[ETYPE_HOMO]
    about = {
        c: {"dtype": str(own[c].dtype).removeprefix("torch."), "shape": list(own[c].shape[1:])}
        for c in columns.values()
    }
    model = ModelOptions(f"{PYG}{kind}", args=args, call=call)
    costs = probe_bytes(Work(model, 6, 4, columns=about), 1, nodes=128)
    built = build_model(model, 6, 4)
    assert costs.parameters == sum(p.numel() for p in built.parameters())
    assert costs.node_bytes > 0 and costs.pulled_bytes
    with pytest.raises(KeyError, match="no column of edges 'edge_attr'"):
        probe_bytes(Work(model, 6, 4), 1, nodes=64)


def test_a_folder_of_pygs_own_partitioner(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The losses of the original graph, on four ranks; resumed, and evaluated by original id."""
    whole = graph()
    folder = write_pyg(whole, node_parts(whole, 4, "random"), 4, tmp_path / "parts")
    names = ("label", "train_mask", "val_mask", "test_mask")
    np.savez(folder / "node_data.npz", **{n: whole.node_data["_N"][n].numpy() for n in names})
    kind, args, call, _ = CASES["GAT"]
    run, words = str(tmp_path / "run"), [str(folder), *words_of(kind, args, *LOOP)]
    ranks = trained(words[0], 4, *words[1:], "3", "--checkpoint", run)
    assert ranks[0][1] == pytest.approx(plain_losses("GAT", ranks[0][0], 3), rel=2e-5)
    on_threads(4, "train", *words, "4", "--checkpoint", run, "--resume")
    last = capfd.readouterr().out.partition("epoch 4: ")[2].split("test ")[1].split()[0]
    on_threads(4, "evaluate", words[0], "--checkpoint", run, "--out", str(tmp_path), "--gather")
    assert f"test {last}" in capfd.readouterr().out
    with np.load(tmp_path / "predictions.npz") as found:
        assert sorted(found["node_id"]) == list(range(57))


OWN = """
import torch
from torch_geometric.nn import GCNConv, HeteroConv, SAGEConv, to_hetero
from torch_geometric.nn import GraphSAGE
from torch_geometric.utils import to_torch_csr_tensor

class Types(torch.nn.Module):
    def __init__(self, in_channels, out_channels, metadata):
        super().__init__()
        self.conv = HeteroConv({
            e: SAGEConv((in_channels[e[0]], in_channels[e[2]]), out_channels) for e in metadata[1]
        })

    def forward(self, x_dict, edge_index_dict):
        return self.conv(x_dict, edge_index_dict)

def made(in_channels, out_channels, metadata):
    known = [etype for etype in metadata[1] if "tag" not in etype]  # no edge ends in tags
    return to_hetero(GraphSAGE(6, 8, 2, out_channels), (["item", "user"], known))

class Sparse(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = GCNConv(in_channels, out_channels)

    def forward(self, x, edge_index):
        return self.conv(x, to_torch_csr_tensor(edge_index))

class Weighted(Sparse):
    def forward(self, x, edge_index, edge_weights):
        return self.conv(x, edge_index, edge_weights)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A file with models of one's own."""
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


@pytest.mark.parametrize(("name", "size"), [("Types", 2), ("made", 1)])
def test_several_types(name: str, size: int, own: str, partitioned: Cutter) -> None:
    """One rank for what ``to_hetero`` makes, as it replaces torch's functions in all threads."""
    words = ["--model", f"{own}:{name}", "--target-type", "item", *LOOP, "3"]
    losses = trained(partitioned(hetero(), size), size, *words)[0][1]
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------- what is wrong is told


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([f"{PYG}GATT"], "torch_geometric.nn has no 'GATT'; did you mean GAT?"),
        ([f"{PYG}GAT", "--model-args", "hidden_chanels=8", "--model-args", "num_layers=2"],
         "missing a required argument: 'hidden_channels'; .* did you mean hidden_channels?"),
        ([f"{PYG}GAT", "--model-args", "hidden_channels=8", "--model-args", "num_layers=2",
          "--model-args", "headz=2"], "unexpected keyword argument 'headz'; give its arguments"),
        (["OWN:Weighted"], "got 'edge_weights', expected a column of the edges: weight, type"),
        ([f"{PYG}GCNConv", "--call", "x,edge_index,edge_weight=no"], "got 'no', expected a column"),
    ],
)  # fmt: skip
def test_told_before_ranks_start(
    words: list[str], text: str, own: str, partitioned: Cutter, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("OWN", own) for word in words]
    assert main(["train", partitioned(graph(), 2), "--model", *words]) == 2
    assert re.search(text, capsys.readouterr().err)


def test_told_by_all_ranks(own: str, partitioned: Cutter) -> None:
    """A sparse matrix of edges has the numbers of all nodes, which no rank knows."""

    def rank(group: Any) -> None:
        with pytest.raises(NotSupportedError, match="no ids of the whole graph's nodes"):
            trainer_of(group, path, "--model", f"{own}:Sparse", *LOOP, "1").fit()

    path = partitioned(graph(), 2)
    run_threads(2, rank, timeout=60)


def test_a_type_without_features(partitioned: Cutter) -> None:
    """Told by all ranks where a model asks for its rows."""

    def rank(group: Any) -> None:
        with pytest.raises(ValueError, match="rows of node type 'author', which has no features"):
            trainer_of(group, path, *words_of("HGTConv", {}, *LOOP, "1")).fit()

    path = partitioned(bibliography(40), 2)
    run_threads(2, rank, timeout=60)


def test_layers_for_one_type_on_a_graph_of_several(
    partitioned: Cutter, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of("GAT", SMALL, "--target-type", "item")
    assert main(["train", partitioned(hetero(), 2), *words]) == 2
    assert "takes one width of features, and the graph has several" in capsys.readouterr().err
