"""Partitions that GraphLearn-for-PyTorch wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.errors import PartitionError
from sar.partition.book import EType
from sar.partition.mapped import MappedTensor
from sar.partition.picked import PickedRows
from sar.partition.saved import read_pickles, read_saved, read_values
from sar.partition.stored import (
    Columns,
    StoredEdges,
    check_parts,
    entry,
    integers,
    rows_of,
    types_of,
)


class GltFolder:
    """A folder with ``META``; see :class:`sar.partition.stored.Folder`.

    Edges lie with their sources or their destinations, which the files do not tell, so that each
    part reads them all. Features come in pickles, from which they are read into memory.
    """

    META = "META"
    kind = "glt"
    by_destination = False

    def __init__(self, path: str) -> None:
        self.path, meta_path = path, os.path.join(path, self.META)
        meta = read_values(meta_path)
        self.num_parts = entry(meta, "num_parts", meta_path)
        check_parts(meta_path, self.num_parts, "part")
        self._is_hetero = entry(meta, "data_cls", meta_path) == "hetero"
        ntypes, etypes = types_of(meta, self._is_hetero, meta_path)
        self.ntypes, self.etypes = sorted(ntypes), sorted(etypes)

    def owners(self, ntype: str) -> MappedTensor:
        """int64 [N]."""
        path = self._below("node_pb", ntype) + ".pt"
        return integers(read_saved(path), path)

    def _below(self, folder: str, kind: str) -> str:
        inside = os.path.join(folder, kind) if self._is_hetero else folder
        return os.path.join(self.path, inside)

    def _of_part(self, part: int, folder: str, kind: str, name: str) -> str:
        return os.path.join(self._below(os.path.join(f"part{part}", folder), kind), name)

    def edges(self, etype: EType, part: int) -> StoredEdges:
        """int64 each."""
        if not os.path.isdir(os.path.join(self.path, f"part{part}", "graph")):
            raise PartitionError(
                f"{self.path}: part{part} has no folder 'graph'; a graph that was partitioned with "
                "graph_caching=True must be partitioned again without"
            )
        paths = [
            self._of_part(part, "graph", "__".join(etype), f"{name}s.pt")
            for name in ("row", "col", "eid")
        ]
        src = integers(read_saved(paths[0]), paths[0])
        dst, eid = (integers(read_saved(path), path, len(src)) for path in paths[1:])
        return StoredEdges(src, dst, eid)

    def node_features(self, ntype: str, part: int, ids: np.ndarray) -> Columns:
        """The only feature, as ``feat``."""
        return self._features("node_feat", ntype, part, ids)

    def edge_features(
        self, etype: EType, part: int, eids: np.ndarray, places: np.ndarray
    ) -> Columns:
        """The only feature, as ``feat``, and weights, as ``weight``."""
        kind = "__".join(etype)
        found = self._features("edge_feat", kind, part, eids)
        paths = [self._of_part(one, "graph", kind, "weights.pt") for one in range(self.num_parts)]
        if any(map(os.path.isfile, paths)):
            found["weight"] = PickedRows(self._weights(paths, etype), places)
        return found

    def _weights(self, paths: Sequence[str], etype: EType) -> list[MappedTensor]:
        columns = [
            rows_of(read_saved(path), path, len(self.edges(etype, part).dst))
            for part, path in enumerate(paths)
        ]
        if len({(one.dtype, one.shape[1:]) for one in columns}) > 1:
            raise PartitionError(f"{paths[0]}: weights of other parts have another dtype or shape")
        return columns

    def _features(self, folder: str, kind: str, part: int, ids: np.ndarray) -> Columns:
        """Rows of ``ids``, from the part's own files and, if some are not there, all others."""
        parts = [part, *(one for one in range(self.num_parts) if one != part)]
        paths = [self._of_part(one, folder, kind, "") for one in parts]
        there = [path for path in paths if os.path.isfile(os.path.join(path, "feats.pkl"))]
        if not there:
            return {}
        table = _Table(ids)
        for path in there:
            table.add(path)
            if table.is_whole:
                break
        return {"feat": table.rows(there[0])}


class _Table:
    """Rows of features, as they are found."""

    def __init__(self, ids: np.ndarray) -> None:
        self._ids, self._seen = ids, np.zeros(len(ids), bool)
        self._rows: Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all rows, or where none are wanted their shape, are known."""
        return self._rows is not None and bool(self._seen.all())

    def add(self, folder: str) -> None:
        """The rows in a folder's ``feats.pkl`` whose ids in ``ids.pkl`` are wanted."""
        for ids, rows in _pairs(folder):
            if self._rows is None:
                self._rows = rows.new_empty((len(self._ids), *rows.shape[1:]))
            if (rows.dtype, rows.shape[1:]) != (self._rows.dtype, self._rows.shape[1:]):
                raise PartitionError(f"{folder}feats.pkl: holds rows of several shapes or dtypes")
            where = np.searchsorted(self._ids, ids)
            known = where < len(self._ids)
            known[known] = self._ids[where[known]] == ids[known]
            mine = where[known]
            if self._seen[mine].any() or len(np.unique(mine)) < len(mine):
                raise PartitionError(
                    f"{folder}ids.pkl: an id is there twice; a folder must be partitioned into once"
                )
            self._seen[mine] = True
            self._rows[torch.from_numpy(mine)] = rows[torch.from_numpy(known)]

    def rows(self, folder: str) -> Tensor:
        """All of them."""
        if self._rows is None or not self._seen.all():
            missing = self._ids[~self._seen]
            raise PartitionError(f"{folder}feats.pkl: has no rows for ids {missing[:3].tolist()}")
        return self._rows


def _pairs(folder: str) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Ids and rows, run after run, as they were appended."""
    names = [f"{folder}{name}.pkl" for name in ("ids", "feats")]
    ids, feats = map(read_pickles, names)
    for known in ids:
        rows = _run(known, next(feats, None), names)
        yield known.long().numpy(), rows
    if next(feats, None) is not None:
        raise PartitionError(f"{names[1]}: holds more rows than {names[0]} has ids")


def _run(ids: Any, rows: Any, names: list[str]) -> Tensor:
    is_column = isinstance(ids, Tensor) and ids.dim() == 1 and not ids.is_floating_point()
    if not is_column:
        raise PartitionError(f"{names[0]}: holds {type(ids).__name__}, expected columns of ids")
    if not isinstance(rows, Tensor) or not rows.dim() or len(rows) != len(ids):
        raise PartitionError(f"{names[1]}: got {rows!r:.80}, expected {len(ids)} rows")
    return rows.detach()
