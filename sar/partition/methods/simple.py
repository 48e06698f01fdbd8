"""Methods that look at no edges."""

from __future__ import annotations

import numpy as np

from sar.partition.arrays import GraphArrays
from sar.partition.methods.base import CutOptions, Method


class Contiguous(Method):
    """Runs of consecutive ids, of equal length for each node type."""

    name = "contiguous"

    def assign(self, graph: GraphArrays, options: CutOptions) -> np.ndarray:
        return equal_shares(graph, options.num_parts, None)


class Random(Method):
    """Each node type is shuffled and dealt out equally."""

    name = "random"

    def assign(self, graph: GraphArrays, options: CutOptions) -> np.ndarray:
        return equal_shares(graph, options.num_parts, np.random.default_rng(options.seed))


def equal_shares(graph: GraphArrays, num_parts: int, rng: np.random.Generator | None) -> np.ndarray:
    """Equal sizes per type, in order of id, or shuffled when there is a generator."""
    parts = []
    for number, count in enumerate(graph.num_nodes.values()):
        part = (np.arange(count, dtype=np.int64) * num_parts // max(count, 1)).astype(np.int32)
        if rng is not None:
            # Rotate, so that the types' spare nodes do not all land in the same parts.
            part = (rng.permutation(part) + number) % num_parts
        parts.append(part)
    return np.concatenate(parts)
