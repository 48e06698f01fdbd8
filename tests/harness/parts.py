"""Cutting a graph for a test, once per session, and joining what the ranks return."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.partition.arrays import GraphArrays
from sar.partition.cut import assign
from sar.partition.load import PartitionData, load_partition
from sar.partition.write import write_partitions

METHODS = (
    "coarsen", "balanced", "hotness", "metis", "random", "contiguous", "adversarial"
)  # fmt: skip


@dataclass
class Cutter:
    """Writes partitions below ``folder``; the same graph is cut, and a cut written, once."""

    folder: Path
    _turn: threading.Lock = field(default_factory=threading.Lock)  # ranks may be threads
    _cuts: dict[tuple, np.ndarray] = field(default_factory=dict)

    def __call__(
        self, graph: GraphArrays, num_parts: int, method: str | Sequence[int] = "random"
    ) -> str:
        """Path of the JSON; ``method`` is a name of ``METHODS`` or the part of every node."""
        content = _content(graph)
        with self._turn:
            if isinstance(method, str):
                key = content.digest(), num_parts, method
                if key not in self._cuts:
                    self._cuts[key] = node_parts(graph, num_parts, method)
                parts = self._cuts[key]
            else:
                parts = np.asarray(method, dtype=np.int64)
            content.update(parts.tobytes())
            out = self.folder / f"{graph.name}-{num_parts}-{content.hexdigest()[:16]}"
            found = list(out.glob("*.json"))
            if found:
                return str(found[0])
            return write_partitions(graph, parts, out, num_parts=num_parts)


def _content(graph: GraphArrays) -> Any:
    """Digest of what decides a cut, and of which columns there are."""
    digest = hashlib.sha256(repr(graph.num_nodes).encode())
    for src, dst in graph.edges.values():
        digest.update(src.numpy().tobytes() + dst.numpy().tobytes())
    tables = [*graph.node_data.items(), *graph.edge_data.items()]
    digest.update(repr([(kind, sorted(data)) for kind, data in tables]).encode())
    for data in graph.node_data.values():
        if "train_mask" in data:
            digest.update(data["train_mask"].numpy().tobytes())
    return digest


def node_parts(graph: GraphArrays, num_parts: int, method: str | Sequence[int]) -> np.ndarray:
    """Part of every node, types one after another."""
    if not isinstance(method, str):
        return np.asarray(method, dtype=np.int64)
    if method == "adversarial":
        return _adversarial(graph, num_parts)
    if method == "balanced":
        return assign(graph, num_parts, seed=5, balance=["edges", "halo", "train"])
    return assign(graph, num_parts, method, seed=5)


def _adversarial(graph: GraphArrays, num_parts: int) -> np.ndarray:
    """Neighbouring ids apart, the second part with one node and the last with none."""
    total = graph.total_nodes
    parts = np.arange(total) % max(1, num_parts - 2)
    if num_parts > 2:
        parts[parts >= 1] += 1
        parts[total // 2] = 1
    return np.minimum(parts, max(0, num_parts - 2))


def load_all(json_path: str, num_parts: int) -> list[PartitionData]:
    """Every part, as its rank would load it."""
    return [load_partition(json_path, part) for part in range(num_parts)]


def joined(rows: Iterable[Tensor], orig_ids: Iterable[Tensor], total: int) -> Tensor:
    """The ranks' rows in the order of the original ids; each id must come exactly once."""
    values, ids = torch.cat(list(rows)), torch.cat(list(orig_ids))
    assert len(values) == len(ids) == total, f"{len(values)} rows, {len(ids)} ids, {total} nodes"
    assert torch.equal(ids.sort().values, torch.arange(total)), "an id is missing or came twice"
    result = torch.empty_like(values)
    result[ids] = values
    return result


def global_order(json_path: str, num_parts: int, etype: tuple[str, str, str]) -> tuple:
    """(original src, original dst, original edge ids) of all edges by ascending global edge id."""
    return edge_order(load_all(json_path, num_parts), etype)


def edge_order(parts: list[PartitionData], etype: tuple[str, str, str]) -> tuple:
    """The same of all parts, which are loaded already."""
    srcs, dsts, eids = [], [], []
    for data in parts:
        shard, order = data.edges[etype], torch.argsort(data.edges[etype].eid.long())
        owner = torch.bucketize(
            torch.arange(len(shard.src)), torch.tensor(shard.offsets[1:]), right=True
        )
        src_start = torch.as_tensor(data.book.node_ranges[etype[0]])[:, 0]
        srcs.append((shard.src.long() + src_start[owner])[order])
        dst_start = int(data.book.node_ranges[etype[2]][data.part_id, 0])
        dsts.append((shard.dst.long() + dst_start)[order])
        eids.append(data.edge_features[":".join(etype) + "/orig_eid"])
    return torch.cat(srcs), torch.cat(dsts), torch.cat(eids)


Partitioned = Callable[..., str]
