"""Graphs and their partitions, made once and kept in the cache folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # tasks also read graphs with an earlier commit of the package
    from benchmarks.registry import Options
    from sar.partition.arrays import GraphArrays

Cut = tuple[str, int]  # method, and what it balances: "coarsen+edges"; number of partitions


@dataclass(frozen=True)
class Prepared:
    """A whole graph in one file and its cuts.

    Attributes:
        file: what :func:`read_graph` takes.
        parts: the JSON file of the partitions of each cut.
    """

    file: Path
    parts: dict[Cut, Path]


def rmat(options: Options, cuts: Iterable[Cut], scale: int = 17) -> Prepared:
    """R-MAT graph of 2^scale nodes, about 28 directed edges each, 128 features, 16 classes."""
    from sar.partition.sources.generate import rmat_graph

    make = partial(rmat_graph, scale=scale, samples=2_000_000 * 2**scale // 2**17)
    return prepare(options, f"rmat-{scale}", make, cuts)


def community(options: Options, cuts: Iterable[Cut], nodes: int, edges: int) -> Prepared:
    """Community graph with skewed degrees, 100 features, 16 classes."""
    from sar.partition.sources.generate import community_graph

    make = partial(community_graph, nodes=nodes, edges=edges)
    return prepare(options, f"community-{nodes}-{edges}", make, cuts)


def regular(
    options: Options, cuts: Iterable[Cut], nodes: int, edges: int, features: int
) -> Prepared:
    """Edges between random ends, symmetric, and random features and labels: nothing to learn."""
    from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays

    def make() -> GraphArrays:
        rng = torch.Generator().manual_seed(0)
        src, dst = torch.randint(nodes, (2, edges // 2), generator=rng)
        data = {
            "feat": torch.randn(nodes, features, generator=rng),
            "label": torch.randint(16, (nodes,), generator=rng),
            "train_mask": torch.rand(nodes, generator=rng) < 0.1,
        }
        ends = torch.cat([src, dst]), torch.cat([dst, src])
        return GraphArrays(
            "regular", {NTYPE_HOMO: nodes}, {ETYPE_HOMO: ends}, {NTYPE_HOMO: data}, {}
        )

    return Prepared(Path(), partitions(options, f"regular-{nodes}-{edges}", cache(make), cuts))


def near(options: Options, nodes: int, parts: int, dtype: torch.dtype) -> Path:
    """The partitions of communities of 2,048 nodes with 90 % of the edges, 16 edges a node, in both
    directions; random features [nodes, 128] and 16 classes. Communities are not cut."""
    from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays

    def make() -> GraphArrays:
        rng = torch.Generator().manual_seed(0)
        src, far = torch.randint(nodes, (2, nodes * 8), generator=rng)
        is_near = torch.rand(len(src), generator=rng) < 0.9
        dst = torch.where(is_near, src // 2048 * 2048 + far % 2048, far)
        data = {
            "feat": torch.randn(nodes, 128, generator=rng, dtype=dtype),
            "label": torch.randint(16, (nodes,), generator=rng).to(torch.uint8),
        }
        ends = torch.cat([src, dst]), torch.cat([dst, src])
        return GraphArrays("near", {NTYPE_HOMO: nodes}, {ETYPE_HOMO: ends}, {NTYPE_HOMO: data}, {})

    cut, name = ("contiguous", parts), f"near-{nodes}-{str(dtype).partition('.')[2]}"
    return partitions(options, name, make, [cut])[cut]


def prepare(
    options: Options, name: str, make: Callable[[], GraphArrays], cuts: Iterable[Cut]
) -> Prepared:
    """Make a homogeneous graph, cut it and write what the cache does not hold yet."""
    make = cache(make)
    parts = partitions(options, name, make, cuts)
    whole = _folder(options, name) / "graph.pt"
    if not whole.is_file():
        save_graph(make(), whole)
    return Prepared(whole, parts)


def partitions(
    options: Options, name: str, make: Callable[[], GraphArrays], cuts: Iterable[Cut]
) -> dict[Cut, Path]:
    """The JSON file of each cut of a graph, of one type or several; made where missing."""
    from sar.partition.cut import assign
    from sar.partition.write import write_partitions

    folder = _folder(options, name)
    parts = {(method, num): folder / f"{method}-{num}" for method, num in cuts}
    for (method, num), path in parts.items():
        if not list(path.glob("*.json")):
            graph = make()
            folder.mkdir(parents=True, exist_ok=True)
            kind, *balance = method.split("+")
            found = assign(graph, num, kind, seed=0, balance=balance or None)
            write_partitions(graph, found, path, num_parts=num)
    return {cut: next(path.glob("*.json")) for cut, path in parts.items()}


def edges_folder(options: Options, name: str) -> Path:
    """Where the edges of a graph that is only cut are kept."""
    return _folder(options, name) / "edges"


def _folder(options: Options, name: str) -> Path:
    import sar

    return options.cache.resolve() / f"{name}-{sar.__version__}"


def save_graph(graph: GraphArrays, path: Path) -> None:
    """Write a homogeneous graph as one file of tensors, whole or not at all."""
    ((src, dst),) = graph.edges.values()
    (data,) = graph.node_data.values()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".partial")
    torch.save({"src": src, "dst": dst, **data}, unfinished)
    unfinished.replace(path)


def read_graph(path: str | Path) -> dict[str, Tensor]:
    """``src`` and ``dst`` (int64 [E]) and the node fields of a graph that was saved here."""
    return torch.load(path, weights_only=True)
