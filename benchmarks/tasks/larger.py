"""A process that trains means of GraphSAGE on all parts of a graph: in memory, ranks side by side,
or out of core, ranks in turns. Prints JSON.

    python -m benchmarks.tasks.larger PARTS.json RESULT.pt JSON
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from dgl.nn import SAGEConv
from torch import Tensor, nn

import sar
from sar.comm import Group, TurnGroup
from sar.comm.local import ThreadGroup
from sar.memory.spill import Spill
from sar.partition.load import read_book
from sar.train.memory import anonymous_mb

WIDTHS = (128, 64, 64, 16)
EPOCHS = 2  # the first is not measured
_ONE_GENERATOR = threading.Lock()  # of all threads


class Net(nn.Module):
    """Layers with a relu between them."""

    def __init__(self) -> None:
        super().__init__()
        pairs = zip(WIDTHS, WIDTHS[1:], strict=False)
        self.layers = nn.ModuleList(SAGEConv(*pair, "mean") for pair in pairs)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(graph, x))
        return self.layers[-1](graph, x)


class Watch:
    """Processor seconds, and bytes on the disk, of this process between two calls."""

    def __init__(self) -> None:
        self.before: list[float] | None = None
        self.found: dict[str, float] = {}

    def look(self) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        lines = Path("/proc/self/io").read_text().splitlines()
        io = {name: int(number) for name, number in (line.split(": ") for line in lines)}
        now = [usage.ru_utime, usage.ru_stime, io["read_bytes"], io["write_bytes"]]
        if self.before is not None:
            names = ("user", "system", "read", "written")
            spent = (new - old for new, old in zip(now, self.before, strict=True))
            self.found = dict(zip(names, spent, strict=True))
        self.before = now


def train(group: Group, parts: str, epochs: int, watch: Watch | None) -> dict[str, Any]:
    """Steps of gradient descent; the last loss and the gradients of the first step."""
    part = sar.load_partition_data(parts)
    graph = sar.construct_full_graph(part)
    x, labels = part.node_features["_N/feat"], part.node_features["_N/label"]
    del part
    with _ONE_GENERATOR:
        torch.manual_seed(0)
        model, grads = Net().to(x.dtype), list[Tensor]()
    for _ in range(epochs):
        if watch is not None and group.rank == 0:
            watch.look()
        losses = F.cross_entropy(model(graph, x), labels.long(), reduction="none")
        loss = sar.global_mean(losses)
        del losses
        model.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        grads = grads or [one.grad.clone() for one in model.parameters()]
        with torch.no_grad():
            for one in model.parameters():
                one.sub_(one.grad, alpha=0.1)
    if watch is not None and group.rank == 0:
        watch.look()
    return {"loss": loss.item(), "grads": grads}


def run(
    parts: str, *, spill: str | None = None, memory: int = 0, room: int = 0,
    table: int | None = None, epochs: int = EPOCHS, warm: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train on all parts.

    Args:
        spill: folder of the run out of core; otherwise all stays in memory.
        memory: bytes of the process; or else ``room`` above what it has.
        table: bytes of the table; by default what a part leaves.
        warm: train in memory before, so that ``room`` is that of training alone.
    """
    size, watch = read_book(parts).num_parts, Watch()
    if spill is None:
        ranks = ThreadGroup.run(size, lambda group: train(group, parts, epochs, watch), 3600.0)
        return {**watch.found, **ranks[0]}
    if warm:
        TurnGroup.run(size, lambda group: train(group, parts, 1, None), table=1 << 40)
    gc.collect()
    with Spill(spill, memory or int(anonymous_mb() * (1 << 20)) + room) as file:

        def rank(group: Group) -> dict[str, Any]:
            with file.following(group):
                return train(group, parts, epochs, watch)

        rows = file if table is None else table
        ranks = TurnGroup.run(size, rank, between=[file], table=rows)
    return {**watch.found, **ranks[0], "moved": file.read_bytes + file.written_bytes}


if __name__ == "__main__":
    _, given, result, options = sys.argv
    found = run(given, **json.loads(options))
    torch.save(found.pop("grads"), result)
    print(json.dumps(found))
