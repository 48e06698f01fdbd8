"""One training step of the same model on DGL, on sar and on IntelLabs SAR.

The three tasks differ in where the graph comes from and how gradients are summed, nothing else:
same layers, loss, initial parameters and optimizer.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import measure
from benchmarks.graphs import read_graph
from benchmarks.tasks.models import HEADS, HIDDEN, LAYERS, Stack

_WARM = 5  # epochs before those that are timed one by one


class Task:
    """Holds one rank's share of the graph and trains a :class:`Stack` on it epoch by epoch."""

    kind: str
    graph: Any
    features: Tensor
    labels: Tensor
    train: Tensor  # rows of the local training nodes

    def start(self) -> None:
        """Make the model and note the memory before the first epoch."""
        warm_up()
        torch.manual_seed(0)
        self.num_train = self.summed(len(self.train))
        self.model = self.make(self.features.shape[1])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)
        measure.settle()
        self.baseline = measure.anonymous_bytes()

    def make(self, num_features: int) -> nn.Module:
        """The model that is trained."""
        return Stack(self.kind, num_features)

    def summed(self, number: int) -> int:
        """The sum of a number over all ranks."""
        return number

    def backward(self, loss: Tensor) -> None:
        """Gradients of this rank's share of the loss, then their sums over all ranks."""
        loss.backward()

    def sent_bytes(self) -> int:
        """Bytes of rows sent to other ranks so far."""
        return 0

    def collectives(self) -> int:
        """Begun so far."""
        return 0

    def step(self) -> float:
        """One epoch; this rank's share of the loss."""
        logits = self.model(self.graph, self.features)
        loss = F.cross_entropy(logits[self.train], self.labels[self.train], reduction="sum")
        loss = loss / self.num_train
        self.optimizer.zero_grad()
        self.backward(loss)
        self.optimizer.step()
        return loss.item()

    def epoch(self) -> dict[str, float]:
        """One measured epoch: seconds, faults, bytes sent, share of the loss."""
        sent, watch = self.sent_bytes(), measure.Stopwatch()
        loss = self.step()
        used = watch.read()
        return {"loss": loss, "sent": self.sent_bytes() - sent, "cpu": used.cpu, **asdict(used)}

    def small_epochs(self, number: int) -> dict[str, list[float]]:
        """Per epoch: seconds of the process and of its main thread, and collectives begun."""
        found: dict[str, list[float]] = {"cpu": [], "thread": [], "collectives": []}
        for _ in range(_WARM):
            self.step()
        for _ in range(number):
            begin = time.process_time(), time.thread_time(), self.collectives()
            self.step()
            end = time.process_time(), time.thread_time(), self.collectives()
            for name, a, b in zip(found, begin, end):
                found[name].append(b - a)
        return found

    def memory(self, epochs: int) -> dict[str, int]:
        """Activation bytes: the anonymous memory of epochs above that before the first."""
        with measure.PeakMemory() as watch:
            for _ in range(epochs):
                self.step()
        return {
            "activation": watch.peak.best - self.baseline,
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

    def __init__(self, file: str, kind: str = "sage") -> None:
        self.kind, data = kind, read_graph(file)
        self.graph = dgl.graph((data["src"], data["dst"]), num_nodes=len(data["feat"]))
        self.graph.create_formats_()  # else the first epoch would build and keep them
        self.features, self.labels = data["feat"], data["label"]
        self.train = data["train_mask"].nonzero().squeeze(1)
        del data
        self.start()


class Sar(Task):
    """One partition, this library.

    Args:
        every: one training node in so many keeps its label.
        blocks: train on the rows that reach the loss.
        policy: of the graph.
    """

    def __init__(
        self,
        parts: str,
        kind: str = "sage",
        activations: str = "keep",
        donate: bool = False,
        every: int = 1,
        blocks: bool = False,
        **policy: Any,
    ) -> None:
        import sar

        self.sar, self.kind, self.saved = sar, kind, 0.0
        self.activations, self.donate = activations, donate
        self.group = sar.initialize_comms()
        data = sar.load_dgl_partition_data(parts, self.group.rank, "cpu")
        self.whole = self.graph = sar.construct_full_graph(data, policy=sar.Policy(**policy))
        self.features = data.node_features["_N/feat"]
        self.labels = data.node_features["_N/label"].long()
        self.train = data.node_features["_N/train_mask"].bool().nonzero().squeeze(1)[::every]
        del data
        if blocks:
            self._use_blocks()
        self.start()

    def _use_blocks(self) -> None:
        """Rows and graphs of training alone take the place of the whole."""
        from sar.graph.layer_blocks import plan_blocks

        plan = plan_blocks(self.whole, self.train, LAYERS)
        self.saved, self.graph = plan.saved, [*plan.build()]
        self.features = self.features[self.graph[0].srcdata["_ID"] - self.whole.ndata["_ID"][0]]
        self.labels = self.labels[self.train]
        self.train = torch.arange(len(self.train))

    def saved_work(self) -> float:
        """Share of the whole graph's work that the blocks leave out."""
        return self.saved

    def start(self) -> None:
        from benchmarks.tasks.kernels import load_kernels

        load_kernels()
        if self.kind in ("gat", "gatv2"):
            self.whole.create_formats_()  # as for DGL
        else:  # what the first epoch would make of the edges, and keep
            x = torch.zeros(self.whole.num_nodes(), 1, requires_grad=True)
            self.whole.aggregate(x).sum().backward()
        super().start()
        self.sar.sync_params(self.model)
        self.sar.set_activations(self.model, self.activations)
        if self.donate:
            self.sar.optimize(self.model, donate=True)

    def summed(self, number: int) -> int:
        return int(self.group.all_reduce(torch.tensor(number)))

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.sar.gather_grads(self.model)

    def sent_bytes(self) -> int:
        return self.group.counters.sent_bytes

    def collectives(self) -> int:
        return self.group.counters.collectives

    def traffic(self) -> list[tuple[str, str, int]]:
        """(layer, pass, bytes sent) of one epoch."""
        with self.sar.trace(model=self.model) as traced:
            self.step()
        return [(row["layer"], row["pass"], row["sent"]) for row in traced.summary()]

    def round_bytes(self) -> int:
        """Most bytes that this rank sends and receives in one round at the widest layer."""
        from sar.edges.push_pull import linear_relation

        relation, policy = self.whole._relation(None), self.whole.policy
        width = HIDDEN + HEADS if self.kind in ("gat", "gatv2") else HIDDEN
        if self.kind in ("sage", "gcn"):  # no rank computes partial sums for another's softmax
            relation = linear_relation(relation, torch.ones(1, width), None, policy)
        row_bytes = width * self.features.element_size()
        rounds = relation.plan.rounds(relation.plan.num_rounds(policy, row_bytes))
        return max(step.num_send + step.num_recv for step in rounds) * row_bytes


class Original(Task):
    """One partition, the checkout of IntelLabs SAR that comes first on the import path; its
    attention with its own replacement of DGL's softmax over edges."""

    def __init__(self, parts: str, checkout: str, kind: str = "sage") -> None:
        import sar

        if Path(checkout) not in Path(sar.__file__).resolve().parents:
            raise ImportError(f"sar came from {sar.__file__}, expected it from {checkout}")
        self.sar, self.kind, self.sent = sar, kind, 0
        if kind != "sage":
            sar.patch_dgl()
        self._count_sends()
        rank, size, port = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        where, cpu = os.environ["MASTER_ADDR"], torch.device("cpu")
        sar.initialize_comms(rank, size, where, "gloo", cpu, master_port_number=port)
        data = sar.load_dgl_partition_data(parts, rank, cpu)
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

    def _count_sends(self) -> None:
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

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.sar.gather_grads(self.model)

    def sent_bytes(self) -> int:
        return self.sent
