"""`sar train` on graphs of several types, against DGL on the whole graph in one process."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness.commands import on_threads, trainer_of
from harness.graphs import GraphArrays, bibliography, to_dgl
from harness.parts import Cutter
from torch import Tensor, nn

from sar.__main__ import main
from sar.comm import Group, ThreadGroup
from sar.nn.embedding import initial_rows
from sar.train.embedding import shared_state, with_own_rows

PAPERS, EPOCHS = 120, 4


def library(all_features: bool = False) -> GraphArrays:
    arrays = bibliography(PAPERS, 3, features=5)
    if all_features:
        draw = torch.Generator().manual_seed(0)
        for width, ntype in enumerate(("author", "term"), 3):
            rows = torch.randn(arrays.num_nodes[ntype], width, generator=draw)
            arrays.node_data.setdefault(ntype, {})["feat"] = rows
    return arrays


def cut(arrays: GraphArrays, size: int, folder: Path) -> str:
    home = np.random.default_rng(1).integers(0, size, arrays.total_nodes)
    return Cutter(folder)(arrays, size, home)


def trained(
    path: str, size: int, *words: str, begin: dict | None = None, resume: bool = False
) -> tuple[dict, list[float], list[dict]]:
    """What rank 0 started from (``begin``, where given), the losses, and its history.

    Parameters come of a generator of their own: threads share torch's.
    """

    def rank(group: Group) -> Any:
        trainer = trainer_of(group, path, "--no-progress", *words)
        first = begin or drawn(shared_state(trainer.model))
        trainer.model.load_state_dict(with_own_rows(trainer.model, first))
        if resume:
            trainer.resume()
        start = {name: value.clone() for name, value in shared_state(trainer.model).items()}
        return start, trainer.fit()

    found = ThreadGroup.run(size, rank, timeout=60)
    histories = [[record["loss"] for record in history] for _, history in found]
    assert all(one == histories[0] for one in histories)
    return found[0][0], histories[0], found[0][1]


def drawn(state: dict[str, Tensor]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {n: (torch.rand(p.shape, generator=draw) - 0.5) * p.dim() / 2 for n, p in state.items()}


class Reference(nn.Module):
    """R-GCN in plain DGL."""

    def __init__(self, arrays: GraphArrays, hidden: int, classes: int) -> None:
        super().__init__()
        import dgl.nn

        ntypes, relations = sorted(arrays.num_nodes), sorted(arrays.edges)
        self.inputs = nn.ModuleDict({"paper": nn.Linear(5, hidden)})
        self.tables = nn.ParameterDict(
            {t: initial_rows(torch.arange(arrays.num_nodes[t]), t, hidden).float()
             for t in ntypes if t != "paper"}
        )  # fmt: skip
        self.layers = nn.ModuleList()
        for out in (hidden, classes):
            convs = {r: dgl.nn.GraphConv(hidden, out, "right", bias=False) for r in relations}
            own = nn.ModuleDict({t: nn.Linear(hidden, out) for t in ntypes})
            convs = dgl.nn.HeteroGraphConv(convs, aggregate="sum")
            self.layers.append(nn.ModuleDict({"convs": convs, "own": own}))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        h = dict(self.tables.items()) | {"paper": self.inputs["paper"](x)}
        for number, layer in enumerate(self.layers):
            sums = layer["convs"](graph, h)
            h = {t: layer["own"][t](rows) + sums[t] for t, rows in h.items()}
            h = {t: rows.relu() for t, rows in h.items()} if number == 0 else h
        return h["paper"]


@pytest.mark.parametrize("size", [1, 3])
def test_learns_as_dgl_does(size: int, tmp_path: Path) -> None:
    """Rows of authors and terms, which have no features, are learned with the rest."""
    arrays = library()
    words = ["--model", "rgcn", "--layers", "2", "--hidden", "8", "--epochs", str(EPOCHS)]
    start, losses, _ = trained(cut(arrays, size, tmp_path), size, *words)
    model, whole = Reference(arrays, 8, 4), to_dgl(arrays)
    names = [name for name in model.state_dict() if not name.startswith("tables")]
    model.load_state_dict(dict(zip(names, start.values(), strict=True)), strict=False)
    papers = arrays.node_data["paper"]
    optimizer, want = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(EPOCHS):
        logits, mask = model(whole, papers["feat"]), papers["train_mask"].bool()
        loss = F.cross_entropy(logits[mask], papers["label"][mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        want.append(loss.item())
    assert losses == pytest.approx(want, abs=1e-5) and losses[-1] < losses[0]


def test_mini_batches_of_all_neighbors_give_the_full_batch_step(tmp_path: Path) -> None:
    path = cut(library(all_features=True), 2, tmp_path)
    words = ["--model", "rgcn", "--layers", "2", "--hidden", "8", "--epochs", "1"]
    start, losses, _ = trained(path, 2, *words)
    sampled = ["--sampled", "--fanouts", "-1,-1", "--batch-size", "500"]
    _, others, history = trained(path, 2, *words, *sampled, begin=start)
    assert losses == pytest.approx(others, abs=1e-5)
    assert history[-1]["test_acc"] is not None


def test_learned_rows_are_part_of_the_checkpoint(tmp_path: Path) -> None:
    """A resumed run is the uninterrupted one; predictions on another number of ranks are equal."""
    arrays, run = library(), tmp_path / "run"
    path = cut(arrays, 2, tmp_path)
    words = ["--model", "rgcn", "--layers", "2", "--hidden", "8"]
    start, want, _ = trained(path, 2, *words, "--epochs", "4", "--checkpoint", str(run / "a"))
    kept = ["--checkpoint", str(run / "b")]
    trained(path, 2, *words, "--epochs", "2", *kept, "--checkpoint-every", "1", begin=start)
    _, losses, _ = trained(path, 2, *words, "--epochs", "4", *kept, resume=True)
    assert losses == want
    whole, resumed = (
        torch.load(run / name / "checkpoint.pt", weights_only=True)["model"] for name in "ab"
    )
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    names = sorted(one.name.split(".")[1] for one in (run / "b").glob("checkpoint.*.*.pt"))
    assert names == ["author"] * 2 + ["term"] * 2  # nothing of older epochs
    found = []
    for size, name in ((2, "a"), (1, "b"), (3, "b")):
        out = tmp_path / f"{name}{size}"
        where = ["--checkpoint", run / name, "--out", out, "--gather", "--logits"]
        on_threads(size, "evaluate", cut(arrays, size, tmp_path), *where)
        found.append(np.load(out / "predictions.npz")["logits"])
    assert found[0].shape == (PAPERS, 4)
    for logits in found[1:]:
        np.testing.assert_allclose(logits, found[0], atol=1e-5)


OWN = """
import dgl.nn, torch
class Net(torch.nn.Module):
    def __init__(self, in_feats, out_feats, graph, target_type):
        super().__init__()
        assert in_feats == {"paper": 5} and target_type == "paper"
        self.conv = dgl.nn.HeteroGraphConv(
            {r: dgl.nn.GraphConv(5, out_feats) for r in graph.canonical_etypes}
        )

    def forward(self, graph, x):
        empty = {t: torch.zeros(graph.num_nodes(t), 5) for t in graph.ntypes if t not in x}
        return self.conv(graph, x | empty)
"""


def test_a_model_of_ones_own_gets_rows_by_type_and_may_give_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "typed_net.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    path = cut(library(), 2, tmp_path)
    _, losses, _ = trained(path, 2, "--model", "typed_net:Net", "--epochs", "3", "--lr", "0.1")
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--target-type", "papr"], "target_type: got 'papr', expected one of author, paper, term"),
        (["--target-type", "term"], "labels: got 'label', .*; mask: got 'train_mask"),
        (["--labels", "lable"], "target_type: got nothing and node types .* none has 'lable'"),
        (["--features", "fea"], "features: got 'fea', expected one of .*; did you mean 'feat'?"),
        (["--model", "sage"], "model: got 'sage' and a graph of several node or edge types"),
        (["--sampled"], "--sampled: author, term have no 'feat', and learned rows"),
    ],
)
def test_told_before_ranks_start(
    words: list[str], text: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a rank was started"))
    assert main(["train", cut(library(), 2, tmp_path), "--model", "rgcn", *words]) == 2
    assert re.search(text, capsys.readouterr().err)
