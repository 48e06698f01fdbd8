"""One training step of the same GraphSAGE on DGL, on sar and on IntelLabs SAR.

The three tasks differ in where the graph comes from and how gradients are summed, nothing else:
same layers, loss, initial parameters and optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dgl.nn
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import measure
from benchmarks.graphs import read_graph

LAYERS, HIDDEN, CLASSES = 3, 256, 16


class Block(nn.Module):
    """A graph layer with what follows it: from one layer's input to that of the next."""

    def __init__(self, conv: nn.Module, *then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.then = conv, then
        self.norms = nn.ModuleList(one for one in then if isinstance(one, nn.Module))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        x = self.conv(graph, x)
        for step in self.then:
            x = step(x)
        return x


class Sage(nn.Module):
    """A stack of unmodified ``dgl.nn.SAGEConv`` with mean aggregation."""

    def __init__(self, num_features: int, batch_norm: bool = False) -> None:
        super().__init__()
        widths = [num_features, *[HIDDEN] * (LAYERS - 1), CLASSES]
        sizes = list(zip(widths[:-1], widths[1:]))
        if batch_norm:
            convs = (dgl.nn.SAGEConv(*size, "mean") for size in sizes[:-1])
            hidden = [Block(conv, nn.BatchNorm1d(HIDDEN), F.relu) for conv in convs]
        else:
            hidden = [dgl.nn.SAGEConv(*size, "mean", activation=F.relu) for size in sizes[:-1]]
        self.layers = nn.ModuleList([*hidden, dgl.nn.SAGEConv(*sizes[-1], "mean")])

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(graph, x)
        return x


class Task:
    """Holds one rank's share of the graph and trains on it epoch by epoch."""

    graph: Any
    features: Tensor
    labels: Tensor
    train: Tensor  # rows of the local training nodes

    def start(self) -> None:
        """Make the model and note the memory before the first epoch."""
        warm_up()
        torch.manual_seed(0)
        self.num_train = self.summed(len(self.train))
        self.model = self.make_model(self.features.shape[1])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)
        measure.settle()
        self.baseline = measure.anonymous_bytes()

    def make_model(self, num_features: int) -> nn.Module:
        """What is trained; called as ``model(graph, features)``."""
        return Sage(num_features)

    def summed(self, number: int) -> int:
        """The sum of a number over all ranks."""
        return number

    def backward(self, loss: Tensor) -> None:
        """Gradients of this rank's share of the loss."""
        loss.backward()

    def gather_grads(self) -> None:
        """Sum the gradients over all ranks."""

    def sent_bytes(self) -> int:
        """Bytes of rows sent to other ranks so far."""
        return 0

    def step(self) -> float:
        """One epoch; this rank's share of the loss."""
        logits = self.model(self.graph, self.features)
        loss = F.cross_entropy(logits[self.train], self.labels[self.train], reduction="sum")
        loss = loss / self.num_train
        self.optimizer.zero_grad()
        self.backward(loss)
        self.gather_grads()
        self.optimizer.step()
        return loss.item()

    def epoch(self) -> dict[str, float]:
        """One measured epoch: seconds, faults, bytes sent, share of the loss."""
        sent, watch = self.sent_bytes(), measure.Stopwatch()
        loss = self.step()
        used = watch.read()
        return {"loss": loss, "sent": self.sent_bytes() - sent, "cpu": used.cpu, **asdict(used)}

    def memory(self, epochs: int) -> dict[str, int]:
        """Activation bytes: the anonymous memory of epochs above that before the first."""
        with measure.PeakMemory() as watch:
            for _ in range(epochs):
                self.step()
        return {
            "activation": watch.peak.best - self.baseline,
            "sampled": watch.peak.sampled - self.baseline,
            "low": watch.peak.low - self.baseline,
            "high": watch.peak.high - self.baseline,
            "baseline": self.baseline,
        }


def warm_up() -> None:
    """Load what a first step loads, which is no memory of activations."""
    linear = nn.Linear(1, 1)
    checkpoint(linear, torch.ones(1, 1), use_reentrant=False).sum().backward()
    torch.optim.Adam(linear.parameters(), fused=True).step()


class Dgl(Task):
    """The whole graph in one process, DGL alone."""

    def __init__(self, rank: int, size: int, port: int, file: str) -> None:
        data = read_graph(file)
        self.graph = dgl.graph((data["src"], data["dst"]), num_nodes=len(data["feat"]))
        self.graph.create_formats_()  # else the first epoch would build and keep them
        self.features, self.labels = data["feat"], data["label"]
        self.train = data["train_mask"].nonzero().squeeze(1)
        del data
        self.start()


class Sar(Task):
    """One partition, this library."""

    row_numbers = HIDDEN  # numbers in a row on the wire at the widest layer

    def __init__(
        self,
        rank: int,
        size: int,
        port: int,
        parts: str,
        rounds: int | None,
        activations: str = "keep",
        exchange: str = "auto",
        zeros: str = "send",
        donate: bool = False,
    ) -> None:
        import sar

        self.sar, self.activations, self.donate = sar, activations, donate
        self.group = sar.initialize_comms(rank, size, None, "gloo", master_port_number=port)
        data = sar.load_dgl_partition_data(parts, rank, "cpu")
        policy = sar.Policy(rounds=rounds, exchange=exchange, zeros=zeros)
        self.graph = sar.construct_full_graph(data, policy=policy)
        self.features = data.node_features["_N/feat"]
        self.labels = data.node_features["_N/label"].long()
        self.train = data.node_features["_N/train_mask"].bool().nonzero().squeeze(1)
        del data
        self.start()

    def start(self) -> None:
        from benchmarks.tasks.kernels import load_kernels

        load_kernels()
        self.make_structure()
        super().start()
        self.sar.sync_params(self.model)
        self.sar.set_activations(self.model, self.activations)
        if self.donate:
            self.sar.optimize(self.model, donate=True)

    def make_structure(self) -> None:
        """What the first epoch would make of the edges, and keep."""
        x = torch.zeros(self.graph.num_nodes(), 1, requires_grad=True)
        self.graph.aggregate(x).sum().backward()

    def summed(self, number: int) -> int:
        return int(self.group.all_reduce(torch.tensor(number)))

    def gather_grads(self) -> None:
        self.sar.gather_grads(self.model)

    def sent_bytes(self) -> int:
        return self.group.counters.sent_bytes

    def traffic(self) -> list[tuple[str, str, int]]:
        """(layer, pass, bytes sent) of one epoch."""
        with self.sar.trace(model=self.model) as traced:
            self.step()
        return [(row["layer"], row["pass"], row["sent"]) for row in traced.summary()]

    def plan(self) -> Any:
        """The plan that sums at the widest layer follow; collective."""
        from sar.edges.push_pull import linear_relation

        relation, like = self.graph._relation(None), torch.ones(1, self.row_numbers)
        return linear_relation(relation, like, None, self.graph.policy).plan

    def round_bytes(self) -> int:
        """Most bytes that this rank sends and receives in one round at the widest layer."""
        plan, policy = self.plan(), self.graph.policy
        row_bytes = self.row_numbers * self.features.element_size()
        rounds = plan.rounds(plan.num_rounds(policy, row_bytes))
        return max(step.num_send + step.num_recv for step in rounds) * row_bytes


class Original(Task):
    """One partition, the checkout of IntelLabs SAR that comes first on the import path."""

    def __init__(self, rank: int, size: int, port: int, parts: str, checkout: str) -> None:
        import sar

        if Path(checkout) not in Path(sar.__file__).resolve().parents:
            raise ImportError(f"sar came from {sar.__file__}, expected it from {checkout}")
        self.sar = sar
        self.sent = 0
        self.count_sends()
        sar.initialize_comms(
            rank,
            size,
            os.environ["MASTER_ADDR"],
            "gloo",
            torch.device("cpu"),
            master_port_number=port,
        )
        data = sar.load_dgl_partition_data(parts, rank, torch.device("cpu"))
        self.graph = sar.construct_full_graph(data)
        self.features = sar.suffix_key_lookup(data.node_features, "feat")
        self.labels = sar.suffix_key_lookup(data.node_features, "label").long()
        mask = sar.suffix_key_lookup(data.node_features, "train_mask").bool()
        self.train = mask.nonzero().squeeze(1)
        del data
        relations = getattr(self.graph, "graph_shard_managers", {0: self.graph})
        for shard in (shard for manager in relations.values() for shard in manager.graph_shards):
            shard.graph.create_formats_()  # as for DGL
        self.start()

    def count_sends(self) -> None:
        """It keeps no counters: count what it hands to ``torch.distributed.isend``."""
        isend = torch.distributed.isend

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.sent += tensor.numel() * tensor.element_size()
            return isend(tensor, *args, **kwargs)

        torch.distributed.isend = counted

    def summed(self, number: int) -> int:
        total = torch.tensor(number)
        self.sar.comm.all_reduce(total, torch.distributed.ReduceOp.SUM)
        return int(total)

    def gather_grads(self) -> None:
        self.sar.gather_grads(self.model)

    def sent_bytes(self) -> int:
        return self.sent
