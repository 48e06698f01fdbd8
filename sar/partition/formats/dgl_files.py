"""DGL's files, written without DGL: tensor dictionaries (``*_feat.dgl``) and parts' ``graph.dgl``.

Sizes are known before, so arrays are written in any order. Of a graph the ends of edges come first:
sources as new ids of the whole graph, destinations as rows of the part. Then halo nodes, sources
from other parts, are numbered behind the inner nodes by ascending id, and the rest is written.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from sar.files import OutFiles
from sar.partition.arrays import need
from sar.partition.book import ArrayDigest, FileDigest
from sar.partition.dgl_format import (
    ARRAY_MAGIC,
    COO_MAGIC,
    CSR_MAGIC,
    DTYPES,
    FILE_MAGIC,
    HEADER_BYTES,
    HETERO_MAGIC,
    META_MAGIC,
    TENSORS_MAGIC,
    UNIT_MAGIC,
)
from sar.partition.formats.layout import (
    COPIED_BYTES,
    WORD,
    Layout,
    count_before,
    list_bits,
    make_local,
    mark_remote,
)
from sar.partition.progress import NOBODY, Counter, blocks

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_CPU, _ONE_LANE = 1, 1
_COO, _ALL_FORMATS, _NEW_CODE = 1, 7, 1 << 32
_ID_BYTES = 8
_WORDS = 1 << 14  # of a bitmap, looked at together
Kind = tuple[torch.dtype, tuple[int, ...]]


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _header(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """DGL's header of an array."""
    code, bits = _CODES[dtype]
    nbytes = math.prod(shape) * dtype.itemsize
    layout = f"<QQiiiBBH{len(shape)}qq"
    kind = (len(shape), code, bits, _ONE_LANE)
    return struct.pack(layout, ARRAY_MAGIC, 0, _CPU, 0, *kind, *shape, nbytes)


@dataclass
class _Running:
    """An array that is being written: where its next bytes go, its end, and its digest so far."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int
    end: int
    digest: Any = field(default_factory=xxhash.xxh3_128)


class FeatureFile:
    """One tensor dictionary, whose arrays are appended to in turn. ``arrays``: stored dtype (never
    bool) and shape of all."""

    def __init__(self, files: OutFiles, name: str, arrays: Mapping[str, Kind]) -> None:
        self.name, self._files = name, files
        self._running: dict[str, _Running] = {}
        header, at = struct.pack("<QQQ", TENSORS_MAGIC, len(arrays), len(arrays)), 0
        # In reverse, as DGL's own files have them, as long as they are few.
        for array, (dtype, shape) in reversed(list(arrays.items())):
            header += _text(array) + _header(dtype, shape)
            files.write(name, at, header)
            at += len(header)
            end = at + math.prod(shape) * dtype.itemsize
            self._running[array] = _Running(dtype, shape, at, end)
            at, header = end, b""
        files.write(name, at, header)
        self._size = at + len(header)

    def append(self, array: str, rows: Any) -> None:
        """Append contiguous rows to an array."""
        running, view = self._running[array], memoryview(rows)
        self._files.write(self.name, running.at, view)
        if view.nbytes:
            running.digest.update(view)
        running.at += view.nbytes

    def finish(self) -> FileDigest:
        """The file's digest. Raises ``ValueError`` where rows are missing or too many."""
        arrays = {}
        for name, one in reversed(self._running.items()):
            what = f"{self.name}: {name!r} ends at {one.at}, expected {one.end}"
            need(one.at == one.end, what)
            arrays[name] = ArrayDigest.of(one.dtype, one.shape, one.digest.hexdigest())
        return FileDigest(self._size, arrays=arrays)


def _metagraph() -> bytes:
    ids = b""
    for values in ((0, 1), (0,), (0,)):
        ids += _header(torch.int64, (len(values),)) + struct.pack(f"<{len(values)}q", *values)
    return struct.pack("<QQqq", META_MAGIC, CSR_MAGIC, 1, 1) + ids + b"\0"


def _head(num_nodes: int, num_edges: int) -> bytes:
    """The file up to the rows (sources) of its COO matrix; of the same length for any graph."""
    head = struct.pack("<4Q", FILE_MAGIC, 2, 2, 1).ljust(HEADER_BYTES, b"\0")
    head += struct.pack("<QQQ", HEADER_BYTES + 16, 0, HETERO_MAGIC) + _metagraph()
    codes = _NEW_CODE | _COO, _NEW_CODE | _ALL_FORMATS
    head += struct.pack("<QQqq", 1, UNIT_MAGIC, *codes) + _metagraph()
    matrix = struct.pack("<Qqq", COO_MAGIC, num_nodes, num_nodes)
    return head + matrix + _header(torch.int64, (num_edges,))


def _tail() -> bytes:
    names = b"".join(struct.pack("<Q", 1) + _text(name) for name in ("_N", "_E"))
    starts = struct.pack("<QQ", 1, HEADER_BYTES + 16)
    return names + struct.pack("<Q", len(starts)) + starts + struct.pack("<Q", len(starts))


_Made = Callable[[np.ndarray], np.ndarray]


class PartGraph:
    """The ``graph.dgl`` of one part: ``name`` is relative, in ``files``; types of nodes and edges
    are stored unless it ``is_homogeneous``."""

    def __init__(
        self, files: OutFiles, name: str, layout: Layout, part: int, is_homogeneous: bool
    ) -> None:
        self.name, self._files, self._layout, self._part = name, files, layout, part
        self._is_homogeneous = is_homogeneous
        self._start, self._stop = layout.node_spans[part].tolist()
        self._first, last = layout.edge_spans[part].tolist()
        self._num_edges = last - self._first
        self._between = _header(torch.int64, (self._num_edges,))  # before either end
        self._src_at = len(_head(0, 0))
        self._dst_at = self._src_at + _ID_BYTES * self._num_edges + len(self._between)
        self._at, self._found = 0, xxhash.xxh3_128()

    def write_ends(self, row: int, src: np.ndarray, dst: np.ndarray) -> None:
        """Write edges from ``row`` on: int64 new ids of sources, rows of destinations."""
        self._files.write(self.name, self._src_at + _ID_BYTES * row, src)
        self._files.write(self.name, self._dst_at + _ID_BYTES * row, dst)

    def finish(self, counter: Counter = NOBODY) -> FileDigest:
        """Number halo nodes and write the rest of the file, digesting all of it in its order. The
        part's edges count thrice: their sources are read twice."""
        start, stop = self._start, self._stop
        bitmap = np.zeros(-(-self._layout.num_nodes // WORD), np.uint64)  # a bit for each halo node
        before = np.zeros(len(bitmap) + 1, np.int64)  # bits in the words before each
        for ids in self._stored(self._src_at, counter):
            mark_remote(ids, start, stop, bitmap)
        count_before(bitmap, before)
        num_nodes = stop - start + int(before[-1])
        self._add(_head(num_nodes, self._num_edges))
        for ids in self._stored(self._src_at, counter):
            make_local(ids, start, stop, bitmap, before)
            self._add(ids)
        self._add(self._between)
        for ids in self._stored(self._dst_at, counter):
            self._digest(ids)
        self._add(_header(torch.int64, (0,)) + struct.pack("<BB", 0, 0))
        self._add(struct.pack("<Qq", 1, num_nodes))

        def node_ids() -> Iterator[np.ndarray]:
            yield from _counted(start, stop)
            for low, high in blocks(len(bitmap), size=_WORDS):
                found = np.empty(int(before[high] - before[low]), np.int64)
                list_bits(bitmap[low:high], low * WORD, found)
                yield found

        self._add_frame(num_nodes, node_ids, self._node_columns())
        edge_ids = self._first, self._first + self._num_edges
        self._add_frame(self._num_edges, lambda: _counted(*edge_ids), self._edge_columns())
        self._add(_tail())
        return FileDigest(self._at, self._found.hexdigest())

    def _add(self, data: bytes | np.ndarray) -> None:
        self._files.write(self.name, self._at, data)
        self._digest(data)

    def _digest(self, data: bytes | np.ndarray) -> None:
        """Digest the next bytes, which are in the file already."""
        view = memoryview(data)  # type: ignore[arg-type]
        if view.nbytes:
            self._found.update(view)
        self._at += view.nbytes

    def _stored(self, start: int, counter: Counter) -> Iterator[np.ndarray]:
        """Runs of the ends written ``start`` bytes into the file; one array serves all."""
        step = COPIED_BYTES // _ID_BYTES
        room = np.empty(min(step, self._num_edges), np.int64)
        for low, high in blocks(self._num_edges, counter, step):
            self._files.read(self.name, start + _ID_BYTES * low, room[: high - low])
            yield room[: high - low]

    def _add_frame(
        self,
        rows: int,
        ids: Callable[[], Iterator[np.ndarray]],
        columns: dict[str, tuple[torch.dtype, _Made]],
    ) -> None:
        """Write named columns made of the rows' ids, in the order in which DGL writes them."""
        if self._is_homogeneous:
            columns.pop("_TYPE")
        columns["_ID"] = torch.int64, lambda ids: ids
        self._add(struct.pack("<QQ", 1, len(columns)))
        for name, (dtype, made) in columns.items():
            self._add(_text(name) + _header(dtype, (rows,)))
            for run in ids():
                self._add(made(run))

    def _node_columns(self) -> dict[str, tuple[torch.dtype, _Made]]:
        ends = np.stack([one[:, 1] for one in self._layout.node_ranges.values()], axis=1)
        types = np.tile(np.arange(ends.shape[1], dtype=np.int32), len(ends))
        start, stop, parts = self._start, self._stop, np.arange(len(ends))
        return {
            "_TYPE": (torch.int32, lambda ids: _look_up(ids, ends.ravel(), types)),
            "part_id": (torch.int64, lambda ids: _look_up(ids, ends[:, -1], parts)),
            "inner_node": (
                torch.uint8, lambda ids: ((start <= ids) & (ids < stop)).astype(np.uint8)
            ),
        }  # fmt: skip

    def _edge_columns(self) -> dict[str, tuple[torch.dtype, _Made]]:
        ends = np.array([one[self._part, 1] for one in self._layout.edge_ranges.values()], np.int64)
        types = np.arange(len(ends), dtype=np.int32)
        return {
            "_TYPE": (torch.int32, lambda ids: _look_up(ids, ends, types)),
            "inner_edge": (torch.uint8, lambda ids: np.ones(len(ids), np.uint8)),
        }


def _counted(start: int, stop: int) -> Iterator[np.ndarray]:
    for low, high in blocks(stop - start):
        yield np.arange(start + low, start + high)


def _look_up(ids: np.ndarray, ends: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Of ascending ids, the value of the first of the ascending ranges that ends after it."""
    return np.repeat(values, np.diff(np.searchsorted(ids, ends), prepend=0))
