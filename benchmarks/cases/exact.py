"""Logits, loss and gradients against DGL on the whole graph."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, ONE_THREAD, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

RANKS = 4
NODES, EDGES = 20_000, 200_000
LIMITS = {"float32": 1e-5, "float64": 1e-12}
MODELS = ("GCN", "SAGE", "GIN")
CUTS = (("metis", RANKS), ("random", RANKS))
ROUNDS = (1, 2, None)
HIDDEN, CLASSES = 64, 16
ZERO = 1e-6  # a gradient below this share of the model's largest is one that cancels
Tensors = dict[str, Tensor]


@benchmark("exact", "core")
def exact(options: Options) -> Report:
    """Largest relative errors of logits, loss and gradients against DGL on the whole graph.

    An error is max|a - b| / max|b| of a tensor; of the parameters' gradients the worst counts. One
    row is the worst of one-shot, two and strict rounds.
    """
    graph = graphs.community(options, CUTS, NODES, EDGES)
    columns = ["model", "dtype", "cut", "logits", "loss", "parameters", "inputs"]
    table = Table(f"{NODES} nodes, {EDGES} edges, {RANKS} ranks", columns)
    report = Report(tables=[table])
    with tempfile.TemporaryDirectory() as folder:
        wanted = _reference(graph, Path(folder))
        found = _distributed(graph, Path(folder))
    for dtype, limit in LIMITS.items():
        worst = 0.0
        for model in MODELS:
            for method, _ in CUTS:
                runs = [found[model, dtype, method, rounds] for rounds in ROUNDS]
                errors = [compare(run, wanted[model, dtype]) for run in runs]
                largest = [max(column) for column in zip(*errors)]
                table.rows.append([model, dtype, method, *largest])
                worst = max(worst, *largest)
        report.figures.append(Figure(f"largest error, {dtype}", worst, at_most=limit))
    return report


def compare(found: Tensors, wanted: Tensors) -> list[float]:
    """Errors of logits, loss, parameters' gradients (the worst) and the inputs' gradient."""
    parameters = [key for key in wanted if key.startswith("gradient")]
    largest = max(float(wanted[key].abs().max()) for key in parameters)
    gradients = [error(found[key], wanted[key], largest) for key in parameters]
    return [
        error(found["logits"], wanted["logits"]),
        error(found["loss"], wanted["loss"]),
        max(gradients),
        error(found["input gradient"], wanted["input gradient"]),
    ]


def error(found: Tensor, wanted: Tensor, largest: float = 0.0) -> float:
    """max|a - b| / max|b|, or over ``largest`` where b is zero but for rounding."""
    scale = float(wanted.abs().max())
    if scale < ZERO * largest:
        scale = largest
    return float((found - wanted).abs().max()) / scale


def _reference(graph: graphs.Prepared, folder: Path) -> dict[tuple[str, str], Tensors]:
    out = folder / "whole.pt"
    results = {}
    with Cluster(
        "benchmarks.cases.exact:Whole", environment=ONE_THREAD, file=str(graph.file)
    ) as dgl:
        for model in MODELS:
            for dtype in LIMITS:
                dgl.call("run", name=model, dtype=dtype, rounds=None, out=str(out))
                results[model, dtype] = graphs.read_graph(out)
    return results


def _distributed(
    graph: graphs.Prepared, folder: Path
) -> dict[tuple[str, str, str, int | None], Tensors]:
    results = {}
    with Cluster("benchmarks.cases.exact:Part", RANKS, environment=LAUNCH) as ranks:
        for cut, parts in graph.parts.items():
            ranks.call("load", parts=str(parts))
            for model in MODELS:
                for dtype in LIMITS:
                    for rounds in ROUNDS:
                        ranks.call("run", name=model, dtype=dtype, rounds=rounds, out=str(folder))
                        results[model, dtype, cut[0], rounds] = _join(folder)
    return results


def _join(folder: Path) -> Tensors:
    """The ranks' rows in the order of the original ids; their losses summed."""
    parts = [graphs.read_graph(folder / f"{rank}.pt") for rank in range(RANKS)]
    joined = dict(parts[0])
    order = torch.cat([part["nids"] for part in parts]).argsort()
    for key in ("logits", "input gradient"):
        joined[key] = torch.cat([part[key] for part in parts])[order]
    joined["loss"] = torch.stack([part["loss"] for part in parts]).sum()
    return joined


# ---------------------------------------------------------------- in the measured processes


def _layer(name: str, num_in: int, num_out: int) -> nn.Module:
    import dgl.nn

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

    def __init__(self, file: str) -> None:
        import dgl

        self.data = graphs.read_graph(file)
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

    def __init__(self) -> None:
        import sar

        self.sar, self.group = sar, sar.initialize_comms()

    def load(self, parts: str) -> None:
        """Take the partitions of another cut."""
        data = self.sar.load_dgl_partition_data(parts, self.group.rank, "cpu")
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
        super().run(name, dtype, rounds, str(Path(out) / f"{self.group.rank}.pt"))
