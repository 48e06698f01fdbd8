"""Train models on parts in memory and out of core, in a process of its own, and print JSON: for
each model whether all bits are equal, and what it took.

    python tests/harness/out_of_core.py PARTS.json FOLDER MODEL..
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sar
from benchmarks.tasks.quarter import Gated, Net, gat, gcn, gin, sage
from sar.comm import TurnGroup
from sar.files import scratch_folder
from sar.memory.spill import Spill
from sar.train.memory import anonymous_mb

EPOCHS = 2


MODELS: dict[str, tuple[tuple[Callable[[], nn.Module], ...], str]] = {
    "sage": ((sage, sage, sage), "norm dropout residual jumping"),
    "mixed": ((gcn, gat, gin, Gated), ""),
}


def train(partition: Any, name: str, epochs: int) -> dict[str, Any]:
    """Losses, logits, parameters and gradients of some epochs."""
    graph = sar.construct_full_graph(partition)
    x = partition.node_features["_N/feat"]
    labels = partition.node_features["_N/label"].long()
    torch.manual_seed(0)
    makes, wiring = MODELS[name]
    model = Net(makes, x.shape[1], wiring)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    losses = []
    for _ in range(epochs):
        logits = model(graph, x)
        loss = sar.global_mean(F.cross_entropy(logits, labels, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        losses.append(loss.item())
    grads = [one.grad for one in model.parameters()]
    model.eval()
    with torch.no_grad():
        logits = model(graph, x)
    return {
        "losses": losses,
        "logits": logits,
        "parameters": [one.detach() for one in model.parameters()],
        "grads": grads,
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class Watch:
    """The largest anonymous memory at the ends of turns, in MB above what there was before."""

    def __init__(self) -> None:
        gc.collect()
        self.before = self.peak = anonymous_mb()

    def begin(self, rank: int, following: Any) -> None: ...

    def end(self, rank: int) -> None:
        self.peak = max(self.peak, anonymous_mb())

    @property
    def above(self) -> float:
        return self.peak - self.before


def warm_up(size: int, name: str) -> None:
    """Compile and import, on a small graph."""
    with scratch_folder() as folder:
        source = "synthetic:nodes=600,edges=3600,classes=8,features=32"
        path = sar.partition_graph(source, folder / "parts", size, method="random")
        TurnGroup.run(size, lambda group: train(sar.load_partition_data(path), name, 1))


def main(path: str, folder: str, names: list[str]) -> None:
    size = sar.partition.load.read_book(path).num_parts

    def case(name: str, spill: Spill | None = None, epochs: int = EPOCHS) -> Callable[[Any], Any]:
        def body(group: Any) -> Any:
            if spill is None:
                return train(sar.load_partition_data(path), name, epochs)
            with spill.following(group):
                return train(sar.load_partition_data(path), name, epochs)

        return body

    for name in names:
        warm_up(size, name)
        watch = Watch()
        want = TurnGroup.run(size, case(name), between=[watch])
        in_memory, watch = watch.above, Watch()
        most = int((watch.before + in_memory * 0.55) * 2**20)
        with Spill(folder, most) as spill:
            got = TurnGroup.run(size, case(name, spill), between=[spill, watch])
        print(
            json.dumps(
                {
                    "model": name,
                    "same": same(got, want),
                    "in_memory_mb": in_memory,
                    "out_of_core_mb": watch.above,
                    "read": spill.read_bytes,
                    "written": spill.written_bytes,
                }
            ),
            flush=True,
        )
        del want, got


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:] or list(MODELS))
