"""What the partitions of PyG and GraphLearn have in common: edges and owners by original ids."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from sar.errors import PartitionError
from sar.partition.book import HOMOGENEOUS_ETYPE, HOMOGENEOUS_NTYPE, EType
from sar.partition.features import Rows
from sar.partition.mapped import MappedTensor

Columns = dict[str, Rows | Tensor]
_BLOCK = 1 << 20


class StoredEdges(NamedTuple):
    """The edges of a type in the files of a part: int [E] each, by original ids.

    Attributes:
        first: the smallest id that an edge of the type has in the file.
    """

    src: MappedTensor
    dst: MappedTensor
    eid: MappedTensor
    first: int = 0


class Folder(Protocol):
    """Partitions as a format keeps them.

    Attributes:
        kind: a word for the format.
        ntypes, etypes: sorted by name, as DGL does.
        by_destination: whether a part's files hold the edges that end in its nodes, and no others.
    """

    kind: str
    path: str
    num_parts: int
    ntypes: list[str]
    etypes: list[EType]
    by_destination: bool

    def owners(self, ntype: str) -> MappedTensor:
        """int [N]: the part of each node, by original id."""

    def edges(self, etype: EType, part: int) -> StoredEdges:
        """What a part's files hold."""

    def node_features(self, ntype: str, part: int, ids: np.ndarray) -> Columns:
        """By name, the rows of a part's nodes, whose ascending original ids are ``ids``."""

    def edge_features(
        self, etype: EType, part: int, eids: np.ndarray, places: np.ndarray
    ) -> Columns:
        """By name, the rows of a part's edges, whose ascending original ids are ``eids``.

        ``places`` are their positions in the part's files, or in those of all parts one behind the
        other where edges are not kept by destination.
        """


def blocks(count: int) -> Iterator[tuple[int, int]]:
    """``(low, high)`` of runs of rows."""
    for low in range(0, count, _BLOCK):
        yield low, min(low + _BLOCK, count)


def integers(value: Any, where: str, count: int | None = None) -> MappedTensor:
    """``value``, if it is a tensor of integers in one column, of ``count`` rows if given."""
    is_column = isinstance(value, MappedTensor) and len(value.shape) == 1
    if not is_column or value.dtype.is_floating_point or value.dtype.is_complex:
        raise PartitionError(f"{where}: got {value!r:.80}, expected integers in one column")
    if count is not None and len(value) != count:
        raise PartitionError(f"{where}: has {len(value)} rows, expected {count}")
    return value


def check_ids(ids: np.ndarray, total: int, where: str) -> None:
    """Raises ``PartitionError`` for ids outside ``[0, total)``."""
    if ids.size and not 0 <= ids.min() <= ids.max() < total:
        raise PartitionError(
            f"{where}: ids run from {ids.min()} to {ids.max()}, expected 0 to {total - 1}"
        )


def rows_of(value: Any, where: str, count: int) -> MappedTensor:
    """``value``, if it is a tensor of ``count`` rows."""
    if not isinstance(value, MappedTensor) or not value.shape or len(value) != count:
        raise PartitionError(f"{where}: got {value!r:.80}, expected {count} rows")
    return value


def entry(content: Any, key: Any, where: str) -> Any:
    """What a dictionary of a file holds under ``key``."""
    if not isinstance(content, Mapping) or key not in content:
        there = sorted(map(str, content)) if isinstance(content, Mapping) else type(content)
        raise PartitionError(f"{where}: holds {there!s:.200}, expected a dictionary with {key!r}")
    return content[key]


def types_of(meta: Any, is_hetero: bool, path: str) -> tuple[list[str], list[EType]]:
    """Node and edge types that a format's description names, in its order, or the only ones.

    Raises ``PartitionError`` for types that the partitions of a graph cannot have.
    """
    if not is_hetero:
        return [HOMOGENEOUS_NTYPE], [HOMOGENEOUS_ETYPE]
    ntypes = list(entry(meta, "node_types", path) or ())
    etypes = [_triple(one, path) for one in entry(meta, "edge_types", path) or ()]
    for name in (*ntypes, *(one for etype in etypes for one in etype)):
        if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/:\0"):
            raise PartitionError(f"{path}: type {name!r}, expected a name without '/' and ':'")
    if not ntypes or not etypes or len({*ntypes, *etypes}) < len(ntypes) + len(etypes):
        raise PartitionError(f"{path}: types {ntypes} and {etypes}, expected one or more, once")
    for etype in etypes:
        if not {etype[0], etype[2]} <= set(ntypes):
            raise PartitionError(f"{path}: {etype} joins other types than {ntypes}")
    return ntypes, etypes


def _triple(value: Any, path: str) -> EType:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise PartitionError(f"{path}: edge type {value!r}, expected source, relation, destination")
    return value[0], value[1], value[2]


def check_parts(path: str, num_parts: Any, name: str) -> None:
    """Raises ``PartitionError`` for a number that is none, or parts whose folder is missing."""
    if isinstance(num_parts, bool) or not isinstance(num_parts, int) or num_parts < 1:
        raise PartitionError(f"{path}: num_parts is {num_parts!r}, expected a positive integer")
    for part in range(num_parts):
        folder = os.path.join(os.path.dirname(path), f"{name}{part}")
        if not os.path.isdir(folder):
            raise PartitionError(f"{folder}: no such folder, but {path} tells of {num_parts} parts")
