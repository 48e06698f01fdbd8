"""Rows that sampled batches fetch, of a cut that follows what is drawn and of METIS'."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from benchmarks.registry import Figure, Options, Report, Table, benchmark

if TYPE_CHECKING:
    from sar.comm import Group
    from sar.partition.arrays import GraphArrays

SCALE, SHARE, WIDTH, BATCH, FANOUTS = 16, 0.1, 32, 128, (15, 10, 5)
RANKS = (4, 8)
CACHED = 0.1  # of the rows that a rank owns
AT_MOST = 0.85  # of METIS' rows
METIS, NODES_ALONE, OURS = "METIS", "METIS, edges not balanced", "hotness"
Cuts = dict[str, tuple[str, Iterable[str] | None]]
CUTS: Cuts = {METIS: ("metis", None), NODES_ALONE: ("metis", ()), OURS: ("hotness", None)}
# Where training nodes are, and whether rows can be spared there. Neighbors of few nodes are the
# hubs of such a graph: what all seeds draw is the same, and nothing but 1 / P of it can be near.
SPREADS = {"anywhere": True, "in a tenth of the graph": True, "next to some nodes": False}


class Fetched(NamedTuple):
    """Of a batch, rows of other ranks; most training nodes of a rank, as a factor of the mean."""

    needed: float
    fetched: float
    seeds: float


@benchmark("hotness", "mini-batches")
def hotness(options: Options) -> Report:
    """Rows of other ranks that batches need, and fetch past a cache: `hotness` beside METIS.

    R-MAT of 2^16 nodes, a tenth of which train; batches of 128 seeds with 15, 10 and 5 neighbors, a
    cache of a tenth of a rank's rows, 4 and 8 ranks, which are threads.
    """
    figures, rows = [], []
    for spread, spares in SPREADS.items():
        graph = _graph(spread)
        for size in RANKS:
            found = {name: _fetched(graph, size, *cut) for name, cut in CUTS.items()}
            ratio = found[OURS].fetched / found[METIS].fetched
            name = f"{size} ranks, training nodes {spread}: rows over METIS'"
            figures.append(Figure(name, ratio, at_most=AT_MOST if spares else None))
            rows += [[f"{spread}, {size}", name, *one] for name, one in found.items()]
    columns = ["training nodes, ranks", "", "rows needed", "rows fetched", "most seeds"]
    return Report(figures, [Table("A batch", columns, rows)])


def _graph(spread: str) -> GraphArrays:
    from sar.partition.arrays import NTYPE_HOMO
    from sar.partition.sources.generate import rmat_graph

    graph = rmat_graph(SCALE, samples=2_000_000 * 2**SCALE // 2**17, features=WIDTH)
    data = graph.node_data[NTYPE_HOMO]
    mask = torch.from_numpy(_MASKS[spread](graph, np.random.default_rng(0)))
    graph.node_data[NTYPE_HOMO] = {
        "feat": data["feat"], "orig_id": data["orig_id"], "train_mask": mask
    }  # fmt: skip
    return graph


def _anywhere(graph: GraphArrays, rng: np.random.Generator) -> np.ndarray:
    return rng.random(graph.total_nodes) < SHARE


def _in_a_tenth(graph: GraphArrays, rng: np.random.Generator) -> np.ndarray:
    """Some parts of a fine cut."""
    from sar.partition.cut import assign

    pieces = 40
    return np.isin(assign(graph, pieces), rng.permutation(pieces)[: int(SHARE * pieces)])


def _next_to_some(graph: GraphArrays, rng: np.random.Generator) -> np.ndarray:
    """All neighbors of a node, and of another one, until they are enough."""
    ((src, dst),) = (tuple(one.numpy() for one in ends) for ends in graph.edges.values())
    order = np.argsort(dst, kind="stable")
    starts = np.searchsorted(dst[order], np.arange(graph.total_nodes + 1))
    mask = np.zeros(graph.total_nodes, bool)
    for node in rng.permutation(graph.total_nodes):
        mask[src[order[starts[node] : starts[node + 1]]]] = True
        if mask.mean() >= SHARE:
            break
    return mask


_MASKS = dict(zip(SPREADS, (_anywhere, _in_a_tenth, _next_to_some)))


def _fetched(graph: GraphArrays, size: int, method: str, balance: Iterable[str] | None) -> Fetched:
    """What a cut costs, of an epoch's full batches."""
    from sar.comm import ThreadGroup
    from sar.partition.cut import assign
    from sar.partition.write import write_partitions

    parts = assign(graph, size, method, balance=balance)
    with tempfile.TemporaryDirectory() as folder:
        file = write_partitions(graph, parts, Path(folder) / "parts", num_parts=size)
        budget = int(CACHED * graph.total_nodes / size) * WIDTH * 4
        ranks = ThreadGroup.run(size, lambda group: _epoch(group, file, budget))
    batches, needed, had, seeds = (np.array(one) for one in zip(*ranks))
    total = batches.sum()
    return Fetched(needed.sum() / total, (needed - had).sum() / total, seeds.max() / seeds.mean())


def _epoch(group: Group, file: str, budget: int) -> tuple[int, int, int, int]:
    """Of this rank: full batches, rows of others that they need, those cached, training nodes."""
    from sar.partition.arrays import NTYPE_HOMO
    from sar.partition.load import load_partition
    from sar.sampling import NeighborLoader

    data = load_partition(file, group.rank)
    seeds = data.node_features[f"{NTYPE_HOMO}/train_mask"].bool()
    loader = NeighborLoader(
        data, list(FANOUTS), seeds, group=group, batch_size=BATCH, shuffle=True, drop_last=True,
        as_="tensors", fields={NTYPE_HOMO: ["feat"]}, prefetch=0, cache=budget,
    )  # fmt: skip
    for _ in loader:
        pass
    count = int(seeds.sum())
    return count // BATCH, loader.cache.needed, loader.cache.had, count
