"""Train a model on parts in turns, in a process of its own, and print JSON: digests of all that it
computes, and what it took.

    python -m benchmarks.tasks.quarter PARTS.json MODEL [FOLDER MEMORY]

Without a model nothing is computed: that is what the process takes by itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import dgl.function as fn
import dgl.nn
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

import sar
from benchmarks.measure import status_bytes
from sar._private import prepare_optimizers
from sar.comm import TurnGroup
from sar.memory.spill import Spill
from sar.partition.load import read_book

HIDDEN, LAYERS, EPOCHS, CLASSES = 128, 3, 2, 16


class Net(nn.Module):
    """Layers, wired as ``wiring`` says."""

    def __init__(self, makes: Sequence[Callable[[], nn.Module]], width: int, wiring: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.layers = nn.ModuleList(make() for make in makes)
        self.norms = nn.ModuleList(sar.DistributedBN1D(HIDDEN) for _ in self.layers)
        self.wiring = wiring

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        h, seen = self.first(x), list[Tensor]()
        for layer, norm in zip(self.layers, self.norms, strict=True):
            out = layer(graph, h).flatten(1)
            out = F.relu(norm(out) if "norm" in self.wiring else out)
            if "dropout" in self.wiring:
                out = F.dropout(out, 0.3, self.training)
            h = out + h if "residual" in self.wiring else out
            seen.append(h)
        return self.last(torch.stack(seen).max(0).values if "jumping" in self.wiring else h)


class Typed(nn.Module):
    """SAGE over the relations of a bibliography."""

    def __init__(self, graph: Any, widths: dict[str, int]) -> None:
        super().__init__()
        self.first = nn.ModuleDict(
            {name: nn.Linear(width, HIDDEN) for name, width in widths.items()}
        )
        self.layers = nn.ModuleList(
            dgl.nn.HeteroGraphConv({name: sage() for name in graph.etypes}, "sum")
            for _ in range(LAYERS)
        )
        self.last = nn.Linear(HIDDEN, CLASSES)

    def forward(self, graph: Any, x: dict[str, Tensor]) -> Tensor:
        h = {name: linear(x[name]) for name, linear in self.first.items()}
        for layer in self.layers:
            h = h | {name: F.relu(rows) for name, rows in layer(graph, h).items()}
        return self.last(h["paper"])


class Gated(nn.Module):
    """A message of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.srcdata["h"], graph.dstdata["g"] = x, self.gate(x)
            graph.update_all(
                lambda edges: {"m": edges.src["h"] * torch.sigmoid(edges.dst["g"])},
                fn.sum("m", "out"),
            )
            return graph.dstdata["out"]


def sage() -> nn.Module:
    return dgl.nn.SAGEConv(HIDDEN, HIDDEN, "mean")


def gcn() -> nn.Module:
    return dgl.nn.GraphConv(HIDDEN, HIDDEN, allow_zero_in_degree=True)


def gat() -> nn.Module:
    return dgl.nn.GATConv(HIDDEN, HIDDEN // 4, 4, allow_zero_in_degree=True)


def gin() -> nn.Module:
    return dgl.nn.GINConv(nn.Linear(HIDDEN, HIDDEN), "sum")


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "SAGE, batch norm, dropout": (sage, "norm dropout"),
    "GCN, residual": (gcn, "residual"),
    "GIN, JumpingKnowledge": (gin, "jumping"),
    "GAT": (gat, ""),
    "GAT, all of these": (gat, "norm dropout residual jumping"),
    "an edge program": (Gated, ""),
}
TYPED = "HeteroGraphConv"


def train(partition: Any, name: str) -> dict[str, Any]:
    """Losses, and digests of logits, parameters, gradients and an evaluation."""
    graph = sar.construct_full_graph(partition)
    torch.manual_seed(0)
    data = partition.node_features
    if name == TYPED:
        rows = {ntype: torch.rand(graph.num_nodes(ntype), HIDDEN) for ntype in graph.ntypes}
        x: Any = rows | {"paper": data["paper/feat"]}
        torch.manual_seed(0)
        model: nn.Module = Typed(graph, {ntype: rows.shape[1] for ntype, rows in x.items()})
        labels = data["paper/label"].long()
    else:
        x, labels = data["_N/feat"], data["_N/label"].long()
        model = Net([MODELS[name][0]] * LAYERS, x.shape[1], MODELS[name][1])
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    losses = list[float]()
    for _ in range(EPOCHS):
        loss = sar.global_mean(F.cross_entropy(model(graph, x), labels, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        logits = model(graph, x)
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    made = {"logits": [logits], "parameters": [*model.parameters()], "gradients": grads}
    return {"losses": losses, **{what: _digest(these) for what, these in made.items()}}


def _digest(tensors: Sequence[Tensor]) -> str:
    found = xxhash.xxh3_128()
    for one in tensors:
        found.update(one.detach().contiguous().numpy().data)
    return found.hexdigest()


def main(parts: str, name: str = "", folder: str = "", memory: str = "") -> None:
    prepare_optimizers()
    told: dict[str, Any] = {}
    begin = time.process_time()
    if folder:
        size = read_book(parts).num_parts
        with Spill(folder, int(memory)) as spill:

            def rank(group: Any) -> Any:
                with spill.following(group):
                    return train(sar.load_partition_data(parts), name)

            told["found"] = TurnGroup.run(size, rank, between=[spill], table=spill)
            told |= spill.summary()
    elif name:
        told["found"] = sar.run_parts(parts, train, (name,))
    told["cpu"] = time.process_time() - begin
    told["peak"], told["anonymous"] = status_bytes("VmHWM", "RssAnon")
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
