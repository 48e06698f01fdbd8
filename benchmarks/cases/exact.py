"""Logits, loss and gradients against DGL on the whole graph."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, ONE_THREAD, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

RANKS = 4
NODES, EDGES = 20_000, 200_000
LIMITS = {"float32": 1e-5, "float64": 1e-12}
MODELS = ("GCN", "SAGE", "GIN")
CUTS = (("metis", RANKS), ("random", RANKS))
ROUNDS = (1, 2, None)
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
        "benchmarks.tasks.exact:Whole", environment=ONE_THREAD, file=str(graph.file)
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
    with Cluster("benchmarks.tasks.exact:Part", RANKS, environment=LAUNCH) as ranks:
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
