"""Writes a graph that has been cut as PyG's ``torch_geometric.distributed.Partitioner`` does.

Ids are those of the graph, so ``orig_id`` and ``orig_eid`` are not written: who reads the folder
takes its ids for them. Nodes' ``feat`` is called ``x`` there, edges' ``feat`` and ``time`` are
``edge_attr`` and ``edge_time``. The other columns of edges go beside them, by their names.

The layout has no place for labels, masks and other columns of nodes: they are written beside it,
into ``node_data.npz``, by the ids of the graph (``label``, or ``label/author`` where there are
several types). PyG does not read that file; :mod:`sar.partition.foreign` does.

PyG's own reader fails for a part that owns no node, or whose edges of a type with features are
none, whoever wrote it; this library's reads it.

``torch.save`` takes whole tensors, so one part at a time is in memory: about 50 bytes for each of
its edges, and its features. What is as large as all edges lies in a scratch folder.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.files import OutFiles
from sar.partition.arrays import (
    ETYPE_HOMO,
    NTYPE_HOMO,
    ORIG_EID,
    ORIG_ID,
    EType,
    GraphArrays,
)
from sar.partition.column import create_array
from sar.partition.formats.layout import order_by_part, parts_by_type
from sar.partition.progress import Counter, Progress, blocks, silent
from sar.partition.sources.npz import CSR, NODE_DATA

_NODES, _EDGES = {"feat": "x"}, {"feat": "edge_attr"}


def write_pyg(
    graph: GraphArrays,
    parts: np.ndarray,
    num_parts: int,
    files: OutFiles,
    scratch: Path,
    progress: Progress = silent,
) -> None:
    """``META.json``, the tables of nodes and edges, the folders of the parts, and what is beside.

    Args:
        graph: valid; parts: int [N] below ``num_parts``, types one after another.
        scratch: a folder for 32 bytes for each edge.

    Raises ``OSError`` that names a file, and ``ValueError`` for types that the format cannot hold.
    """
    _check_types(graph)
    writer = _Writer(graph, parts, num_parts, files, scratch)
    writer.write_nodes()
    writer.write_edges(progress)
    writer.write_parts(progress)
    writer.write_beside()
    with files.placed("META.json") as path:
        path.write_text(json.dumps(writer.description()))


def _check_types(graph: GraphArrays) -> None:
    names = [*graph.num_nodes, *(one for etype in graph.edges for one in etype)]
    for name in names:
        if name in (".", "..") or "\0" in name:
            raise ValueError(f"type {name!r}: PyG's partitions need types that can name files")
    if len({"__".join(etype) for etype in graph.edges}) < len(graph.edges) or not graph.edges:
        raise ValueError(
            f"edge types {list(graph.edges)}: PyG's partitions need one or more, whose names "
            "joined by '__' differ"
        )


class _Writer:
    """One graph on its way into the files of all parts."""

    def __init__(
        self,
        graph: GraphArrays,
        parts: np.ndarray,
        num_parts: int,
        files: OutFiles,
        scratch: Path,
    ) -> None:
        self._graph, self._num_parts = graph, num_parts
        self._files, self._scratch = files, scratch / "edges"
        self._scratch.mkdir()
        self._starts = graph.node_offsets()
        self._part_of = parts_by_type(graph, parts, num_parts)
        homogeneous = list(graph.num_nodes) == [NTYPE_HOMO] and list(graph.edges) == [ETYPE_HOMO]
        self._is_hetero = not homogeneous

    def description(self) -> dict[str, Any]:
        """Of ``META.json``."""
        types = (list(self._graph.num_nodes), list(self._graph.edges), list(self._starts.values()))
        ntypes, etypes, offsets = types if self._is_hetero else (None, None, None)
        return {
            "num_parts": self._num_parts,
            "node_types": ntypes,
            "edge_types": etypes,
            "node_offset": offsets,
            "is_hetero": self._is_hetero,
            "is_sorted": True,  # by destination
        }

    def _save(self, name: str, content: Any) -> None:
        with self._files.placed(name) as path, open(path, "wb") as file:
            try:
                torch.save(content, file)
            except RuntimeError as error:  # it closes its archive, which fails, too
                reason = error.__context__
                raise reason if isinstance(reason, OSError) else error from None

    def _table(self, name: str, kind: str) -> str:
        return f"{name}/{kind}.pt" if self._is_hetero else f"{name}.pt"

    def write_nodes(self) -> None:
        """The part of each node, int64 [N]."""
        for ntype, own in self._part_of.items():
            self._save(self._table("node_map", ntype), torch.from_numpy(own.astype(np.int64)))

    def write_edges(self, progress: Progress) -> None:
        """The part of each edge, int64 [E]; and ends and ids of each part's edges, to scratch."""
        counter = Counter(progress, "writing edges", self._graph.total_edges)
        with OutFiles(self._scratch, self._scratch) as spread:
            for number, etype in enumerate(self._graph.edges):
                name = self._table("edge_map", "__".join(etype))
                table = self._scratch / "table.npy"
                self._save(name, self._spread(number, etype, spread, table, counter))
                table.unlink()

    def _spread(
        self,
        number: int,
        etype: EType,
        spread: OutFiles,
        table: Path,
        counter: Counter,
    ) -> Tensor:
        src, dst = (ids.detach().numpy() for ids in self._graph.edges[etype])
        part_of = self._part_of[etype[2]]
        found = create_array(table, np.int64, src.shape)
        rows = np.zeros(self._num_parts, np.int64)
        for low, high in blocks(len(src), counter):
            parts = part_of[dst[low:high]]
            found[low:high] = parts
            order = np.empty(len(parts), np.int32)
            bounds = order_by_part(parts, self._num_parts, order)
            ends = src[low:high][order], dst[low:high][order], order + np.int64(low)
            for part in np.flatnonzero(np.diff(bounds)).tolist():
                for which, ids in enumerate(ends):
                    own = ids[bounds[part] : bounds[part + 1]]
                    spread.write(f"{number}-{part}-{which}", 8 * int(rows[part]), own)
            rows += np.diff(bounds)
        return torch.from_numpy(found)

    def write_parts(self, progress: Progress) -> None:
        """Ends, ids and features of what each part owns."""
        counter = Counter(progress, "writing parts", self._num_parts)
        for part in range(self._num_parts):
            self._save(f"part_{part}/node_feats.pt", self._typed(self._node_features(part)))
            ends, features = {}, {}
            first = 0
            for number, etype in enumerate(self._graph.edges):
                ends[etype], features[etype] = self._edges(part, number, etype, first)
                first += len(self._graph.edges[etype][0])
            self._save(f"part_{part}/graph.pt", self._typed(ends))
            self._save(f"part_{part}/edge_feats.pt", self._typed(features))
            counter.add(1)

    def _typed(self, content: dict[Any, dict[str, Any]]) -> dict[Any, Any]:
        """By type where the format has types."""
        return content if self._is_hetero else next(iter(content.values()))

    def _node_features(self, part: int) -> dict[str, dict[str, Any]]:
        found = {}
        for ntype, own in self._part_of.items():
            ids = torch.from_numpy(np.flatnonzero(own == part))
            columns = self._graph.node_data.get(ntype, {})
            feats = {
                _NODES.get(name, name): rows.detach().index_select(0, ids)
                for name, rows in columns.items()
                if self._place(name, rows) == "feats"
            }
            entry = {"global_id": ids + self._starts[ntype]}
            if self._is_hetero:
                entry["id"] = ids
            found[ntype] = {**entry, "feats": feats}
            if self._has_time(columns):  # of all nodes, in each part
                found[ntype]["time"] = columns["time"].detach()
        return found

    def _place(self, name: str, rows: Tensor) -> str:
        """Where a column of nodes is written, if at all."""
        if name == ORIG_ID:
            return ""
        if name == "time" and self._has_time({name: rows}):
            return "time"
        is_beside = name != "feat" and rows.dtype != torch.bfloat16 and name not in CSR
        return NODE_DATA if is_beside else "feats"

    @staticmethod
    def _has_time(columns: dict[str, Tensor]) -> bool:
        """As PyG has it: a column of integers."""
        return "time" in columns and columns["time"].dim() == 1 and _is_integer(columns["time"])

    def _edges(
        self, part: int, number: int, etype: EType, first: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of a type in a part, by destination: ends and ids, from ``first`` on; and features."""
        src, dst, ids = self._take(part, number)
        order = np.lexsort((*self._times(etype, src, ids), dst))
        src, dst, ids = (one[order] for one in (src, dst, ids))
        eids = torch.from_numpy(ids)
        size = self._graph.num_nodes[etype[0]], self._graph.num_nodes[etype[2]]
        ends = {
            "edge_id": eids + first,
            "row": torch.from_numpy(src),
            "col": torch.from_numpy(dst),
            "size": size,
        }
        return ends, _edge_features(self._graph.edge_data.get(etype, {}), eids)

    def _times(self, etype: EType, src: np.ndarray, ids: np.ndarray) -> list[np.ndarray]:
        """By what PyG orders the edges of a destination: their time, or that of their sources."""
        of_edges = self._graph.edge_data.get(etype, {}).get("time")
        if of_edges is not None and of_edges.dim() == 1:
            return [of_edges.detach()[torch.from_numpy(ids)].numpy()]
        columns = self._graph.node_data.get(etype[0], {})
        return [columns["time"].detach().numpy()[src]] if self._has_time(columns) else []

    def _take(self, part: int, number: int) -> Iterator[np.ndarray]:
        """Sources, destinations and ids, int64 [e] each, out of scratch."""
        for which in range(3):
            path = self._scratch / f"{number}-{part}-{which}"
            if path.exists():
                yield np.fromfile(path, np.int64)
                path.unlink()
            else:
                yield np.empty(0, np.int64)

    def write_beside(self) -> None:
        """The other columns of nodes, if there are any."""
        columns = {
            f"{name}/{ntype}" if self._is_hetero else name: rows
            for ntype, own in self._graph.node_data.items()
            for name, rows in own.items()
            if self._place(name, rows) == NODE_DATA
        }
        if not columns:
            return
        with self._files.placed(NODE_DATA) as path, zipfile.ZipFile(path, "w") as archive:
            for name, rows in columns.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, rows.detach().numpy(), allow_pickle=False)


def _is_integer(rows: Tensor) -> bool:
    return not rows.is_floating_point() and rows.dtype != torch.bool


def _edge_features(columns: dict[str, Tensor], eids: Tensor) -> dict[str, Any]:
    """Of edges, by ids in their type."""
    picked = {
        name: rows.detach().index_select(0, eids)
        for name, rows in columns.items()
        if name != ORIG_EID
    }
    found: dict[str, Any] = {}
    if "time" in picked and picked["time"].dim() == 1:
        found["edge_time"] = picked.pop("time")
    if picked:
        feats = {_EDGES.get(name, name): rows for name, rows in picked.items()}
        found |= {"global_id": eids, "feats": feats}
    return found
