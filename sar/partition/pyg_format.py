"""Folders that PyG's ``torch_geometric.distributed.Partitioner`` writes (2.5 to 2.8)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sar.errors import PartitionError
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO
from sar.partition.book import EType
from sar.partition.peers import Fields, Layout
from sar.partition.tensor_pickle import read_torch

_NAMES = {"x": "feat", "y": "label", "edge_attr": "feat"}


class PygLayout(Layout):
    """One such folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            meta = json.loads((root / "META.json").read_text(encoding="utf-8"))
            self.num_parts, self._is_hetero = int(meta["num_parts"]), bool(meta["is_hetero"])
            self.ntypes = list(meta["node_types"] or ()) if self._is_hetero else [NTYPE_HOMO]
            self.etypes = [ETYPE_HOMO]
            if self._is_hetero:
                self.etypes = [(a, b, c) for a, b, c in meta["edge_types"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PartitionError(f"{root / 'META.json'}: cannot be read: {error!r}") from error
        self._part = cache(self._read_part)

    def _read_part(self, part: int, name: str) -> Any:
        path = self.root / f"part_{part}" / name
        return read_torch(path) if path.is_file() or name == "graph.pt" else {}

    def node_parts(self, ntype: str) -> Tensor:
        name = f"node_map/{ntype}.pt" if self._is_hetero else "node_map.pt"
        return _vector(read_torch(self.root / name), self.root / name)

    def edges(self, part: int, etype: EType) -> tuple[Tensor, Tensor, Tensor]:
        path = self.root / f"part_{part}" / "graph.pt"
        graph = self._read_part(part, "graph.pt")
        if self._is_hetero:
            graph = graph.get(etype) or {name: torch.empty(0).long() for name in _COLUMNS}
        columns = [_vector(graph.get(name), path) for name in _COLUMNS]
        if len({len(one) for one in columns}) != 1:
            raise PartitionError(f"{path}: {_COLUMNS} differ in length")
        return columns[0], columns[1], columns[2] - self._first_edge(etype)

    def _first_edge(self, etype: EType) -> int:
        """Edges of several types have ids behind one another here, and not where their rows are."""
        before = self.etypes[: self.etypes.index(etype)]
        return sum(len(read_torch(self.root / f"edge_map/{'__'.join(one)}.pt")) for one in before)

    def node_fields(self, part: int, ntype: str) -> Fields | None:
        stored = self._part(part, "node_feats.pt")
        stored = stored.get(ntype) if self._is_hetero else stored
        return _fields(stored, "id" if self._is_hetero else "global_id")

    def edge_fields(self, part: int, etype: EType) -> Fields | None:
        stored = self._part(part, "edge_feats.pt")
        return _fields(stored.get(etype) if self._is_hetero else stored, "global_id")


_COLUMNS = ("row", "col", "edge_id")


def _fields(stored: Any, ids: str) -> Fields | None:
    """Names are those that the library's commands and loaders know: ``x`` is ``feat``."""
    if not stored or "feats" not in stored:
        return None
    rows = {_NAMES.get(name, name): one for name, one in stored["feats"].items() if one is not None}
    key = ids if stored.get(ids) is not None else "global_id"
    names = stored[key].long()
    for name in ("time", "edge_time"):
        if (time := stored.get(name)) is not None:  # of all nodes, in graphs of several types
            rows["time"] = time if len(time) == len(names) else time[names]
    return names, rows


def _vector(value: Any, path: Path) -> Tensor:
    if not isinstance(value, Tensor) or value.dim() != 1 or value.is_floating_point():
        raise PartitionError(f"{path}: got {type(value).__name__}, expected a vector of integers")
    return value.long()
