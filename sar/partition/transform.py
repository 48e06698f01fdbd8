"""Changes to a graph's edges before it is cut, in files: both directions, no duplicates, loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sar.partition.arrays import EType, GraphArrays
from sar.partition.buckets import Rows, sort_rows
from sar.partition.column import create_array, map_tensor
from sar.partition.compiled import compiled
from sar.partition.progress import Counter, Progress, blocks, silent
from sar.words import SELF_LOOPS

_MAX_NODES = 2**31 - 1


@dataclass(frozen=True)
class Transforms:
    """What is done to edges.

    Attributes:
        symmetrise: every edge comes in both directions, once. Between two types of nodes the
            other direction is an edge type of its own, ``rev_<relation>``.
        drop_duplicates: of equal edges of a type the first is kept.
        self_loops: of edge types that join a type of nodes with itself: "keep" them as they are,
            "remove" them, or "add" one to each node in the place of those that there are. The data
            of an added loop is 1, as in DGL.
    """

    symmetrise: bool = False
    drop_duplicates: bool = False
    self_loops: str = "keep"

    def __post_init__(self) -> None:
        if self.self_loops not in SELF_LOOPS:
            raise ValueError(
                f"self_loops is {self.self_loops!r}, expected one of {', '.join(SELF_LOOPS)}"
            )


def transform(
    graph: GraphArrays, wanted: Transforms, folder: Path, progress: Progress = silent
) -> GraphArrays:
    """The graph with ``wanted`` done to its edges, which lie in the new ``folder``.

    With ``symmetrise`` and ``drop_duplicates`` edges are ordered by destination, then source; else
    those that are added come last. A turned edge has the data of the one it comes from. Raises
    ``ValueError`` for a relation ``rev_..`` that is there and for 2^31 nodes of a type,
    ``OSError``.
    """
    if wanted == Transforms():
        return graph
    folder.mkdir()
    edges: dict[EType, tuple[Tensor, Tensor]] = {}
    edge_data: dict[EType, dict[str, Tensor]] = {}
    for number, etype in enumerate(graph.edges):
        (own := folder / str(number)).mkdir()
        change = _Change(graph, etype, wanted, own, progress)
        edges[etype], edge_data[etype] = change.sorted() if change.unique else change.appended()
        if wanted.symmetrise and etype[0] != etype[2]:
            other = (etype[2], f"rev_{etype[1]}", etype[0])
            if other in graph.edges:
                raise ValueError(f"symmetrise: {other} is an edge type of the graph already")
            edges[other] = edges[etype][::-1]
            edge_data[other] = edge_data[etype]
    changed = GraphArrays(graph.name, graph.num_nodes, edges, graph.node_data, edge_data)
    return changed.validate(progress)


class _Change:
    """The change of one edge type. Edges are numbered: the given ones, turned ones, loops."""

    def __init__(
        self,
        graph: GraphArrays,
        etype: EType,
        wanted: Transforms,
        folder: Path,
        progress: Progress,
    ) -> None:
        self._src, self._dst = graph.edges[etype]
        self._data = graph.edge_data.get(etype, {})
        self._folder, self._progress = folder, progress
        self._num_nodes = (graph.num_nodes[etype[0]], graph.num_nodes[etype[2]])
        joins_itself = etype[0] == etype[2]
        self._turns = wanted.symmetrise and joins_itself
        self._drops_loops = joins_itself and wanted.self_loops != "keep"
        self._num_loops = self._num_nodes[0] if joins_itself and wanted.self_loops == "add" else 0
        for name, column in self._data.items():
            if column.dtype == torch.bfloat16:
                raise ValueError(f"{etype}: {name!r} is bfloat16, which numpy has not: convert it")
        self.unique = wanted.symmetrise or wanted.drop_duplicates
        if self.unique and max(self._num_nodes) > _MAX_NODES:
            raise ValueError(f"{etype}: {max(self._num_nodes):,} nodes, expected below 2^31")

    def _blocks(self, what: str) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Source, destination and number of edges, in the order of their numbers."""
        count = len(self._src)
        counter = Counter(self._progress, what, count * (1 + self._turns) + self._num_loops)
        for turned in (False, True)[: 1 + self._turns]:
            for low, high in blocks(count, counter):
                ends = [one[low:high].numpy() for one in (self._src, self._dst)]
                src, dst = ends[::-1] if turned else ends
                number = np.arange(low, high) + count * turned
                if self._drops_loops:
                    kept = src != dst
                    src, dst, number = src[kept], dst[kept], number[kept]
                yield src, dst, number
        for low, high in blocks(self._num_loops, counter):
            loops = np.arange(low, high)
            yield loops, loops, loops + 2 * count

    def _pairs(self, what: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for src, dst, _ in self._blocks(what):
            yield dst.astype(np.int32), src.astype(np.int32)

    def appended(self) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
        total = sum(len(src) for src, _, _ in self._blocks("counting edges"))
        paths = [self._folder / f"{name}.npy" for name in ("src", "dst", "number")]
        arrays = [create_array(path, np.int64, (total,)) for path in paths]
        at = 0
        for block in self._blocks("copying edges"):
            for array, values in zip(arrays, block):
                array[at : at + len(values)] = values
            at += len(block[0])
        data = self._pick(arrays[2])
        paths[2].unlink()
        return (map_tensor(paths[0]), map_tensor(paths[1])), data

    def sorted(self) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
        rows = sort_rows(self._pairs, self._num_nodes[1], self._folder, self._progress)
        count = len(rows.values)
        paths = [self._folder / f"{name}.npy" for name in ("src", "dst")]
        src, dst = (create_array(path, np.int64, (count,)) for path in paths)
        counter = Counter(self._progress, "copying edges", self._num_nodes[1])
        for first, last in rows.runs(counter):
            where = slice(*rows.indptr[[first, last]].tolist())
            src[where] = rows.values[where]
            degrees = np.diff(rows.indptr[first : last + 1])
            dst[where] = np.repeat(np.arange(first, last), degrees)
        data = self._pick(self._first_numbers(rows)) if self._data else {}
        for name in ("values", "indptr", "number"):  # the disk's room, as soon as it may be
            (self._folder / f"{name}.npy").unlink(missing_ok=True)
        return (map_tensor(paths[0]), map_tensor(paths[1])), data

    def _first_numbers(self, rows: Rows) -> np.ndarray:
        """int64 [E]: the smallest number, plus 1, of the equal edges that each edge stands for."""
        found = create_array(self._folder / "number.npy", np.int64, (len(rows.values),))
        for src, dst, number in self._blocks("finding edges"):
            _note(*rows, src, dst, number + 1, found)
        return found

    def _pick(self, numbers: np.ndarray) -> dict[str, Tensor]:
        """Data of edges by number (by number plus 1 where edges are unique)."""
        count, data = len(self._src), {}
        total = len(numbers) * len(self._data)
        counter = Counter(self._progress, "copying edge data", total)
        for position, (name, column) in enumerate(self._data.items()):
            path = self._folder / f"data-{position}.npy"
            is_bool = column.dtype == torch.bool
            dtype = column[:0].numpy().dtype
            out = create_array(path, dtype, (len(numbers), *column.shape[1:]))
            for low, high in blocks(len(numbers), counter):
                wanted = numbers[low:high] - self.unique
                loops = wanted >= 2 * count
                rows = column.numpy()[np.where(loops, 0, wanted % max(count, 1))] if count else 0
                out[low:high] = rows
                out[low:high][loops] = True if is_bool else 1
            data[name] = map_tensor(path)
        return data


@compiled
def _note(indptr, values, src, dst, number, found):
    """Set ``found`` of edges that have none yet; edges come in the order of their numbers."""
    for i in range(len(src)):
        low, high = indptr[dst[i]], indptr[dst[i] + 1]
        while low < high:
            middle = (low + high) >> 1
            if values[middle] < src[i]:
                low = middle + 1
            else:
                high = middle
        if found[low] == 0:
            found[low] = number[i]
