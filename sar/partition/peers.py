"""Partitions that PyG's ``torch_geometric.distributed`` and GraphLearn-for-PyTorch wrote.

Both name nodes and edges by their ids before the cut and say of each node which part it is in. Here
a part's nodes, and its edges by destination, get ids in the order of the original ones, which are
kept as ``orig_id`` and ``orig_eid``. What is loaded is as the same graph in DGL's layout.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sar.errors import PartitionError
from sar.partition.arrays import ORIG_EID, ORIG_ID
from sar.partition.book import EType, PartitionBook
from sar.partition.features import FeatureStore
from sar.partition.load import TYPE_KEY, PartitionData, part_node_types
from sar.partition.shards import ShardEdges

Fields = tuple[Tensor, Mapping[str, Tensor]]  # original ids, and rows for each


class Layout(ABC):
    """The files of one of the formats.

    Attributes:
        root: the folder. num_parts, ntypes, etypes: what it says of the graph.
    """

    root: Path
    num_parts: int
    ntypes: list[str]
    etypes: list[EType]

    @abstractmethod
    def node_parts(self, ntype: str) -> Tensor:
        """int64 [N]: the part of each node of a type."""

    @abstractmethod
    def edges(self, part: int, etype: EType) -> tuple[Tensor, Tensor, Tensor]:
        """int64 [e] sources, destinations and ids of the edges that lie in a part's files."""

    @abstractmethod
    def node_fields(self, part: int, ntype: str) -> Fields | None:
        """Features of a part's nodes; ``None`` where there are none."""

    @abstractmethod
    def edge_fields(self, part: int, etype: EType) -> Fields | None:
        """Features of the edges that lie in a part's files."""


class _Places:
    """Where the nodes of a type are: part and row there of each."""

    def __init__(self, layout: Layout, ntype: str) -> None:
        self.part = layout.node_parts(ntype).long()
        wrong = (self.part < 0) | (self.part >= layout.num_parts)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise PartitionError(
                f"{layout.root}: node {at} of {ntype!r} is in part {int(self.part[at])}, expected "
                f"0 to {layout.num_parts - 1}"
            )
        self.counts = torch.bincount(self.part, minlength=layout.num_parts)
        order = torch.argsort(self.part, stable=True)
        first = self.counts.cumsum(0) - self.counts
        self.row = torch.empty_like(self.part)
        self.row[order] = torch.arange(len(order)) - first[self.part[order]]

    def own(self, part: int) -> Tensor:
        """Original ids of a part's nodes, by row."""
        return (self.part == part).nonzero().view(-1)

    def check(self, ids: Tensor, what: str) -> None:
        """Raise ``PartitionError`` for ids of no node."""
        wrong = (ids < 0) | (ids >= len(self.part))
        if wrong.any():
            got = int(ids[wrong][0])
            raise PartitionError(f"{what}: got node {got}, expected 0 to {len(self.part) - 1}")


def load_peer_partition(
    layout: Layout, part_id: int, device: torch.device | str = "cpu"
) -> PartitionData:
    """One part; local. Reads the edges of all parts, one after the other, and keeps its own.

    Raises ``PartitionError`` for files that are missing, damaged or contradict each other, and
    ``ValueError`` for a part that does not exist.
    """
    if isinstance(part_id, bool) or not isinstance(part_id, int):
        raise TypeError(f"part_id: got {type(part_id).__name__}, expected an int")
    if not 0 <= part_id < layout.num_parts:
        raise ValueError(f"part_id: got {part_id}, expected 0 to {layout.num_parts - 1}")
    places = {ntype: _Places(layout, ntype) for ntype in layout.ntypes}
    edges, ids, counts = dict[EType, ShardEdges](), dict[EType, Tensor](), dict[EType, Tensor]()
    for etype in layout.etypes:
        edges[etype], ids[etype], counts[etype] = _own_edges(layout, etype, part_id, places)
    book = _book(layout, places, counts)
    nodes, columns = FeatureStore({}), FeatureStore({})
    for ntype in layout.ntypes:
        own = places[ntype].own(part_id)
        nodes[f"{ntype}/{ORIG_ID}"] = own
        fields = [one for p in _from(part_id, layout) if (one := layout.node_fields(p, ntype))]
        for name, rows in _rows(own, fields[:1], f"{layout.root}: {ntype}").items():
            nodes[f"{ntype}/{name}"] = rows
    for etype in layout.etypes:
        key = ":".join(etype)
        columns[f"{key}/{ORIG_EID}"] = ids[etype]
        fields = [one for p in _from(part_id, layout) if (one := layout.edge_fields(p, etype))]
        for name, rows in _rows(ids[etype], fields, f"{layout.root}: {key}").items():
            columns[f"{key}/{name}"] = rows
    nodes.synthesize(TYPE_KEY, lambda: part_node_types(book, part_id))
    moved = {etype: shard.to(device) for etype, shard in edges.items()}
    return PartitionData(book, part_id, moved, nodes, columns, torch.device(device))


def _from(part: int, layout: Layout) -> list[int]:
    """All parts, this one first."""
    return [part, *(p for p in range(layout.num_parts) if p != part)]


def _own_edges(
    layout: Layout, etype: EType, part: int, places: dict[str, _Places]
) -> tuple[ShardEdges, Tensor, Tensor]:
    """A part's edges, their original ids in ascending order, and how many each part has."""
    counts = torch.zeros(layout.num_parts, dtype=torch.int64)
    sources, targets, names = [], [], []
    for p in range(layout.num_parts):
        src, dst, eid = layout.edges(p, etype)
        what = f"{layout.root}: part {p}: {':'.join(etype)}"
        places[etype[0]].check(src, what)
        places[etype[2]].check(dst, what)
        home = places[etype[2]].part[dst]
        counts += torch.bincount(home, minlength=layout.num_parts)
        mine = home == part
        sources.append(src[mine])
        targets.append(dst[mine])
        names.append(eid[mine])
    src, dst, eid = torch.cat(sources), torch.cat(targets), torch.cat(names)
    order = torch.argsort(eid, stable=True)
    src, dst, eid = src[order], dst[order], eid[order]
    if len(eid) and (eid[1:] == eid[:-1]).any():
        twice = int(eid[1:][eid[1:] == eid[:-1]][0])
        raise PartitionError(f"{layout.root}: edge {twice} of {':'.join(etype)} comes twice")
    owner = places[etype[0]].part[src]
    by_owner = torch.argsort(owner, stable=True)
    ends = torch.bincount(owner, minlength=layout.num_parts).cumsum(0).tolist()
    rows = places[etype[0]].row[src][by_owner].int(), places[etype[2]].row[dst][by_owner].int()
    return ShardEdges(*rows, by_owner.int(), [0, *ends]), eid, counts


def _book(layout: Layout, places: dict[str, _Places], counts: dict[EType, Tensor]) -> PartitionBook:
    """Ids part after part, inside of a part type after type."""
    nodes = _ranges({ntype: places[ntype].counts for ntype in layout.ntypes})
    edges = _ranges({etype: counts[etype] for etype in layout.etypes})
    name, method = layout.root.name or "graph", "as it was cut"
    return PartitionBook(
        name, layout.num_parts, layout.ntypes, layout.etypes, nodes, edges, str(layout.root),
        part_method=method, files=[{} for _ in range(layout.num_parts)],
    )  # fmt: skip


def _ranges(counts: Mapping[str | EType, Tensor]) -> dict:
    table = torch.stack(list(counts.values()), dim=1)  # [part, type]
    ends = table.view(-1).cumsum(0).view(table.shape)
    both = torch.stack([ends - table, ends], dim=2).numpy()
    return {kind: np.ascontiguousarray(both[:, at]) for at, kind in enumerate(counts)}


def _rows(own: Tensor, given: list[Fields], what: str) -> dict[str, Tensor]:
    """The rows of some original ids, ascending, from whoever has them."""
    found, has = dict[str, Tensor](), torch.zeros(len(own), dtype=torch.bool)
    for ids, fields in given:
        order = torch.argsort(ids.long())
        at = torch.searchsorted(ids.long()[order], own).clamp(max=max(0, len(ids) - 1))
        there = ids.long()[order][at] == own if len(ids) else torch.zeros_like(has)
        new = there & ~has
        for name, rows in fields.items():
            if len(rows) != len(ids):
                raise PartitionError(f"{what}/{name}: {len(rows)} rows for {len(ids)} ids")
            if name not in found:
                found[name] = rows.new_zeros((len(own), *rows.shape[1:]))
            found[name][new] = rows[order[at[new]]]
        has |= there
    if given and not has.all():
        missing = int(own[~has][0])
        raise PartitionError(
            f"{what}: {int((~has).sum())} have no features, the first is {missing}"
        )
    return found


def detect(path: str | os.PathLike) -> Layout:
    """The layout of a folder. Raises ``PartitionError`` for one of neither kind."""
    from sar.partition.glt_format import GltLayout
    from sar.partition.pyg_format import PygLayout

    root = Path(path)
    if (root / "META.json").is_file():
        return PygLayout(root)
    if (root / "META").is_file():
        return GltLayout(root)
    raise PartitionError(
        f"{root}: holds neither META.json (PyG's partitions) nor META (GraphLearn's)"
    )
