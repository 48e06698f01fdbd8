"""Graphs on which models are probed: random ones, and stars that tell what travels."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sar.partition.arrays import GraphArrays
from sar.partition.book import EType
from sar.partition.write import write_partitions
from sar.plan.types import Types

ANY, INSIDE, ACROSS = "any", "inside", "across"  # which ends edges have: of two parts
Edges = Mapping[EType, tuple[Tensor, Tensor]]


def random_graph(types: Types, nodes: int, degree: float, ends: str = ANY) -> GraphArrays:
    """About ``nodes`` nodes, of the types that the graph has in their proportions, and ``degree``
    times as many edges: between any nodes, inside the parts of even and odd nodes, or across."""
    generator = torch.Generator().manual_seed(0)
    total = sum(types.nodes.values())
    counts = {n: max(2, 2 * round(nodes * m / total / 2)) for n, m in types.nodes.items()}
    edges = {}
    for etype, share in zip(types.relations, types.edges, strict=True):
        number = round(nodes * degree * share / max(1, sum(types.edges)))
        src, dst = (
            torch.randint(counts[ntype], (number,), generator=generator) for ntype in etype[::2]
        )
        if ends != ANY:
            src = src // 2 * 2 + (dst + int(ends == ACROSS)) % 2
        edges[etype] = src, dst
    return _with_data(types, counts, edges)


def star_graph(types: Types, seed: int) -> GraphArrays:
    """Edges across the parts of even and odd nodes, of each relation from many nodes to a few, and
    from one to a few more. So the number of rows that travel tells their kind and relations: all
    sources; a row and as many sums as nodes that many edges end in; or the nodes that edges end in,
    which are far fewer. Numbers are drawn, as several may be the same."""
    generator, edges = torch.Generator().manual_seed(seed), {}
    some = 4 * (len(types.relations) + 8)
    counts = dict.fromkeys(types.nodes, 48 * some)
    for etype in types.relations:
        extra, hubs, more = torch.randint(2, some, (3,), generator=generator).tolist()
        sources = torch.randperm(24 * some, generator=generator)[: 10 * some + extra]
        src = torch.cat([sources, sources[:1].expand(more)])
        ends = torch.arange(len(sources)) % hubs, torch.arange(hubs, hubs + more)
        dst = torch.cat(ends)
        edges[etype] = torch.cat([2 * src, 2 * src + 1]), torch.cat([2 * dst + 1, 2 * dst])
    return _with_data(types, counts, edges)


def _with_data(types: Types, counts: dict[str, int], edges: Edges) -> GraphArrays:
    generator = torch.Generator().manual_seed(0)
    data: dict[str, dict[str, Tensor]] = {}
    for ntype, width in types.features.items():
        data[ntype] = {"feat": torch.randn(counts[ntype], width, generator=generator)}
    return GraphArrays("probe", counts, dict(edges), data)


def written(graph: GraphArrays, folder: Path, parts: int) -> str:
    """Write partitions, of node i of each type in part i % parts; returns their JSON's path."""
    assignment = torch.cat([torch.arange(count) % parts for count in graph.num_nodes.values()])
    name = tempfile.mkdtemp(dir=folder)
    return write_partitions(graph, assignment, f"{name}/parts", num_parts=parts)
