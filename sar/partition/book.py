"""The partition book: which part owns which node and edge, and the digests that tell damage.

Ids live in one shuffled space ordered by part, then type: a ``[num_parts, 2]`` array of half-open
ranges per type is all that the book keeps of them. `docs/formats.md` has the table of digests.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from sar.errors import PartitionError
from sar.partition.arrays import NTYPE_HOMO, EType, GraphArrays
from sar.partition.column import bytes_of
from sar.partition.progress import Counter, Progress, blocks, rows_in, silent

KEY = "sar"


@dataclass(frozen=True, eq=False)
class PartitionBook:
    """Ranges of global node and edge ids per type and part.

    ``node_ranges[ntype]`` and ``edge_ranges[canonical_etype]`` are int64 ``[num_parts, 2]`` arrays
    of half-open ranges of shuffled global ids. ``ntypes`` and ``canonical_etypes`` are ordered by
    type id. ``files[part]`` maps ``part_graph``, ``node_feats`` and ``edge_feats`` to absolute
    paths. ``halo_hops`` is None when the JSON does not say. ``digests`` are those of the files,
    None where the JSON holds none. A folder of another library is its own ``json_path`` and has
    no ``files``.
    """

    graph_name: str
    num_parts: int
    ntypes: list[str]
    canonical_etypes: list[EType]
    node_ranges: dict[str, np.ndarray]
    edge_ranges: dict[EType, np.ndarray]
    json_path: str = ""
    halo_hops: int | None = None
    part_method: str = ""
    files: list[dict[str, str]] = field(default_factory=list)
    digests: Digests | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether PyG or GraphLearn wrote the partitions."""
        return os.path.isdir(self.json_path)

    @property
    def graph_digest(self) -> str | None:
        """Digest of the graph before it was cut, equal for all its cuts; ``None`` where unknown."""
        return None if self.digests is None else self.digests.graph

    def digest_of(self, path: str) -> FileDigest | None:
        """The digest of a file of ``files``; ``None`` where the partitions hold no digests.
        Raises ``PartitionError`` where they hold some, but not of this file."""
        if self.digests is None:
            return None
        name = relative(path, os.path.realpath(os.path.dirname(self.json_path)))
        if name not in self.digests.files:
            raise PartitionError(f"{self.json_path}: holds digests, but none of {name!r}")
        return self.digests.files[name]

    @property
    def is_homogeneous(self) -> bool:
        return len(self.ntypes) == 1 and len(self.canonical_etypes) == 1

    @cached_property
    def part_ranges(self) -> list[tuple[int, int]]:
        """``(start, end)`` global node ids of each part, all node types together."""
        bounds = self._node_bounds[:: len(self.ntypes)].tolist()
        return list(zip(bounds[:-1], bounds[1:]))

    @cached_property
    def _node_bounds(self) -> np.ndarray:
        """int64 ``[num_parts * num_ntypes + 1]``: starts in (part, type) order, then the end."""
        table = np.stack([self.node_ranges[ntype] for ntype in self.ntypes], axis=1)
        return np.append(table[:, :, 0].ravel(), table[-1, -1, 1])

    @cached_property
    def _typed_bounds(self) -> dict[str, np.ndarray]:
        """Per node type, int64 ``[num_parts + 1]``: running count of its nodes over the parts."""
        return {
            ntype: np.concatenate(([0], np.cumsum(ranges[:, 1] - ranges[:, 0])))
            for ntype, ranges in self.node_ranges.items()
        }

    def canonical(self, etype: str | tuple[str, ...]) -> EType:
        """The canonical ``(src type, relation, dst type)`` of a relation name or a triple.
        Raises ``ValueError`` when the type is unknown or a bare name is ambiguous."""
        if isinstance(etype, tuple) and etype in self.edge_ranges:
            return etype  # type: ignore[return-value]
        found = [one for one in self.canonical_etypes if etype in (one[1], ":".join(one))]
        if len(found) != 1:
            problem = "ambiguous" if found else "unknown"
            raise ValueError(
                f"etype: {etype!r} is {problem}, expected one of {self.canonical_etypes}"
            )
        return found[0]

    def _ranges_of(self, ntype: str) -> np.ndarray:
        if ntype not in self.node_ranges:
            raise ValueError(f"ntype: {ntype!r} is unknown, expected one of {self.ntypes}")
        return self.node_ranges[ntype]

    def _check_part(self, part: int) -> int:
        if not 0 <= part < self.num_parts:
            raise ValueError(f"part: got {part}, expected 0 to {self.num_parts - 1}")
        return int(part)

    def num_nodes(self, ntype: str | None = None) -> int:
        """Nodes of one type, or of all, in the whole graph."""
        if ntype is None:
            return int(self._node_bounds[-1])
        return int(np.diff(self._ranges_of(ntype)).sum())

    def num_edges(self, etype: str | tuple[str, ...] | None = None) -> int:
        """Edges of one type, or of all, in the whole graph."""
        chosen = self.canonical_etypes if etype is None else [self.canonical(etype)]
        return sum(int(np.diff(self.edge_ranges[one], axis=1).sum()) for one in chosen)

    def part_nodes(self, ntype: str, part: int) -> int:
        """Inner nodes of a type in a part."""
        return int(np.diff(self._ranges_of(ntype)[self._check_part(part)])[0])

    def part_edges(self, etype: str | tuple[str, ...], part: int) -> int:
        """Inner edges of a type in a part."""
        return int(np.diff(self.edge_ranges[self.canonical(etype)][self._check_part(part)])[0])

    def locate(self, nids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """int64 ``(type_id, part, idx)`` of global node ids, shaped as ``nids``; ``idx`` is the row
        inside (type, part). Raises ``ValueError`` for an id outside the graph."""
        ids, slot = _slots(nids, self._node_bounds)
        idx = ids - self._node_bounds[slot]
        part, type_id = np.divmod(slot, len(self.ntypes))
        return torch.as_tensor(type_id), torch.as_tensor(part), torch.as_tensor(idx)

    def digest(self) -> str:
        """SHA-256 (hex) of everything in the book but paths, and of the digests of files: equal
        on ranks that loaded the same partitioning."""
        content = {
            "graph_name": self.graph_name,
            "num_parts": self.num_parts,
            "halo_hops": self.halo_hops,
            "ntypes": self.ntypes,
            "etypes": self.canonical_etypes,
            "nodes": [self.node_ranges[ntype].tolist() for ntype in self.ntypes],
            "edges": [self.edge_ranges[etype].tolist() for etype in self.canonical_etypes],
        }
        if self.graph_digest is not None:  # added digests change nothing: a run goes on with them
            content["files"] = asdict(self.digests)  # type: ignore[arg-type]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    # The names below are those of DGL's book, for scripts that use it.

    def num_partitions(self) -> int:
        return self.num_parts

    def metadata(self) -> list[dict[str, int]]:
        """Per part: ``machine_id``, ``num_nodes`` and ``num_edges``, all types together."""
        edges = np.sum([np.diff(one, axis=1)[:, 0] for one in self.edge_ranges.values()], axis=0)
        return [
            {"machine_id": part, "num_nodes": end - start, "num_edges": int(edges[part])}
            for part, (start, end) in enumerate(self.part_ranges)
        ]

    @property
    def etypes(self) -> list[str]:
        """Relation names by type id."""
        return [etype[1] for etype in self.canonical_etypes]

    @property
    def _canonical_etypes(self) -> list[EType]:
        return self.canonical_etypes

    def to_canonical_etype(self, etype: str | tuple[str, ...]) -> EType:
        return self.canonical(etype)

    def _bounds_for(self, ntype: str) -> np.ndarray:
        # The default name means the homogeneous id space, any other name ids within the type.
        if ntype == NTYPE_HOMO:
            return self._node_bounds[:: len(self.ntypes)]
        self._ranges_of(ntype)
        return self._typed_bounds[ntype]

    def partid2nids(self, partid: int, ntype: str = NTYPE_HOMO) -> Tensor:
        """int64 ids of a part's nodes: global ids, or ids within ``ntype`` when one is named."""
        bounds = self._bounds_for(ntype)
        part = self._check_part(partid)
        return torch.arange(int(bounds[part]), int(bounds[part + 1]))

    def nid2partid(self, nids: Tensor, ntype: str = NTYPE_HOMO) -> Tensor:
        """int64 part of each id (global, or within ``ntype``). Raises ValueError out of range."""
        return torch.as_tensor(_slots(nids, self._bounds_for(ntype))[1])

    def nid2localnid(self, nids: Tensor, partid: int, ntype: str = NTYPE_HOMO) -> Tensor:
        """Rows inside ``partid`` of ids (global, or within ``ntype``) that the part owns."""
        return torch.as_tensor(nids) - int(self._bounds_for(ntype)[self._check_part(partid)])

    def map_to_per_ntype(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """``(type_id, id within the type)`` of global ids; int64 each."""
        type_id, part, idx = self.locate(torch.as_tensor(ids))
        starts = np.stack([self._typed_bounds[ntype] for ntype in self.ntypes])
        return type_id, idx + torch.as_tensor(starts)[type_id, part]


def _slots(nids: Tensor, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids as int64, and the index of the range that holds each: the last that starts at or
    before it, as empty ranges come first. Raises ``ValueError`` for an id outside ``bounds``."""
    ids = torch.as_tensor(nids).detach().cpu().numpy().astype(np.int64, copy=False)
    if ids.size and (ids.min() < 0 or ids.max() >= bounds[-1]):
        raise ValueError(
            f"nids: ids run from {ids.min()} to {ids.max()}, expected 0 to {bounds[-1] - 1}"
        )
    return ids, np.searchsorted(bounds[:-1], ids, side="right") - 1


def ranges_of(counts: np.ndarray) -> Iterator[np.ndarray]:
    """Per type, int64 [P, 2]: ids in the order (part, type), of int64 counts [P, types]."""
    stops = counts.ravel().cumsum().reshape(counts.shape)
    for column in range(counts.shape[1]):
        yield np.stack([stops[:, column] - counts[:, column], stops[:, column]], axis=1)


def without_digests(book: PartitionBook) -> str:
    """The message for partitions without digests, with the command that writes some."""
    path = book.json_path
    helps = f"sar partition {path} --add-digests"
    if book.is_foreign:
        helps = f"sar partition {path} --parts {book.num_parts} --method keep --out DIR"
    return f"{path}: holds no digests, so changed bytes may go unseen; this writes some: {helps}"


@dataclass(frozen=True)
class ArrayDigest:
    """Dtype, shape and XXH3-128 digest that an array of a feature file must have."""

    dtype: str
    shape: list[int]
    digest: str

    @classmethod
    def of(cls, dtype: torch.dtype, shape: Sequence[int], digest: str) -> ArrayDigest:
        return cls(str(dtype).removeprefix("torch."), list(shape), digest)


@dataclass(frozen=True)
class FileDigest:
    """Size that a file must have, and its digest or those of its arrays by name."""

    size: int
    digest: str = ""
    arrays: dict[str, ArrayDigest] = field(default_factory=dict)


@dataclass(frozen=True)
class Digests:
    """The digest of the graph before it was cut (``None``: unknown, as digests were added later),
    and those of files by path relative to the JSON's folder."""

    graph: str | None
    files: dict[str, FileDigest]


def graph_digest(graph: GraphArrays, progress: Progress = silent) -> str:
    """XXH3-128 of nodes, edges and data in the input's order, read block by block."""
    found, counter = xxhash.xxh3_128(), Counter(progress, "digesting the graph", graph.nbytes)

    def add(value: Any) -> None:
        step = rows_in(value[:1].nbytes)
        for low, high in blocks(len(value), size=step):
            found.update(bytes_of(value[low:high]))
            counter.add(value[low:high].nbytes)

    for ntype, count in graph.num_nodes.items():
        found.update(f"{ntype} {count}\n")
    for etype, ends in graph.edges.items():
        found.update(":".join(etype))
        for ids in ends:
            add(ids)
    for frames in (graph.node_data, graph.edge_data):
        for kind, columns in frames.items():
            for name in sorted(columns):
                value = columns[name]
                found.update(f"{kind} {name} {value.dtype} {tuple(value.shape)}\n")
                add(value)
    return found.hexdigest()


def with_digests(content: dict[str, Any], digests: Digests) -> dict[str, Any]:
    files = {
        name: {key: value for key, value in asdict(one).items() if value or key == "size"}
        for name, one in digests.files.items()
    }
    told: dict[str, Any] = {"graph": digests.graph, "files": files}
    return {**content, KEY: {**told, "json": _json_digest({**content, KEY: told})}}


def read_digests(config: dict[str, Any]) -> Digests | None:
    """The digests in a JSON; ``None`` where it holds none.
    Raises ``PartitionError``, without the JSON's name, where it is not as it was written."""
    if KEY not in config:
        return None
    told = config[KEY]
    if not isinstance(told, dict) or not isinstance(told.get("files"), dict):
        raise PartitionError(f"key {KEY!r} holds no digests")
    own = {key: value for key, value in told.items() if key != "json"}
    try:
        found = _json_digest({**config, KEY: own})
    except RecursionError as error:
        raise PartitionError("is nested too deep, which no partitions are") from error
    if told.get("json") != found:
        raise PartitionError(
            "is not as it was written: damaged, or edited by hand. After an edit, remove "
            f"its key {KEY!r}; the partitions are then loaded without verification"
        )
    files = {name: _file_digest(entry, name) for name, entry in told["files"].items()}
    graph = told.get("graph")
    return Digests(None if graph is None else _hex(graph, "the graph"), files)


def _file_digest(entry: Any, name: str) -> FileDigest:
    try:
        size, told = entry["size"], entry.get("arrays", {})
        if not isinstance(size, int):
            raise TypeError
        if "digest" in entry:
            return FileDigest(size, _hex(entry["digest"], name))
        arrays = {array: ArrayDigest(**one) for array, one in told.items()}
    except (AttributeError, KeyError, TypeError) as error:
        text = f"the digests of {name!r} are {entry!r}, expected an object"
        raise PartitionError(text) from error
    for array, one in arrays.items():
        _hex(one.digest, array)
    return FileDigest(size, arrays=arrays)


def _hex(value: Any, what: str) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{32}", value):
        raise PartitionError(f"the digest of {what} is {value!r}, expected 32 digits")
    return value


def _json_digest(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True))


def relative(path: str, folder: str | os.PathLike) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()
