"""Writes a graph that has been cut as PyG's ``torch_geometric.distributed.Partitioner`` does.

Ids are those of the graph, so ``orig_id`` and ``orig_eid`` are not written. Labels, masks and other
columns of nodes, for which the layout has no place, are written beside it, into ``node_data.npz``,
by ids of the graph; PyG does not read that file, :mod:`sar.partition.foreign` does.

PyG's own reader fails for a part that owns no node, or whose edges of a type with features are
none, whoever wrote it; this library's reads it.

``torch.save`` takes whole tensors, so one part at a time is in memory: about 50 bytes for each of
its edges, and its features. What is as large as all edges lies in a scratch folder.
"""

from __future__ import annotations

import json
import zipfile
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
    need,
)
from sar.partition.column import create_array
from sar.partition.formats.layout import order_by_part, parts_by_type
from sar.partition.progress import Counter, Progress, blocks, silent
from sar.partition.sources.npz import CSR, NODE_DATA


def write_pyg(
    graph: GraphArrays,
    parts: np.ndarray,
    num_parts: int,
    files: OutFiles,
    scratch: Path,
    progress: Progress = silent,
) -> None:
    """Write ``META.json``, the tables of nodes and edges, the folders of the parts, and other
    columns.

    ``graph`` is valid, ``parts`` int [N], types one after another; ``scratch`` takes 32 bytes an
    edge. Raises ``OSError`` that names a file, and ``ValueError`` for types that the format cannot
    hold.
    """
    for name in (*graph.num_nodes, *(one for etype in graph.edges for one in etype)):
        is_good = name not in (".", "..") and "\0" not in name
        need(is_good, f"type {name!r}: PyG's partitions need types that can name files")
    names = {"__".join(etype) for etype in graph.edges}
    what = f"edge types {list(graph.edges)}: PyG's partitions need one or more"
    need(names and len(names) == len(graph.edges), f"{what}, whose names joined by '__' differ")
    writer = _Writer(graph, parts, num_parts, files, scratch)
    writer.write_tables(progress)
    writer.write_parts(progress)
    writer.write_beside()
    with files.placed("META.json") as path:
        path.write_text(json.dumps(writer.description()))


class _Writer:
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

    def _save_table(self, name: str, kind: str, parts: np.ndarray) -> None:
        path = f"{name}/{kind}.pt" if self._is_hetero else f"{name}.pt"
        self._save(path, torch.from_numpy(parts))

    def write_tables(self, progress: Progress) -> None:
        """Write int64 parts of nodes and edges; and ends and ids of parts' edges to scratch."""
        for ntype, own in self._part_of.items():
            self._save_table("node_map", ntype, own.astype(np.int64))
        counter = Counter(progress, "writing edges", self._graph.total_edges)
        table = self._scratch / "table.npy"
        with OutFiles(self._scratch, self._scratch) as spread:
            for number, (etype, ends) in enumerate(self._graph.edges.items()):
                parts = create_array(table, np.int64, ends[0].shape)
                self._spread(number, etype, spread, parts, counter)
                self._save_table("edge_map", "__".join(etype), parts)
                table.unlink()

    def _spread(
        self, number: int, etype: EType, spread: OutFiles, found: np.ndarray, counter: Counter
    ) -> None:
        """Put the edges of a type into files of their parts, and their parts into ``found``."""
        src, dst = (ids.detach().numpy() for ids in self._graph.edges[etype])
        part_of, rows = self._part_of[etype[2]], np.zeros(self._num_parts, np.int64)
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

    def write_parts(self, progress: Progress) -> None:
        counter = Counter(progress, "writing parts", self._num_parts)
        for part in range(self._num_parts):
            self._save_typed(f"part_{part}/node_feats.pt", self._node_features(part))
            ends, features = {}, {}
            first = 0
            for number, etype in enumerate(self._graph.edges):
                ends[etype], features[etype] = self._edges(part, number, etype, first)
                first += len(self._graph.edges[etype][0])
            self._save_typed(f"part_{part}/graph.pt", ends)
            self._save_typed(f"part_{part}/edge_feats.pt", features)
            counter.add(1)

    def _save_typed(self, name: str, content: dict[Any, dict[str, Any]]) -> None:
        self._save(name, content if self._is_hetero else next(iter(content.values())))

    def _node_features(self, part: int) -> dict[str, dict[str, Any]]:
        found = {}
        for ntype, own in self._part_of.items():
            ids = torch.from_numpy(np.flatnonzero(own == part))
            columns = self._graph.node_data.get(ntype, {})
            feats = {
                {"feat": "x"}.get(name, name): rows.detach().index_select(0, ids)
                for name, rows in columns.items()
                if _place(name, rows) == "feats"
            }
            entry = {"global_id": ids + self._starts[ntype]}
            if self._is_hetero:
                entry["id"] = ids
            found[ntype] = {**entry, "feats": feats}
            if "time" in columns and _place("time", columns["time"]) == "time":
                found[ntype]["time"] = columns["time"].detach()  # of all nodes, in each part
        return found

    def _edges(
        self, part: int, number: int, etype: EType, first: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Edges of a type in a part by destination: ends, ids from ``first`` on; and features."""
        src, dst, ids = (self._take(f"{number}-{part}-{which}") for which in range(3))
        order = np.lexsort((*self._times(etype, src, ids), dst))
        row, col, eids = (torch.from_numpy(one[order]) for one in (src, dst, ids))
        size = self._graph.num_nodes[etype[0]], self._graph.num_nodes[etype[2]]
        ends = {"edge_id": eids + first, "row": row, "col": col, "size": size}
        feats = {
            {"feat": "edge_attr"}.get(name, name): rows.detach().index_select(0, eids)
            for name, rows in self._graph.edge_data.get(etype, {}).items()
            if name != ORIG_EID
        }
        found: dict[str, Any] = {}
        if "time" in feats and feats["time"].dim() == 1:
            found["edge_time"] = feats.pop("time")
        if feats:
            found |= {"global_id": eids, "feats": feats}
        return ends, found

    def _times(self, etype: EType, src: np.ndarray, ids: np.ndarray) -> list[np.ndarray]:
        """PyG's order of a destination's edges: their time, or that of their sources."""
        of_edges = self._graph.edge_data.get(etype, {}).get("time")
        if of_edges is not None and of_edges.dim() == 1:
            return [of_edges.detach()[torch.from_numpy(ids)].numpy()]
        of_nodes = self._graph.node_data.get(etype[0], {}).get("time")
        if of_nodes is None or _place("time", of_nodes) != "time":
            return []
        return [of_nodes.detach().numpy()[src]]

    def _take(self, name: str) -> np.ndarray:
        path = self._scratch / name
        if not path.exists():
            return np.empty(0, np.int64)
        found = np.fromfile(path, np.int64)
        path.unlink()
        return found

    def write_beside(self) -> None:
        columns = {
            f"{name}/{ntype}" if self._is_hetero else name: rows
            for ntype, own in self._graph.node_data.items()
            for name, rows in own.items()
            if _place(name, rows) == NODE_DATA
        }
        if not columns:
            return
        with self._files.placed(NODE_DATA) as path, zipfile.ZipFile(path, "w") as archive:
            for name, rows in columns.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, rows.detach().numpy(), allow_pickle=False)


def _place(name: str, rows: Tensor) -> str:
    """Where a column of nodes is written: "time" (integers, as in PyG), "feats", beside, or ""."""
    is_integer = not rows.is_floating_point() and rows.dtype != torch.bool
    if name == "time" and rows.dim() == 1 and is_integer:
        return "time"
    is_beside = name != "feat" and rows.dtype != torch.bfloat16 and name not in CSR
    return "" if name == ORIG_ID else NODE_DATA if is_beside else "feats"
