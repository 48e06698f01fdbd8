"""Reader of DGL's binary layouts: tensor dictionaries (``*_feat.dgl``) and ``graph.dgl``.

Files are mapped; rows are copied when asked for. All integers are little-endian. Files may come
from anywhere: each count is compared with the bytes that are left before it is used, and every
problem is a PartitionError that names the file.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sar.partition.column import MappedColumn, MappedFile, check

TENSORS_MAGIC = 0xDD5A9FBE3FA2443F
ARRAY_MAGIC = 0xDD5E40F096B4A13F
FILE_MAGIC = 0xDD2E4FF046B4A13F
HETERO_MAGIC = 0xDD589FBE35224ABF
META_MAGIC = 0xDD3C5FFE20046ABF
UNIT_MAGIC = 0xDD2E60F0F6B4A127
CSR_MAGIC = 0xDD6CD31205DFF127
COO_MAGIC = 0xDD61FFD305DFF127

HEADER_BYTES = 4096
MAX_DIMS = 32
MAX_TEXT = 1 << 16

# (type code, bits) -> torch dtype; codes: 0 signed, 1 unsigned, 2 float, 4 bfloat16
DTYPES = {
    (0, 8): torch.int8, (0, 16): torch.int16, (0, 32): torch.int32, (0, 64): torch.int64,
    (1, 8): torch.uint8, (1, 16): torch.uint16, (1, 32): torch.uint32, (1, 64): torch.uint64,
    (2, 16): torch.float16, (2, 32): torch.float32, (2, 64): torch.float64,
    (4, 16): torch.bfloat16,
}  # fmt: skip


class _Cursor:
    """Reads fields in turn, each checked against the bytes that are left in the file."""

    def __init__(self, file: MappedFile):
        self.file, self.at = file, 0

    def need(self, is_good: object, problem: str) -> None:
        check(is_good, f"{self.file.path}: at byte {self.at}: {problem}")

    def _claim(self, count: int, what: str) -> int:
        left = self.file.size - self.at
        problem = f"{what} needs {count} bytes but {left} are left"
        self.need(count <= left, f"{problem}: the file is truncated or not from DGL")
        self.at += count
        return self.at - count

    def unpack(self, layout: str, what: str) -> tuple:
        layout = "<" + layout
        return struct.unpack_from(layout, self.file.map, self._claim(struct.calcsize(layout), what))

    def integer(self, what: str, layout: str = "Q") -> int:
        return self.unpack(layout, what)[0]

    def magic(self, expected: int, what: str) -> None:
        found = self.integer(f"the magic number of {what}")
        problem = f"found {found:#x}, expected {expected:#x}, the magic number of {what}"
        self.need(found == expected, problem)

    def length(self, what: str, item_bytes: int) -> int:
        """A count of items that take at least ``item_bytes`` each."""
        count = self.integer(f"the number of {what}")
        left = self.file.size - self.at
        problem = f"{count} {what} of at least {item_bytes} bytes announced"
        self.need(count * item_bytes <= left, f"{problem}, but {left} bytes are left")
        return count

    def single(self, what: str, item_bytes: int) -> None:
        """A count of items that has to be 1."""
        is_good = self.length(what, item_bytes) == 1
        self.need(is_good, f"the graph has several {what}, expected one homogeneous graph")

    def text(self, what: str) -> str:
        count = self.length(f"characters of {what}", 1)
        problem = f"{what} has {count} characters, expected at most {MAX_TEXT}"
        self.need(count <= MAX_TEXT, problem)
        start = self._claim(count, what)
        try:
            return self.file.map[start : start + count].decode("utf-8")
        except UnicodeDecodeError:
            self.need(False, f"{what} is not UTF-8 text")
            raise

    def array(self, what: str) -> MappedColumn:
        """An NDArray: its header is parsed and checked, its payload stays in the file."""
        self.magic(ARRAY_MAGIC, f"the array {what}")
        *place, ndim, code, bits, lanes = self.unpack("QiiiBBH", f"the header of {what}")
        # Nothing, the CPU, its number: in each file that DGL writes.
        is_good = place == [0, 1, 0]
        self.need(is_good, f"{what} is an array of the device {place}, expected [0, 1, 0]")
        is_good = 0 <= ndim <= MAX_DIMS
        self.need(is_good, f"{what} has {ndim} dimensions, expected 0 to {MAX_DIMS}")
        kind = f"type code {code}, {bits} bits and {lanes} lanes"
        is_good = (code, bits) in DTYPES and lanes == 1
        self.need(is_good, f"{what} has {kind}, expected int, uint, float or bfloat16 of one lane")
        dtype = DTYPES[code, bits]
        shape = self.unpack(f"{ndim}q", f"the shape of {what}")
        nbytes = self.integer(f"the byte count of {what}", "q")
        is_good = min(shape, default=0) >= 0
        self.need(is_good, f"{what} has shape {shape}, expected no negative size")
        expected = math.prod(shape, start=dtype.itemsize)
        bound = math.prod((max(size, 1) for size in shape), start=dtype.itemsize)
        is_good = bound < 2**62 and nbytes == expected
        self.need(is_good, f"{what} has shape {shape} and {nbytes} bytes, expected {expected}")
        return MappedColumn(self.file, self._claim(nbytes, what), dtype, tuple(shape))

    def named_arrays(self, what: str) -> dict[str, MappedColumn]:
        found: dict[str, MappedColumn] = {}
        for _ in range(self.length(what, 48)):
            name = self.text(f"a name in {what}")
            self.need(name not in found, f"{what} holds {name!r} twice")
            found[name] = self.array(repr(name))
        return found

    def index_arrays(self, names: Sequence[str], of: str) -> list[MappedColumn]:
        arrays = []
        for what in (f"{name} of {of}" for name in names):
            found = self.array(what)
            is_good = len(found.shape) == 1 and found.dtype in (torch.int32, torch.int64)
            problem = f"{what} is {found.dtype} of shape {found.shape}"
            self.need(is_good, f"{problem}, expected one dimension of int32 or int64")
            arrays.append(found)
        return arrays


def read_tensor_dict(path: str | os.PathLike) -> dict[str, MappedColumn]:
    """Tensors of a DGL tensor dictionary by name, mapped. Raises PartitionError."""
    cursor = _Cursor(MappedFile(path))
    cursor.magic(TENSORS_MAGIC, "a DGL tensor dictionary")
    count = cursor.integer("the number of tensors")
    tensors = cursor.named_arrays("tensors")
    cursor.need(len(tensors) == count, f"holds {len(tensors)} tensors but announces {count}")
    return tensors


@dataclass
class Adjacency:
    """One stored sparse matrix. COO: ``major`` is the row (source) of each edge. CSR and CSC:
    ``major`` is the index pointer ``[num_nodes + 1]`` over sources or destinations. ``minor`` is
    the other end of each edge and ``edge_ids`` (may be empty: position) the local edge id."""

    layout: str
    major: MappedColumn
    minor: MappedColumn
    edge_ids: MappedColumn


@dataclass
class GraphFile:
    """The graph of one part as stored: homogeneous, inner and halo nodes and edges together."""

    file: MappedFile
    num_nodes: int
    num_edges: int
    adjacency: Adjacency
    node_data: dict[str, MappedColumn] = field(default_factory=dict)
    edge_data: dict[str, MappedColumn] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.file.path

    def edge_chunks(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """All edges as int64 ``(src, dst, edge id)`` arrays of at most ``size`` rows, in stored
        order. Ends and edge ids are checked to be in range, index pointers to be monotone."""
        adjacency = self.adjacency
        for start in range(0, self.num_edges, size):
            stop = min(start + size, self.num_edges)
            minor = self._in_range(adjacency.minor.ints(start, stop), self.num_nodes, "node")
            if len(adjacency.edge_ids):
                ids = adjacency.edge_ids.ints(start, stop)
                self._in_range(ids, self.num_edges, "edge")
            else:
                ids = np.arange(start, stop)
            if adjacency.layout == "coo":
                major = self._in_range(adjacency.major.ints(start, stop), self.num_nodes, "node")
            else:
                major = self._expand(start, stop)
            src, dst = (minor, major) if adjacency.layout == "csc" else (major, minor)
            yield src, dst, ids

    def _in_range(self, ids: np.ndarray, bound: int, what: str) -> np.ndarray:
        low, high = (ids.min(), ids.max()) if ids.size else (0, -1)
        problem = f"{self.path}: {what} ids run from {low} to {high}"
        check(low >= 0 and high < bound, f"{problem}, expected 0 to {bound - 1}")
        return ids

    def check_pointers(self, size: int) -> None:
        """Index pointers start at 0, never fall and end at the number of edges."""
        if self.adjacency.layout == "coo":
            return
        last = 0
        pointers = self.adjacency.major
        for start in range(0, len(pointers), size):
            values = pointers.ints(start, min(start + size, len(pointers)))
            falls = values[0] < last or (values[1:] < values[:-1]).any()
            is_good = not falls and (start > 0 or values[0] == 0)
            problem = f"{self.path}: index pointers near row {start} fall or do not start at 0"
            check(is_good, f"{problem}, expected them to rise from 0")
            last = int(values[-1])
        problem = f"{self.path}: index pointers end at {last}"
        check(last == self.num_edges, f"{problem}, expected {self.num_edges} edges")

    def _expand(self, start: int, stop: int) -> np.ndarray:
        """Row of each stored edge ``[start, stop)`` of a CSR or CSC matrix (pointers checked)."""
        first, last = self._row_of(start), self._row_of(stop - 1)
        pointers = self.adjacency.major.ints(first, last + 2)
        sizes = np.diff(np.clip(pointers, start, stop))
        is_good = sizes.min() >= 0 and sizes.sum() == stop - start  # as when they were checked
        check(is_good, f"{self.path}: was changed while it was read")
        return np.repeat(np.arange(first, last + 1), sizes)

    def _row_of(self, position: int) -> int:
        """The row that holds an edge position: binary search in the mapped pointers."""
        low, high = 0, self.num_nodes
        while low < high - 1:
            middle = (low + high) // 2
            if int(self.adjacency.major.ints(middle, middle + 1)[0]) <= position:
                low = middle
            else:
                high = middle
        return low


def read_graph(path: str | os.PathLike) -> GraphFile:
    """The one homogeneous graph of a ``graph.dgl`` file, mapped; edges are checked as they are
    streamed, after `GraphFile.check_pointers`. Raises PartitionError."""
    cursor = _Cursor(MappedFile(path))
    cursor.magic(FILE_MAGIC, "a DGL graph file")
    version, kind, count = cursor.unpack("3Q", "the file header")
    problem = f"version {version}, graph type {kind}: expected version 2, type 2"
    is_good = (version, kind) == (2, 2)
    cursor.need(is_good, f"{problem} (files of DGL before 0.5 must be written again)")
    cursor.need(count == 1, f"holds {count} graphs, expected 1")
    cursor.at = HEADER_BYTES
    start = cursor.integer("the position of the graph")
    is_good = HEADER_BYTES + 16 <= start <= cursor.file.size
    cursor.need(is_good, f"the graph should start at byte {start}, outside the file")
    cursor.at = start
    cursor.magic(HETERO_MAGIC, "a graph")
    _read_metagraph(cursor)
    cursor.single("relations", 24)
    adjacency, size, num_edges = _read_unit_graph(cursor)
    cursor.single("node types", 8)
    num_nodes = cursor.integer("the number of nodes", "q")
    problem = f"the graph has {num_nodes} nodes but its matrix has {size} rows"
    cursor.need(num_nodes == size, problem)
    frames = []
    for what, rows in (("node data", num_nodes), ("edge data", num_edges)):
        cursor.single(f"frames of {what}", 8)
        data = cursor.named_arrays(what)
        for name, tensor in data.items():
            problem = f"{what} {name!r} has shape {tensor.shape}, expected {rows} rows"
            cursor.need(tensor.shape[:1] == (rows,), problem)
        frames.append(data)
    return GraphFile(cursor.file, num_nodes, num_edges, adjacency, *frames)


def _read_metagraph(cursor: _Cursor) -> None:
    cursor.magic(META_MAGIC, "a metagraph")
    _read_matrix(cursor, "csr", "the metagraph")


def _read_matrix(cursor: _Cursor, layout: str, what: str) -> tuple[int, int, list[MappedColumn]]:
    """Rows, columns, and the arrays: pointers and indices, or COO rows and columns; edge ids."""
    is_coo = layout == "coo"
    magic, names = CSR_MAGIC, ("pointers", "indices", "ids")
    if is_coo:
        magic, names = COO_MAGIC, ("rows", "columns", "ids")
    cursor.magic(magic, f"{what}, which is {layout.upper()}")
    columns, rows = cursor.unpack("2q", f"the size of {what}")
    arrays = cursor.index_arrays(names, what)
    cursor.unpack("2B" if is_coo else "B", f"the sorted flags of {what}")
    major, minor, ids = map(len, arrays)
    wanted = minor if is_coo else rows + 1
    problem = f"{what} has {rows} rows, {major} {names[0]}, {minor} {names[1]} and {ids} edge ids"
    is_good = major == wanted and ids in (0, minor)
    expected = f"expected {wanted} {names[0]} and as many ids as {names[1]}, or none"
    cursor.need(is_good, f"{problem}, {expected}")
    return rows, columns, arrays


def _read_unit_graph(cursor: _Cursor) -> tuple[Adjacency, int, int]:
    """``(adjacency, number of nodes, number of edges)``; the first stored layout is kept."""
    cursor.magic(UNIT_MAGIC, "a relation")
    code, _ = cursor.unpack("2q", "the matrix formats")
    layouts = [{1: "coo", 2: "csr", 3: "csc"}.get(code, "")]  # in early files
    if code >> 32 == 1:
        layouts = [name for bit, name in ((1, "coo"), (2, "csr"), (4, "csc")) if code & bit]
    is_good = layouts and layouts[0] and code & 0xFFFFFFFF <= 7
    cursor.need(is_good, f"matrix format {code:#x}, expected COO, CSR or CSC")
    kept: list[tuple[Adjacency, int, int]] = []
    for layout in layouts:
        _read_metagraph(cursor)
        name = f"the {layout.upper()} matrix"
        rows, columns, arrays = _read_matrix(cursor, layout, name)
        is_good = rows == columns and rows >= 0
        cursor.need(is_good, f"the matrix is {rows} x {columns}, expected a square one")
        kept.append((Adjacency(layout, *arrays), rows, len(arrays[1])))
        size, num_edges = kept[0][1:]
        problem = f"{name} has {rows} nodes and {len(arrays[1])} edges"
        is_good = (size, num_edges) == (rows, len(arrays[1]))
        cursor.need(is_good, f"{problem}, the first has {size} and {num_edges}")
    return kept[0]
