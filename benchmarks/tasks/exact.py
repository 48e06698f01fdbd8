"""Forward and backward of one model, on DGL's whole graph or on a partition, written to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl.nn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.graphs import read_graph

HIDDEN, CLASSES = 64, 16


def _layer(name: str, num_in: int, num_out: int) -> nn.Module:
    if name == "GCN":
        return dgl.nn.GraphConv(num_in, num_out, allow_zero_in_degree=True)
    if name == "SAGE":
        return dgl.nn.SAGEConv(num_in, num_out, "mean")
    return dgl.nn.GINConv(nn.Linear(num_in, num_out), "sum", learn_eps=True)


class Stack(nn.Module):
    """Three layers of one kind; the same parameters in every process, up to rounding to dtype."""

    def __init__(self, name: str, num_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [num_features, HIDDEN, HIDDEN, CLASSES]
        pairs = zip(widths[:-1], widths[1:])
        self.layers = nn.ModuleList(_layer(name, a, b) for a, b in pairs)
        self.to(dtype)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        # A smooth activation: a sum that rounding puts on the other side of relu's kink changes a
        # gradient by a whole term, in DGL alone too when its edges come in another order.
        for layer in self.layers[:-1]:
            x = F.silu(layer(graph, x))
        return self.layers[-1](graph, x)


class Whole:
    """The reference: DGL on the whole graph. Results are in the order of the input's nodes."""

    def __init__(self, rank: int, size: int, port: int, file: str) -> None:
        self.data = read_graph(file)
        ends = (self.data["src"], self.data["dst"])
        self.graph: Any = dgl.graph(ends, num_nodes=len(self.data["feat"]))
        self.nids = self.data["orig_id"]

    def fields(self) -> tuple[Tensor, Tensor, Tensor]:
        """Features, labels and the mask of training nodes."""
        return self.data["feat"], self.data["label"].long(), self.data["train_mask"].bool()

    def summed(self, number: int) -> int:
        return number

    def gather(self, model: nn.Module) -> None:
        """Sum the gradients over all ranks."""

    def run(self, name: str, dtype: str, rounds: int | None, out: str) -> None:
        """Write logits, loss and gradients of one forward and backward pass to ``out``."""
        feat, labels, mask = self.fields()
        x = feat.to(getattr(torch, dtype), copy=True).requires_grad_()
        model = Stack(name, x.shape[1], x.dtype)
        logits = model(self.graph_for(rounds), x)
        loss = F.cross_entropy(logits[mask], labels[mask], reduction="sum")
        loss = loss / self.summed(int(mask.sum()))
        loss.backward()
        self.gather(model)
        result = {"nids": self.nids, "logits": logits.detach(), "loss": loss.detach()}
        result["input gradient"] = x.grad
        for number, (key, parameter) in enumerate(model.named_parameters()):
            result[f"gradient {number} {key}"] = parameter.grad
        torch.save(result, out)

    def graph_for(self, rounds: int | None) -> Any:
        return self.graph


class Part(Whole):
    """One partition; its rows carry the original ids."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        import sar

        self.sar, self.rank = sar, rank
        self.group = sar.initialize_comms(rank, size, "127.0.0.1", "gloo", master_port_number=port)

    def load(self, parts: str) -> None:
        """Take the partitions of another cut."""
        data = self.sar.load_dgl_partition_data(parts, self.rank, "cpu")
        self.graph = self.sar.construct_full_graph(data)
        names = ("feat", "label", "train_mask", "orig_id")
        self.data = {name: data.node_features[f"_N/{name}"] for name in names}
        self.nids = self.data["orig_id"]

    def graph_for(self, rounds: int | None) -> Any:
        return self.graph.with_policy(self.sar.Policy(rounds=rounds))

    def summed(self, number: int) -> int:
        return int(self.group.all_reduce(torch.tensor(number)))

    def gather(self, model: nn.Module) -> None:
        self.sar.gather_grads(model)

    def run(self, name: str, dtype: str, rounds: int | None, out: str) -> None:
        super().run(name, dtype, rounds, str(Path(out) / f"{self.rank}.pt"))
