"""Graphs that are written in several formats and compared with what is read again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays

NODES, EDGES = 40, 90


def plain(nodes: int = NODES, edges: int = EDGES, seed: int = 0) -> GraphArrays:
    """One type; columns of all kinds; the last quarter of the nodes has no edge."""
    rng = torch.Generator().manual_seed(seed)
    ends = [torch.randint(max(1, 3 * nodes // 4), (edges,), generator=rng) for _ in range(2)]
    node = {
        "feat": torch.rand(nodes, 3, generator=rng),
        "label": torch.arange(nodes) % 5,
        "train_mask": torch.arange(nodes) % 3 == 0,
        "none": torch.zeros(nodes, 0),
        "cube": torch.rand(2, 3, nodes, generator=rng).permute(2, 0, 1),  # not contiguous
        "brief": torch.rand(nodes, 2, generator=rng).bfloat16(),
        "small": torch.arange(nodes).to(torch.int8),
    }
    edge = {
        "weight": torch.rand(edges, generator=rng),
        "feat": torch.rand(edges, 2, generator=rng).double(),
        "on_mask": torch.arange(edges) % 2 == 0,
    }
    graph = GraphArrays(
        "plain", {NTYPE_HOMO: nodes}, {ETYPE_HOMO: (ends[0], ends[1])}, {NTYPE_HOMO: node},
        {ETYPE_HOMO: edge},
    )  # fmt: skip
    return graph.with_orig_ids()


def typed(edges: int = 50, seed: int = 0) -> GraphArrays:
    """Several types, sorted by name, one without nodes and one without columns."""
    rng = torch.Generator().manual_seed(seed)
    sizes = {"author": 9, "empty": 0, "paper": 30}
    etypes = [("author", "wrote", "paper"), ("paper", "by", "author"), ("paper", "cites", "paper")]
    ends = {
        (a, r, b): (
            torch.randint(sizes[a], (edges,), generator=rng),
            torch.randint(sizes[b], (edges,), generator=rng),
        )
        for a, r, b in etypes
    }
    ends["paper", "none", "empty"] = (torch.arange(0), torch.arange(0))
    ends = dict(sorted(ends.items()))
    node: dict = {ntype: {} for ntype in sizes}
    node["paper"] = {"feat": torch.rand(30, 2), "label": torch.arange(30) % 4}
    edge = {etypes[2]: {"weight": torch.rand(edges), "time": torch.arange(edges).flip(0)}}
    return GraphArrays("typed", sizes, ends, node, edge).with_orig_ids()


def bare() -> GraphArrays:
    """Isolated nodes alone."""
    none = torch.arange(0)
    return GraphArrays("bare", {NTYPE_HOMO: 6}, {ETYPE_HOMO: (none, none)}).with_orig_ids()


GRAPHS: dict[str, Callable[[], GraphArrays]] = {"plain": plain, "typed": typed, "bare": bare}


def cut(graph: GraphArrays, num_parts: int) -> np.ndarray:
    """Without order; where there are more than two parts, part 1 is empty."""
    parts = np.arange(graph.total_nodes) * 7 % num_parts
    return np.where(parts == 1, 0, parts) if num_parts > 2 else parts
