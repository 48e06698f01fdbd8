"""Folders that GraphLearn-for-PyTorch's partitioners write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sar.errors import PartitionError
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO
from sar.partition.book import EType
from sar.partition.peers import Fields, Layout
from sar.partition.tensor_pickle import read_pickles, read_torch


class GltLayout(Layout):
    """One such folder; features that it caches twice are read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        meta: Any = read_pickles(root / "META")[0]
        try:
            self.num_parts, self._is_hetero = int(meta["num_parts"]), meta["data_cls"] == "hetero"
            self.ntypes, self.etypes = [NTYPE_HOMO], [ETYPE_HOMO]
            if self._is_hetero:
                self.ntypes = list(meta["node_types"])
                self.etypes = [(a, b, c) for a, b, c in meta["edge_types"]]
        except (KeyError, TypeError, ValueError) as error:
            raise PartitionError(f"{root / 'META'}: cannot be read: {error!r}") from error

    def node_parts(self, ntype: str) -> Tensor:
        path = self.root / (f"node_pb/{ntype}.pt" if self._is_hetero else "node_pb.pt")
        return _vector(read_torch(path), path)

    def edges(self, part: int, etype: EType) -> tuple[Tensor, Tensor, Tensor]:
        folder = self._folder(part, "graph", "__".join(etype))
        if self._is_hetero and not folder.is_dir():
            return (torch.empty(0, dtype=torch.int64),) * 3
        names = ("rows", "cols", "eids")
        columns = [_vector(read_torch(folder / f"{n}.pt"), folder / f"{n}.pt") for n in names]
        if len({len(one) for one in columns}) != 1:
            raise PartitionError(f"{folder}: {names} differ in length")
        return columns[0], columns[1], columns[2]

    def node_fields(self, part: int, ntype: str) -> Fields | None:
        return _fields(self._folder(part, "node_feat", ntype))

    def edge_fields(self, part: int, etype: EType) -> Fields | None:
        key = "__".join(etype)
        found = _fields(self._folder(part, "edge_feat", key))
        weights = self._folder(part, "graph", key) / "weights.pt"
        if not weights.is_file():
            return found
        ids = self.edges(part, etype)[2]
        rows = {"weight": read_torch(weights)}
        if found is not None:
            order = torch.argsort(found[0])
            at = order[torch.searchsorted(found[0][order], ids).clamp(max=len(order) - 1)]
            rows |= {name: one[at] for name, one in found[1].items()}
        return ids, rows

    def _folder(self, part: int, what: str, kind: str) -> Path:
        folder = self.root / f"part{part}" / what
        return folder / kind if self._is_hetero else folder


def _fields(folder: Path) -> Fields | None:
    if not (folder / "feats.pkl").is_file():
        return None
    ids = torch.cat([torch.as_tensor(one) for one in read_pickles(folder / "ids.pkl")]).long()
    rows = torch.cat([torch.as_tensor(one) for one in read_pickles(folder / "feats.pkl")])
    return ids, {"feat": rows}


def _vector(value: Any, path: Path) -> Tensor:
    value = torch.as_tensor(value)
    if value.dim() != 1 or value.is_floating_point():
        raise PartitionError(
            f"{path}: got {value.dtype} {list(value.shape)}, expected a vector of integers"
        )
    return value.long()
