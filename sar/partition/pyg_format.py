"""Partitions that PyG's ``torch_geometric.distributed.Partitioner`` wrote."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from sar.errors import PartitionError
from sar.partition.book import EType
from sar.partition.mapped import MappedTensor
from sar.partition.picked import pick
from sar.partition.saved import read_saved
from sar.partition.stored import (
    Columns,
    StoredEdges,
    blocks,
    check_parts,
    entry,
    integers,
    rows_of,
    types_of,
)

# What the same is called in DGL's partitions.
_NAMES = {"x": "feat", "edge_attr": "feat", "edge_time": "time"}


class PygFolder:
    """A folder with ``META.json``; see :class:`sar.partition.stored.Folder`.

    Edges lie with their destinations. The ids of edges count all types one after another.
    """

    META = "META.json"
    kind = "pyg"
    by_destination = True

    def __init__(self, path: str) -> None:
        self.path, meta_path = path, os.path.join(path, self.META)
        meta = _read_meta(meta_path)
        self.num_parts = entry(meta, "num_parts", meta_path)
        check_parts(meta_path, self.num_parts, "part_")
        self._is_hetero = bool(entry(meta, "is_hetero", meta_path))
        ntypes, self._stored_etypes = types_of(meta, self._is_hetero, meta_path)
        self.ntypes, self.etypes = sorted(ntypes), sorted(self._stored_etypes)
        self._latest: tuple[int, Any] | None = None

    def owners(self, ntype: str) -> MappedTensor:
        """int64 [N]."""
        path = self._map("node_map", ntype)
        return integers(read_saved(path), path)

    def _map(self, name: str, kind: str) -> str:
        inside = os.path.join(name, kind) if self._is_hetero else name
        return os.path.join(self.path, f"{inside}.pt")

    def edges(self, etype: EType, part: int) -> StoredEdges:
        """int64 each."""
        if self._latest is None or self._latest[0] != part:
            self._latest = part, self._read(part, "graph.pt")
        path = self._path(part, "graph.pt")
        own = self._latest[1]
        if self._is_hetero:
            own = entry(own, etype, path)
        src = integers(entry(own, "row", path), f"{path}: row")
        dst, eid = (
            integers(entry(own, name, path), f"{path}: {name}", len(src))
            for name in ("col", "edge_id")
        )
        return StoredEdges(src, dst, eid, self._first_edge(etype))

    def _first_edge(self, etype: EType) -> int:
        before = self._stored_etypes[: self._stored_etypes.index(etype)]
        paths = [self._map("edge_map", "__".join(one)) for one in before]
        return sum(len(integers(read_saved(path), path)) for path in paths)

    def node_features(self, ntype: str, part: int, ids: np.ndarray) -> Columns:
        """``x`` as ``feat``, and ``time``."""
        path, own = self._path(part, "node_feats.pt"), self._read(part, "node_feats.pt")
        if self._is_hetero:
            own = entry(own, ntype, path)
        name = "id" if self._is_hetero else "global_id"
        stored = integers(entry(own, name, path), f"{path}: {name}", len(ids)).ints(0, len(ids))
        order = np.argsort(stored)
        if not np.array_equal(stored[order], ids):
            raise PartitionError(f"{path}: {name}s are not those that node_map gives part {part}")
        found = _features(own, path, order)
        if "time" in own:  # of all nodes, in each part
            total = len(self.owners(ntype))
            found["time"] = pick(integers(own["time"], f"{path}: time", total), ids)
        return found

    def edge_features(
        self, etype: EType, part: int, eids: np.ndarray, places: np.ndarray
    ) -> Columns:
        """``edge_attr`` as ``feat``, and ``edge_time`` as ``time``."""
        path, own = self._path(part, "edge_feats.pt"), self._read(part, "edge_feats.pt")
        if self._is_hetero:
            own = own.get(etype, {})
        found = _features(own, path, places)
        if found:
            where = f"{path}: global_id"
            self._check_order(
                etype, part, integers(entry(own, "global_id", path), where, len(eids))
            )
        if "edge_time" in own:
            times = rows_of(own["edge_time"], f"{path}: edge_time", len(eids))
            found["time"] = pick(times, places)
        return found

    def _check_order(self, etype: EType, part: int, ids: MappedTensor) -> None:
        """Rows of features follow the edges."""
        stored = self.edges(etype, part)
        for low, high in blocks(len(ids)):
            if not np.array_equal(ids.ints(low, high) + stored.first, stored.eid.ints(low, high)):
                raise PartitionError(f"{ids.file.path}: is of other edges than graph.pt beside it")

    def _path(self, part: int, name: str) -> str:
        return os.path.join(self.path, f"part_{part}", name)

    def _read(self, part: int, name: str) -> Any:
        path = self._path(part, name)
        content = read_saved(path)
        if not isinstance(content, dict):
            raise PartitionError(f"{path}: holds {type(content).__name__}, expected a dictionary")
        return content


def _features(own: Any, path: str, order: np.ndarray) -> Columns:
    if not isinstance(own, dict) or not isinstance(own.get("feats", {}), dict):
        raise PartitionError(f"{path}: expected features by name")
    return {
        _NAMES.get(name, name): pick(rows_of(rows, f"{path}: {name}", len(order)), order)
        for name, rows in own.get("feats", {}).items()
        if rows is not None
    }


def _read_meta(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise PartitionError(f"{path}: not the JSON of PyG's Partitioner: {error}") from error
