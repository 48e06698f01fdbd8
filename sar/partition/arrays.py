"""A whole graph as plain arrays: what every input becomes before it is cut and written."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sar.partition.progress import NOBODY, Counter, Progress, blocks, silent

EType = tuple[str, str, str]  # source type, relation, destination type
NTYPE_HOMO = "_N"
ETYPE_HOMO: EType = ("_N", "_E", "_N")
ORIG_ID, ORIG_EID = "orig_id", "orig_eid"
# What DGL's files can hold; bool is stored as uint8.
STORED_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
_SIGNED = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}


@dataclass
class GraphArrays:
    """One graph, homogeneous or heterogeneous, on the CPU.

    name: used for file names.
    num_nodes: nodes of each type; the order of the keys gives the type ids.
    edges: per canonical edge type `(src, dst)`, int64 [E] each, ids inside their node type; the
        order of the keys gives the type ids. Multi-edges and self loops are allowed.
    node_data: per node type, name -> tensor [N, ...] of one of `STORED_DTYPES`.
    edge_data: per canonical edge type, name -> tensor [E, ...], row i belongs to edge i.

    A homogeneous graph has the one node type "_N" and the one edge type ("_N", "_E", "_N").
    Standard node fields: feat (float), label (int64, -1 where there is none, or a matrix for
    multi-label), train_mask, val_mask, test_mask (bool), orig_id (int64, the row in the input).
    """

    name: str
    num_nodes: dict[str, int]
    edges: dict[EType, tuple[Tensor, Tensor]]
    node_data: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    edge_data: dict[EType, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def total_nodes(self) -> int:
        return sum(self.num_nodes.values())

    @property
    def total_edges(self) -> int:
        return sum(len(src) for src, _ in self.edges.values())

    @property
    def is_homogeneous(self) -> bool:
        return len(self.num_nodes) == 1 and len(self.edges) == 1

    @property
    def nbytes(self) -> int:
        """Of all edges and data."""
        ends = sum(one.nbytes for pair in self.edges.values() for one in pair)
        frames = (*self.node_data.values(), *self.edge_data.values())
        return ends + sum(column.nbytes for columns in frames for column in columns.values())

    def node_offsets(self) -> dict[str, int]:
        """First id of each node type when the types are laid one after another."""
        offsets, start = {}, 0
        for ntype, count in self.num_nodes.items():
            offsets[ntype] = start
            start += count
        return offsets

    def edge_blocks(
        self, counter: Counter = NOBODY
    ) -> Iterator[tuple[EType, int, np.ndarray, np.ndarray]]:
        """(edge type, its first edge of the block, ends of the block's edges), of all edge types;
        edges count when they have been dealt with."""
        for etype, ends in self.edges.items():
            for low, high in blocks(len(ends[0]), counter):
                src, dst = (np.ascontiguousarray(one[low:high].detach().numpy()) for one in ends)
                yield etype, low, src, dst

    def with_orig_ids(self) -> "GraphArrays":
        """Give every node type its `orig_id` (kept where it is already there); returns self."""
        for ntype, count in self.num_nodes.items():
            data = self.node_data.setdefault(ntype, {})
            if ORIG_ID not in data:
                data[ORIG_ID] = torch.arange(count)
        return self

    def validate(self, progress: Progress = silent) -> "GraphArrays":
        """Check types, dtypes, shapes and ids; returns self. Raises ValueError naming the item."""
        counter = Counter(progress, "checking ids", 2 * self.total_edges)
        if not self.num_nodes:
            raise ValueError("num_nodes is empty: a graph needs at least one node type")
        for ntype, count in self.num_nodes.items():
            _check_name("node type", ntype)
            if count < 0:
                raise ValueError(f"num_nodes[{ntype!r}] is {count}, expected 0 or more")
        for etype in self.edges:
            self._check_edges(etype, counter)
        for ntype, data in self.node_data.items():
            if ntype not in self.num_nodes:
                raise ValueError(
                    f"node_data has type {ntype!r}, known types: {list(self.num_nodes)}"
                )
            _check_rows(f"node_data[{ntype!r}]", data, self.num_nodes[ntype])
        for etype, data in self.edge_data.items():
            if etype not in self.edges:
                raise ValueError(f"edge_data has type {etype!r}, known types: {list(self.edges)}")
            _check_rows(f"edge_data[{etype!r}]", data, len(self.edges[etype][0]))
        return self

    def _check_edges(self, etype: EType, counter: Counter) -> None:
        if len(etype) != 3:
            raise ValueError(
                f"edge type {etype!r}: expected (source type, relation, destination type)"
            )
        _check_name("relation", etype[1])
        src, dst = self.edges[etype]
        if src.shape != dst.shape or src.dim() != 1:
            raise ValueError(
                f"edges[{etype!r}] have shapes {tuple(src.shape)} and {tuple(dst.shape)}, "
                "expected two vectors of equal length"
            )
        for side, ids, ntype in (("src", src, etype[0]), ("dst", dst, etype[2])):
            if ntype not in self.num_nodes:
                raise ValueError(f"edges[{etype!r}]: {ntype!r} is not among {list(self.num_nodes)}")
            if ids.dtype != torch.int64:
                raise ValueError(f"edges[{etype!r}] {side} is {ids.dtype}, expected torch.int64")
            low, high = _span(ids, counter)
            if low < 0 or high >= self.num_nodes[ntype]:
                row, found = _first_outside(ids, self.num_nodes[ntype])
                raise ValueError(
                    f"edges[{etype!r}] {side} ids span [{low}, {high}], "
                    f"expected [0, {self.num_nodes[ntype] - 1}] ({ntype!r} nodes); row {row} is "
                    f"{found}"
                )


def storable(values: np.ndarray) -> np.ndarray:
    """As what partitions can hold: in this machine's byte order, and unsigned integers that DGL's
    files do not know as wider signed ones.

    Raises TypeError for what is no such number, OverflowError for integers of 2**63 and more.
    """
    dtype = values.dtype.newbyteorder("=")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise TypeError(f"got {values.dtype}, expected numbers of at most 64 bits")
    if dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise OverflowError(f"got uint64 up to {values.max()}, expected less than 2**63")
    return values.astype(_SIGNED.get(dtype.name, dtype), copy=False)


def _span(ids: Tensor, counter: Counter) -> tuple[int, int]:
    """The smallest and the largest one, 0 and -1 where there are none; in blocks."""
    lows: list[int] = []
    highs: list[int] = []
    for low, high in blocks(len(ids), counter):
        lows.append(int(ids[low:high].min()))
        highs.append(int(ids[low:high].max()))
    return min(lows, default=0), max(highs, default=-1)


def _first_outside(ids: Tensor, count: int) -> tuple[int, int]:
    """Row and value of the first id that is not in [0, ``count``); there is one."""
    for low, high in blocks(len(ids)):
        wrong = ((ids[low:high] < 0) | (ids[low:high] >= count)).nonzero()
        if len(wrong):
            return low + int(wrong[0]), int(ids[low + int(wrong[0])])
    raise ValueError(f"all ids are in [0, {count})")


def _check_name(what: str, name: str) -> None:
    # "/" splits type from feature in the files' keys and ":" splits the parts of an edge type.
    if not name or "/" in name or ":" in name:
        raise ValueError(f"{what} {name!r}: expected a non-empty name without '/' and ':'")


def _check_rows(where: str, data: dict[str, Tensor], rows: int) -> None:
    for name, tensor in data.items():
        if not name or "/" in name:
            raise ValueError(f"{where}: feature name {name!r} is empty or contains '/'")
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise ValueError(
                f"{where}[{name!r}] has shape {tuple(tensor.shape)}, expected {rows} rows"
            )
        if tensor.dtype not in STORED_DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORED_DTYPES)
            raise ValueError(f"{where}[{name!r}] is {tensor.dtype}, expected one of {known}")
