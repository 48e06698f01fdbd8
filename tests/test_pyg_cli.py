"""The command line with models of PyG: the losses of one process, on every way that runs go."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from foreign_files import write_pyg
from harness import run_threads
from harness.commands import launch_on, on_threads
from harness.covering import covering
from harness.failures import RankFailed
from harness.graphs import ETYPE_HOMO, GraphArrays, bibliography, hetero, mixed
from harness.parts import Cutter, node_parts
from harness.pool import WorkerPool
from torch import Tensor, nn

from sar.__main__ import main, read_words
from sar.cli.train import make_trainer
from sar.models import build_model
from sar.plan.probe import Work, probe_bytes
from sar.run_options import ModelOptions

nn_of = "torch_geometric.nn:"
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
    named = model if ":" in model else f"{nn_of}{model}"
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
COVERED = covering(name=CASES, size=[1, 2, 3])


def trained(path: str, size: int, *words: str) -> list[Any]:
    """What each rank's trainer started from, and its losses."""
    args = read_words(["train", path, *words])

    def rank(group: Any) -> Any:
        trainer = make_trainer(args, group, torch.device("cpu"))
        start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        return start, [record["loss"] for record in trainer.fit()]

    return run_threads(size, rank, timeout=60)


def plain_losses(
    name: str, start: dict[str, Tensor], epochs: int, forward: Callable | None = None
) -> list[float]:
    """As a script of PyG's computes them on the whole graph."""
    whole, (kind, args, _, columns) = graph(), CASES[name]
    model = build_model(ModelOptions(f"{nn_of}{kind}", args=args), 6, 4)
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


@pytest.mark.parametrize("case", COVERED, ids=str)
def test_losses_of_one_process(case: dict[str, Any], partitioned: Cutter) -> None:
    kind, args, call, _ = CASES[case["name"]]
    more = [] if call is None else ["--call", call]
    path = partitioned(graph(), case["size"])
    words = words_of(kind, args, *more, *LOOP, "4")
    ranks = trained(path, case["size"], *words)
    want = plain_losses(case["name"], ranks[0][0], 4)
    assert all(losses == pytest.approx(want, rel=2e-5) for _, losses in ranks)
    assert want[-1] < want[0]
