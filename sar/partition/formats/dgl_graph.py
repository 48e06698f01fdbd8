"""``graph.dgl`` of a part, finished from the ends of its edges.

FORMAT: see :mod:`sar.partition.dgl_format`, which reads it. The ends of edges are written first, as
they come from the stream: sources as new ids of the whole graph, destinations as rows of the part.
When all are there, the sources from other parts (halo nodes) are numbered behind the inner nodes,
by ascending id, and what stands before and behind the ends is written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import torch
import xxhash

from sar.partition.dgl_format import (
    COO_MAGIC,
    CSR_MAGIC,
    FILE_MAGIC,
    HEADER_BYTES,
    HETERO_MAGIC,
    META_MAGIC,
    UNIT_MAGIC,
)
from sar.partition.digest import FileDigest
from sar.partition.formats.layout import COPIED_BYTES, Layout
from sar.partition.formats.loops import (
    WORD,
    count_before,
    list_bits,
    make_local,
    mark_remote,
)
from sar.partition.formats.out_files import OutFiles
from sar.partition.formats.tensor_dict import Array, array_header, named_header, text
from sar.partition.progress import NOBODY, Counter, blocks

_COO, _ALL_FORMATS, _NEW_CODE = 1, 7, 1 << 32
_ID_BYTES = 8
_WORDS = 1 << 14  # of a bitmap, looked at together


def _ids(*values: int) -> bytes:
    return array_header(torch.int64, (len(values),)) + struct.pack(f"<{len(values)}q", *values)


def _metagraph() -> bytes:
    """One relation from one node type to itself."""
    matrix = struct.pack("<Qqq", CSR_MAGIC, 1, 1) + _ids(0, 1) + _ids(0) + _ids(0) + b"\0"
    return struct.pack("<Q", META_MAGIC) + matrix


def _head(num_nodes: int, num_edges: int) -> bytes:
    """All before the rows (sources) of a COO matrix; as long for any graph."""
    start = HEADER_BYTES + 16
    head = struct.pack("<4Q", FILE_MAGIC, 2, 2, 1).ljust(HEADER_BYTES, b"\0")
    head += struct.pack("<QQQ", start, 0, HETERO_MAGIC) + _metagraph()
    head += (
        struct.pack("<QQqq", 1, UNIT_MAGIC, _NEW_CODE | _COO, _NEW_CODE | _ALL_FORMATS)
        + _metagraph()
    )
    return head + struct.pack("<Qqq", COO_MAGIC, num_nodes, num_nodes) + _between(num_edges)


def _between(num_edges: int) -> bytes:
    """What stands before either end."""
    return array_header(torch.int64, (num_edges,))


def _tail() -> bytes:
    names = b"".join(struct.pack("<Q", 1) + text(name) for name in ("_N", "_E"))
    starts = struct.pack("<QQ", 1, HEADER_BYTES + 16)
    return names + struct.pack("<Q", len(starts)) + starts + struct.pack("<Q", len(starts))


class PartGraph:
    """The file of one part.

    Args:
        name: relative, of a file in ``files``.
        is_homogeneous: else nodes and edges are told their types.
    """

    def __init__(
        self, files: OutFiles, name: str, layout: Layout, part: int, is_homogeneous: bool
    ) -> None:
        self.name, self._files, self._layout, self._part = name, files, layout, part
        self._is_homogeneous = is_homogeneous
        self._start, self._stop = layout.node_spans[part].tolist()
        first, last = layout.edge_spans[part].tolist()
        self._edges = first, last
        self._num_edges = last - first
        self._src_at = len(_head(0, 0))
        self._dst_at = self._src_at + _ID_BYTES * self._num_edges + len(_between(0))

    def write_ends(self, row: int, src: np.ndarray, dst: np.ndarray) -> None:
        """Edges from ``row`` on: int64 new ids of sources, rows of destinations in the part."""
        self._files.write(self.name, self._src_at + _ID_BYTES * row, src)
        self._files.write(self.name, self._dst_at + _ID_BYTES * row, dst)

    def finish(self, counter: Counter = NOBODY) -> FileDigest:
        """Number halo nodes, and write the rest of the file, digesting all of it in its order.

        The part's edges count thrice: their sources are read twice.
        """
        halo = _Halo(self._layout.num_nodes)
        for _, ids in self._stored(self._src_at, counter):
            mark_remote(ids, self._start, self._stop, halo.bitmap)
        halo.count()
        num_nodes = self._stop - self._start + halo.size
        out = _Running(self._files, self.name)
        out.add(_head(num_nodes, self._num_edges))
        for _, ids in self._stored(self._src_at, counter):
            make_local(ids, self._start, self._stop, halo.bitmap, halo.before)
            out.add(ids)
        out.add(_between(self._num_edges))
        for _, ids in self._stored(self._dst_at, counter):
            out.digest(ids)
        out.add(array_header(torch.int64, (0,)) + struct.pack("<BB", 0, 0))
        out.add(struct.pack("<Qq", 1, num_nodes))
        self._add_columns(out, num_nodes, self._node_columns(halo))
        self._add_columns(out, self._num_edges, self._edge_columns())
        out.add(_tail())
        return out.seal()

    def _stored(self, start: int, counter: Counter) -> Iterator[tuple[int, np.ndarray]]:
        """Runs of what was written of either end, and where; one array serves all."""
        step = COPIED_BYTES // _ID_BYTES
        room = np.empty(min(step, self._num_edges), np.int64)
        for low, high in blocks(self._num_edges, counter, step):
            ids = room[: high - low]
            self._files.read(self.name, start + _ID_BYTES * low, ids)
            yield low, ids

    def _add_columns(
        self, out: _Running, rows: int, columns: dict[str, tuple[torch.dtype, Iterator[np.ndarray]]]
    ) -> None:
        """One frame of named columns, in the order in which DGL writes them."""
        out.add(struct.pack("<QQ", 1, len(columns)))
        for name, (dtype, runs) in columns.items():
            out.add(named_header(Array(name, dtype, (rows,))))
            for run in runs:
                out.add(run)

    def _node_columns(self, halo: _Halo) -> dict[str, tuple[torch.dtype, Iterator[np.ndarray]]]:
        owners, types = self._owners()
        found = {
            "part_id": (torch.int64, _look_up(self._node_ids(halo), *owners)),
            "inner_node": (torch.uint8, self._is_inner(halo)),
            "_ID": (torch.int64, self._node_ids(halo)),
        }
        if self._is_homogeneous:
            return found
        return {"_TYPE": (torch.int32, _look_up(self._node_ids(halo), *types)), **found}

    def _owners(self) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Ends of ascending ranges of new ids with the part of each, and with its node type."""
        ranges = list(self._layout.node_ranges.values())
        ends = np.stack([one[:, 1] for one in ranges], axis=1)
        types = np.tile(np.arange(len(ranges), dtype=np.int32), self._layout.num_parts)
        parts = np.arange(self._layout.num_parts)
        return (ends[:, -1], parts), (ends.ravel(), types)

    def _node_ids(self, halo: _Halo) -> Iterator[np.ndarray]:
        yield from _counted(self._start, self._stop)
        yield from halo.ids()

    def _is_inner(self, halo: _Halo) -> Iterator[np.ndarray]:
        for value, count in ((1, self._stop - self._start), (0, halo.size)):
            for low, high in blocks(count):
                yield np.full(high - low, value, np.uint8)

    def _edge_columns(self) -> dict[str, tuple[torch.dtype, Iterator[np.ndarray]]]:
        ones = (np.ones(high - low, np.uint8) for low, high in blocks(self._num_edges))
        found = {
            "inner_edge": (torch.uint8, ones),
            "_ID": (torch.int64, _counted(*self._edges)),
        }
        if self._is_homogeneous:
            return found
        ends = np.array([one[self._part, 1] for one in self._layout.edge_ranges.values()], np.int64)
        numbers = np.arange(len(ends), dtype=np.int32)
        return {"_TYPE": (torch.int32, _look_up(_counted(*self._edges), ends, numbers)), **found}


def _counted(start: int, stop: int) -> Iterator[np.ndarray]:
    for low, high in blocks(stop - start):
        yield np.arange(start + low, start + high)


def _look_up(
    runs: Iterator[np.ndarray], ends: np.ndarray, values: np.ndarray
) -> Iterator[np.ndarray]:
    """For ascending ids, the value of the first range that ends after each."""
    for ids in runs:
        cuts = np.searchsorted(ids, ends)  # ids below each end
        yield np.repeat(values, np.diff(cuts, prepend=0))


class _Halo:
    """A set of new ids.

    Attributes:
        bitmap: uint64 [N / 64], a bit for each id.
        before: int64 [N / 64 + 1], ids in the words before each, once they are counted.
        size: how many there are.
    """

    def __init__(self, num_nodes: int) -> None:
        self.bitmap = np.zeros(-(-num_nodes // WORD), np.uint64)
        self.before = np.zeros(len(self.bitmap) + 1, np.int64)

    def count(self) -> None:
        count_before(self.bitmap, self.before)

    @property
    def size(self) -> int:
        return int(self.before[-1])

    def ids(self) -> Iterator[np.ndarray]:
        """int64, ascending, in runs."""
        for low, high in blocks(len(self.bitmap), size=_WORDS):
            found = np.empty(int(self.before[high] - self.before[low]), np.int64)
            list_bits(self.bitmap[low:high], low * WORD, found)
            yield found


class _Running:
    """A file that is written, or read, from its first byte to its last, with its digest."""

    def __init__(self, files: OutFiles, name: str) -> None:
        self._files, self._name = files, name
        self._at, self._found = 0, xxhash.xxh3_128()

    def add(self, data: bytes | np.ndarray) -> None:
        """The next bytes."""
        self._files.write(self._name, self._at, data)
        self.digest(data)

    def digest(self, data: bytes | np.ndarray) -> None:
        """The next bytes, which are there already."""
        view = memoryview(data)  # type: ignore[arg-type]
        if view.nbytes:
            self._found.update(view)
        self._at += view.nbytes

    def seal(self) -> FileDigest:
        return FileDigest(self._at, self._found.hexdigest())
