"""What mini-batches learn on real graphs, beside the full batch and plain DGL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, ONE_THREAD, ROOT, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

if TYPE_CHECKING:
    from sar.partition.arrays import GraphArrays

TASKS, RANKS = "benchmarks.tasks.learns", 4
SEEDS = {"coauthor_cs": range(2), "cora": range(3), "wn18rr": range(2)}
APART = 0.01  # what is allowed between means of a metric
STEPS = {"cora": {"epochs": 30, "batch": 512}, "wn18rr": {"epochs": 10, "batch": 4096}}
METRICS = {"cora": ("auc",), "wn18rr": ("auc", "mrr", "hits@10")}
FULL = {"epochs": 200, "batch": 0}
ONE, ALL = "1 rank", "DGL, full batch"
NODES, TRAIN = "coauthor_cs", "--layers 2 --hidden 64 --dropout 0.5 --threads 1 --no-progress"
WAYS = {
    "full batch": "--epochs 60",
    "sampled": "--sampled --fanouts 10,5 --batch-size 256 --epochs 10",
}


@benchmark("sampling-learns", "mini-batches")
def learns(options: Options) -> Report:
    """Mini-batches learn what the whole graph teaches: classes of nodes, links, triples.

    Coauthor CS: `sar train` of GraphSAGE on 4 ranks. Cora: GraphSAGE and a dot product; 85 % of the
    edges train and are all that messages pass, 5 % validate, 10 % test. WN18RR: a layer over all
    relations and DistMult, the given triples, ranked among all nodes, filtered. Links on 1 and 4
    ranks, beside one DGL process whose layers go over the whole graph in steps of as many seed
    edges. Test metrics are those of the epoch with the best validation.
    """
    names = (NODES, *STEPS)
    folder = options.data
    if folder is None or not all((folder / f"{name}.npz").is_file() for name in names):
        words = ", ".join(f"{name}.npz" for name in names)
        return Report(skipped=f"pass --data or set SAR_DATA: {words}")
    report = _classes(options, folder / f"{NODES}.npz")
    for name in STEPS:
        one = _links(options, name, folder / f"{name}.npz")
        report.figures += one.figures
        report.tables += one.tables
    return report


def _classes(options: Options, file: Path) -> Report:
    """Accuracy of the command line's model, full batch and sampled."""
    from sar.partition.sources.npz import read_npz

    cut = ("metis", RANKS)
    parts = graphs.partitions(options, f"learns-{NODES}", lambda: read_npz(file), [cut])[cut]
    seeds, found = SEEDS[NODES], []
    table = Table(f"{NODES}: test accuracy", ["", *(f"seed {seed}" for seed in seeds)])
    for way, words in WAYS.items():
        values = [_train(parts, [*TRAIN.split(), *words.split(), "--seed", str(s)]) for s in seeds]
        table.rows.append([way, *values])
        found.append(mean(values))
    full, sampled = found
    figures = [
        Figure(f"{NODES}: test accuracy, sampled", sampled, at_least=0.93),
        Figure(f"{NODES}: sampled below full batch", full - sampled, at_most=APART),
    ]
    return Report(figures, [table])


def _train(parts: Path, arguments: list[str]) -> float:
    """Test accuracy of the epoch with the best validation."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "sar", "train", str(parts), *arguments, "--json", str(out)]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | LAUNCH, capture_output=True)
        epochs = json.loads(out.read_text(encoding="utf-8"))["epochs"]
    return float(max(epochs, key=lambda one: one["val_acc"])["test_acc"])


def _links(options: Options, name: str, file: Path) -> Report:
    """Metrics of links, on ranks and alone."""
    content = CONTENTS[name](file)
    cuts = [("random", 1), ("metis", RANKS)]
    parts = graphs.partitions(options, f"learns-{name}", partial(_graph, name, content), cuts)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        given = {"name": name, "content": str(Path(folder) / "content.pt")}
        torch.save(content, given["content"])
        with Cluster(f"{TASKS}:Alone", environment=ONE_THREAD, **given) as alone:  # type: ignore[arg-type]
            found["DGL"] = _fits(alone, name)
            if name == "cora":
                found[ALL] = _fits(alone, name, FULL)
        for (_, size), path in parts.items():
            given["parts"] = str(path)
            with Cluster(f"{TASKS}:Sampled", size, environment=LAUNCH, **given) as ranks:  # type: ignore[arg-type]
                found[ONE if size == 1 else f"{size} ranks"] = _fits(ranks, name)
    table = Table(f"{name}: test", ["", *found["DGL"][0]])
    for who, fits in found.items():
        table.rows += [[f"{who}, seed {s}", *fit.values()] for s, fit in zip(SEEDS[name], fits)]
    figures = []
    for metric in METRICS[name]:
        means = {who: mean(fit[metric] for fit in fits) for who, fits in found.items()}
        figures += _figures(f"{name}: {metric}", means)
    return Report(figures, [table])


def _fits(
    cluster: Cluster, name: str, steps: dict[str, int] | None = None
) -> list[dict[str, float]]:
    return [cluster.call("fit", seed=seed, **(steps or STEPS[name]))[0] for seed in SEEDS[name]]


def _figures(name: str, means: dict[str, float]) -> list[Figure]:
    one, many = means[ONE], means[f"{RANKS} ranks"]
    references = [who for who in means if who.startswith("DGL")]
    figures = [Figure(f"{name}, {who}", value) for who, value in means.items()]
    for who in references:
        below = means[who] - min(one, many)
        figures.append(Figure(f"{name}: ranks below {who}", below, at_most=APART))
    apart = abs(one - many)
    return [*figures, Figure(f"{name}: 1 and {RANKS} ranks apart", apart, at_most=APART)]


def _graph(name: str, content: dict[str, Any]) -> GraphArrays:
    """The training edges, with what the ranks read of them."""
    from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays

    nodes = {"feat": content["feat"]} if "feat" in content else {}
    edges = {key: content[key] for key in ("etype", "seed")}
    ends = {ETYPE_HOMO: (content["src"], content["dst"])}
    counts = {NTYPE_HOMO: content["nodes"]}
    return GraphArrays(name, counts, ends, {NTYPE_HOMO: nodes}, {ETYPE_HOMO: edges}).with_orig_ids()


def _cora(file: Path) -> dict[str, Any]:
    """Undirected edges in a random order: 85 % train, 5 % validate, 10 % test."""
    from sar.partition.sources.npz import read_npz

    graph, rng = read_npz(file), torch.Generator().manual_seed(0)
    ((src, dst),), (data,) = graph.edges.values(), graph.node_data.values()
    ends = torch.stack([src, dst])[:, src < dst]
    ends = ends[:, torch.randperm(ends.shape[1], generator=rng)]
    sizes = [ends.shape[1] * 85 // 100, ends.shape[1] * 5 // 100]
    train, *held = ends.split([*sizes, ends.shape[1] - sum(sizes)], dim=1)
    known = src * graph.total_nodes + dst
    pairs = []
    for one in held:
        none = torch.randint(graph.total_nodes, (2, 2 * one.shape[1]), generator=rng)
        free = (none[0] != none[1]) & ~torch.isin(none[0] * graph.total_nodes + none[1], known)
        pairs.append(_labeled(one, none[:, free][:, : one.shape[1]], torch.zeros_like(one[0])))
    feat = data["feat"] / data["feat"].sum(1, keepdim=True).clamp(min=1)
    return {
        "nodes": graph.total_nodes, "width": feat.shape[1], "feat": feat,
        "src": torch.cat([train[0], train[1]]), "dst": torch.cat([train[1], train[0]]),
        "etype": torch.zeros(2 * sizes[0], dtype=torch.int64),
        "seed": torch.arange(2 * sizes[0]) < sizes[0],
        "valid_pairs": pairs[0], "test_pairs": pairs[1],
    }  # fmt: skip


def _labeled(ends: Tensor, none: Tensor, types: Tensor) -> Tensor:
    """int64 [2 n, 4]: source, destination, type, and 1 for edges and 0 for what is none."""
    pairs = torch.cat([ends, none], 1)
    labels = torch.cat([torch.ones_like(types), torch.zeros_like(types)])
    return torch.stack([*pairs, torch.cat([types, types]), labels], 1)


def _wn18rr(file: Path) -> dict[str, Any]:
    """The given triples, each also the other way round as one of another relation."""
    from sar.partition.sources.npz import read_npz

    graph, rng = read_npz(file), torch.Generator().manual_seed(0)
    ((src, dst),), (data,) = graph.edges.values(), graph.edge_data.values()
    relations, nodes = int(data["etype"].max()) + 1, graph.total_nodes
    back = torch.stack([dst, src, data["etype"] + relations])
    triples = torch.cat([torch.stack([src, dst, data["etype"]]), back], 1)
    masks = {name: data[f"{name}_mask"].repeat(2) for name in ("train", "val", "test")}
    keys, order = (triples[0] * 2 * relations + triples[2]).sort()
    src, dst, etype = triples[:, masks["train"]]
    content = {
        "nodes": nodes, "relations": 2 * relations, "src": src, "dst": dst,
        "etype": etype, "seed": torch.ones(len(src), dtype=torch.bool),
        "all": torch.stack([keys, triples[1][order]]),
    }  # fmt: skip
    for split, mask in (("valid", masks["val"]), ("test", masks["test"])):
        asked = triples[:, mask]
        none = torch.stack([asked[0], torch.randint(nodes, asked[0].shape, generator=rng)])
        content[split] = asked.T.contiguous()
        content[f"{split}_pairs"] = _labeled(asked[:2], none, asked[2])
    return content


CONTENTS = {"cora": _cora, "wn18rr": _wn18rr}
