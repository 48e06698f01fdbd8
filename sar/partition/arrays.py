"""A whole graph as plain arrays: what every input becomes before it is cut and written."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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
# Ids above both are sparse: a graph of mostly missing nodes, if it fits at all.
_DENSE_NODES, _DENSE_PER_END = 1 << 24, 50
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
        """Bytes of all edges and data."""
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
        """``(edge type, first edge, src, dst)`` of each block of edges; counted when dealt with."""
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
        need(self.num_nodes, "num_nodes is empty: a graph needs at least one node type")
        for ntype, count in self.num_nodes.items():
            _check_name("node type", ntype)
            need(count >= 0, f"num_nodes[{ntype!r}] is {count}, expected 0 or more")
        for etype in self.edges:
            self._check_edges(etype, counter)
        sizes = {etype: len(ends[0]) for etype, ends in self.edges.items()}
        _check_columns("node_data", self.node_data, self.num_nodes)
        _check_columns("edge_data", self.edge_data, sizes)
        return self

    def _check_edges(self, etype: EType, counter: Counter) -> None:
        parts = "(source type, relation, destination type)"
        need(len(etype) == 3, f"edge type {etype!r}: expected {parts}")
        _check_name("relation", etype[1])
        src, dst = self.edges[etype]
        need(
            src.shape == dst.shape and src.dim() == 1,
            f"edges[{etype!r}] have shapes {tuple(src.shape)} and {tuple(dst.shape)}, "
            "expected two vectors of equal length",
        )
        for side, ids, ntype in (("src", src, etype[0]), ("dst", dst, etype[2])):
            known = list(self.num_nodes)
            need(ntype in known, f"edges[{etype!r}]: {ntype!r} is not among {known}")
            where, count = f"edges[{etype!r}] {side}", self.num_nodes[ntype]
            need(ids.dtype == torch.int64, f"{where} is {ids.dtype}, expected torch.int64")
            spans = [ids[low:high].aminmax() for low, high in blocks(len(ids), counter)]
            low = min((int(one.min) for one in spans), default=0)
            high = max((int(one.max) for one in spans), default=-1)
            if low < 0 or high >= count:
                row = next(
                    at + int(wrong[0])
                    for at, end in blocks(len(ids))
                    if len(wrong := ((ids[at:end] < 0) | (ids[at:end] >= count)).nonzero())
                )
                raise ValueError(
                    f"{where} ids span [{low}, {high}], expected [0, {count - 1}] ({ntype!r} "
                    f"nodes); row {row} is {int(ids[row])}"
                )


def check_dense(count: int, ends: int, where: str, advice: str) -> None:
    """Refuse a count told by the largest id alone, out of proportion to ``ends``, that of edges'
    ends."""
    if count > max(_DENSE_NODES, _DENSE_PER_END * ends):
        raise ValueError(f"{where}: ids go up to {count - 1} in {ends // 2} edges; {advice}")


def need(is_good: object, text: str) -> None:
    """Raise ``ValueError(text)`` unless ``is_good``."""
    if not is_good:
        raise ValueError(text)


def storable(values: np.ndarray) -> np.ndarray:
    """Values in native byte order; unsigned ones that DGL's files lack as wider signed ones.
    Raises ``TypeError`` for what is no number of up to 64 bits, ``OverflowError`` from 2**63 on."""
    dtype = values.dtype.newbyteorder("=")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise TypeError(f"got {values.dtype}, expected numbers of at most 64 bits")
    if dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise OverflowError(f"got uint64 up to {values.max()}, expected less than 2**63")
    return values.astype(_SIGNED.get(dtype.name, dtype), copy=False)


def as_named(name: str, values: np.ndarray) -> np.ndarray:
    """Cast a column by its name: masks to bool, integer labels [N] to int64. Labels that are floats
    stay: NaN says that a node has none."""
    if name.endswith(("_mask", "_masks")):
        return values.astype(bool)
    if name == "label" and values.ndim == 1 and values.dtype.kind in "biu":
        return values.astype(np.int64)
    return values


def _check_name(what: str, name: str) -> None:
    # "/" splits type from feature in the files' keys and ":" splits the parts of an edge type.
    is_good = name and not {"/", ":"} & set(name)
    need(is_good, f"{what} {name!r}: expected a non-empty name without '/' and ':'")


def _check_columns(
    what: str, data: Mapping[Any, dict[str, Tensor]], rows: Mapping[Any, int]
) -> None:
    for kind, columns in data.items():
        need(kind in rows, f"{what} has type {kind!r}, known types: {list(rows)}")
        for name, tensor in columns.items():
            where = f"{what}[{kind!r}]"
            is_good = name and "/" not in name
            need(is_good, f"{where}: feature name {name!r} is empty or contains '/'")
            shape = tuple(tensor.shape)
            is_good = shape[:1] == (rows[kind],)
            need(is_good, f"{where}[{name!r}] has shape {shape}, expected {rows[kind]} rows")
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORED_DTYPES)
            is_good = tensor.dtype in STORED_DTYPES
            need(is_good, f"{where}[{name!r}] is {tensor.dtype}, expected one of {known}")
