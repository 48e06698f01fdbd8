"""Folders of PyG's ``Partitioner`` and GraphLearn-for-PyTorch, read by original ids."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sar.errors import PartitionError
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, EType
from sar.partition.column import Column, MappedColumn, SelectedColumn, check
from sar.partition.progress import blocks
from sar.partition.unpickle import read_pickles, read_saved, read_values

Columns = dict[str, Column | Tensor]
# What the same is called in DGL's partitions.
_NAMES = {"x": "feat", "edge_attr": "feat", "edge_time": "time"}


class StoredEdges(NamedTuple):
    """The edges of a type in the files of a part: int [E] each, by original ids. ``first`` is the
    smallest id that an edge of the type has in the file."""

    src: MappedColumn
    dst: MappedColumn
    eid: MappedColumn
    first: int = 0


class _Folder:
    """Partitions in one format, told by the file ``META``; ``ntypes`` and ``etypes`` are sorted by
    name, as DGL does. ``by_destination``: a part's files hold the edges that end in its nodes, and
    no others.

    A format has :meth:`edges`, and ``node_features(ntype, part, ids)`` and
    ``edge_features(etype, part, eids, places)``: columns by name, rows by ascending original id.
    ``places`` are the edges' positions in the part's files, or in those of all parts one behind the
    other where edges are not kept by destination.
    """

    META: ClassVar[str]
    kind: ClassVar[str]
    by_destination: ClassVar[bool]
    _PART: ClassVar[str]
    _OWNERS: ClassVar[str]

    def __init__(self, path: str, meta: Any, is_hetero: bool) -> None:
        self.path, where = path, os.path.join(path, self.META)
        self.num_parts = _entry(meta, "num_parts", where)
        is_good = type(self.num_parts) is int and self.num_parts > 0
        what = f"{where}: num_parts is {self.num_parts!r}"
        check(is_good, f"{what}, expected a positive integer")
        for part in range(self.num_parts):
            folder = os.path.join(path, f"{self._PART}{part}")
            what = f"{folder}: no such folder, but {where} tells of {self.num_parts} parts"
            check(os.path.isdir(folder), what)
        self._is_hetero = is_hetero
        ntypes, self._stored_etypes = _types_of(meta, is_hetero, where)
        self.ntypes, self.etypes = sorted(ntypes), sorted(self._stored_etypes)

    def _below(self, *names: str, kind: str) -> str:
        """A path in the folder; the type is its last name where there are several."""
        return os.path.join(self.path, *names, *([kind] if self._is_hetero else []))

    def owners(self, ntype: str) -> MappedColumn:
        """int [N]: the part of each node, by original id."""
        return _integers_of(self._below(self._OWNERS, kind=ntype) + ".pt")


class PygFolder(_Folder):
    """A folder of PyG. Edges lie with their destinations; their ids count all types."""

    META, kind, by_destination = "META.json", "pyg", True
    _PART, _OWNERS = "part_", "node_map"
    _latest: tuple[int, str, Any]

    def __init__(self, path: str) -> None:
        where, self._latest = Path(path, self.META), (-1, "", None)
        try:
            meta = json.loads(where.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise PartitionError(f"{where}: not the JSON of PyG's Partitioner: {error}") from error
        super().__init__(path, meta, bool(_entry(meta, "is_hetero", str(where))))

    def edges(self, etype: EType, part: int) -> StoredEdges:
        path, own = self._read(part, "graph.pt", etype)
        src = _integers(_entry(own, "row", path), f"{path}: row")
        dst, eid = (
            _integers(_entry(own, name, path), f"{path}: {name}", len(src))
            for name in ("col", "edge_id")
        )
        before = self._stored_etypes[: self._stored_etypes.index(etype)]
        tables = [self._below("edge_map", kind="__".join(one)) + ".pt" for one in before]
        return StoredEdges(src, dst, eid, sum(len(_integers_of(table)) for table in tables))

    def node_features(self, ntype: str, part: int, ids: np.ndarray) -> Columns:
        """``x`` as ``feat``, and ``time``."""
        path, own = self._read(part, "node_feats.pt", ntype)
        name = "id" if self._is_hetero else "global_id"
        stored = _integers(_entry(own, name, path), f"{path}: {name}", len(ids)).ints(0, len(ids))
        order = np.argsort(stored)
        is_good = np.array_equal(stored[order], ids)
        check(is_good, f"{path}: {name}s are not those that node_map gives part {part}")
        found = _features(own, path, order)
        if "time" in own:  # of all nodes, in each part
            total = len(self.owners(ntype))
            found["time"] = _in_order(_integers(own["time"], f"{path}: time", total), ids)
        return found

    def edge_features(
        self, etype: EType, part: int, eids: np.ndarray, places: np.ndarray
    ) -> Columns:
        """``edge_attr`` as ``feat``, and ``edge_time`` as ``time``."""
        path, own = self._read(part, "edge_feats.pt", etype, {})
        found = _features(own, path, places)
        if found:
            ids = _integers(_entry(own, "global_id", path), f"{path}: global_id", len(eids))
            edges = self.edges(etype, part)
            for low, high in blocks(len(ids)):  # rows of features follow the edges
                known = edges.eid.ints(low, high) - edges.first
                is_good = np.array_equal(ids.ints(low, high), known)
                check(is_good, f"{path}: is of other edges than graph.pt beside it")
        if "edge_time" in own:
            times = _rows_of(own["edge_time"], f"{path}: edge_time", len(eids))
            found["time"] = _in_order(times, places)
        return found

    def _read(
        self, part: int, name: str, kind: str | EType, default: Any = None
    ) -> tuple[str, Any]:
        """A file's path and what it holds of a type; the file that was read last is kept."""
        path = os.path.join(self.path, f"part_{part}", name)
        if self._latest[:2] != (part, name):
            self._latest = part, name, read_saved(path)
        content = self._latest[2]
        what = f"{path}: holds {type(content).__name__}"
        check(isinstance(content, dict), f"{what}, expected a dictionary")
        if self._is_hetero:
            missing = default is not None and kind not in content
            content = default if missing else _entry(content, kind, path)
        return path, content


def _features(own: Any, path: str, order: np.ndarray) -> Columns:
    is_good = isinstance(own, dict) and isinstance(own.get("feats", {}), dict)
    check(is_good, f"{path}: expected features by name")
    return {
        _NAMES.get(name, name): _in_order(_rows_of(rows, f"{path}: {name}", len(order)), order)
        for name, rows in own.get("feats", {}).items()
        if rows is not None
    }


class GltFolder(_Folder):
    """A folder of GraphLearn, whose features are pickles and read into memory.

    Edges lie with their sources or their destinations, the files do not tell: each part reads all.
    """

    META, kind, by_destination = "META", "glt", False
    _PART, _OWNERS = "part", "node_pb"

    def __init__(self, path: str) -> None:
        meta = read_values(where := os.path.join(path, self.META))
        super().__init__(path, meta, _entry(meta, "data_cls", where) == "hetero")

    def edges(self, etype: EType, part: int) -> StoredEdges:
        check(
            os.path.isdir(os.path.join(self.path, f"part{part}", "graph")),
            f"{self.path}: part{part} has no folder 'graph'; a graph that was partitioned with "
            "graph_caching=True must be partitioned again without",
        )
        folder = self._below(f"part{part}", "graph", kind="__".join(etype))
        src = _integers_of(os.path.join(folder, "rows.pt"))
        dst, eid = (
            _integers_of(os.path.join(folder, f"{name}s.pt"), len(src)) for name in ("col", "eid")
        )
        return StoredEdges(src, dst, eid)

    def node_features(self, ntype: str, part: int, ids: np.ndarray) -> Columns:
        """The only feature, as ``feat``."""
        return self._features("node_feat", ntype, part, ids)

    def edge_features(
        self, etype: EType, part: int, eids: np.ndarray, places: np.ndarray
    ) -> Columns:
        """The only feature, as ``feat``, and weights, as ``weight``."""
        kind, parts = "__".join(etype), range(self.num_parts)
        found = self._features("edge_feat", kind, part, eids)
        folders = [self._below(f"part{one}", "graph", kind=kind) for one in parts]
        paths = [os.path.join(folder, "weights.pt") for folder in folders]
        if any(map(os.path.isfile, paths)):
            columns = [
                _rows_of(read_saved(path), path, len(self.edges(etype, one).dst))
                for one, path in enumerate(paths)
            ]
            is_good = len({(one.dtype, one.shape[1:]) for one in columns}) == 1
            check(is_good, f"{paths[0]}: weights of other parts have another dtype or shape")
            found["weight"] = SelectedColumn(columns, places)
        return found

    def _features(self, folder: str, kind: str, part: int, ids: np.ndarray) -> Columns:
        """Rows of ``ids``, from the part's own files and, if some are not there, all others."""
        parts = [part, *(one for one in range(self.num_parts) if one != part)]
        paths = [os.path.join(self._below(f"part{one}", folder, kind=kind), "") for one in parts]
        there = [path for path in paths if os.path.isfile(path + "feats.pkl")]
        return {"feat": _collect(there, ids)} if there else {}


PartitionFolder: TypeAlias = PygFolder | GltFolder


def _collect(folders: Sequence[str], wanted: np.ndarray) -> Tensor:
    """Rows of ascending ids ``wanted``, from as many folders' ``feats.pkl`` as hold them all."""
    seen, out = np.zeros(len(wanted), bool), None
    for folder in folders:
        for ids, rows in _runs(folder):
            if out is None:
                out = rows.new_empty((len(wanted), *rows.shape[1:]))
            is_good = (rows.dtype, rows.shape[1:]) == (out.dtype, out.shape[1:])
            check(is_good, f"{folder}feats.pkl: holds rows of several shapes or dtypes")
            where = np.searchsorted(wanted, ids)
            known = where < len(wanted)
            known[known] = wanted[where[known]] == ids[known]
            mine = where[known]
            is_good = not seen[mine].any() and len(np.unique(mine)) == len(mine)
            what = f"{folder}ids.pkl: an id is there twice"
            check(is_good, f"{what}; a folder must be partitioned into once")
            seen[mine] = True
            out[torch.from_numpy(mine)] = rows[torch.from_numpy(known)]
        if out is not None and seen.all():
            return out
    missing = wanted[~seen][:3].tolist()
    raise PartitionError(f"{folders[0]}feats.pkl: has no rows for ids {missing}")


def _runs(folder: str) -> Iterator[tuple[np.ndarray, Tensor]]:
    names = [f"{folder}{name}.pkl" for name in ("ids", "feats")]
    ids, feats = map(read_pickles, names)
    for known in ids:
        rows: Any = next(feats, None)
        is_good = isinstance(known, Tensor) and known.dim() == 1 and not known.is_floating_point()
        check(is_good, f"{names[0]}: holds {type(known).__name__}, expected columns of ids")
        is_good = isinstance(rows, Tensor) and rows.dim() > 0 and len(rows) == len(known)
        check(is_good, f"{names[1]}: got {rows!r:.80}, expected {len(known)} rows")
        yield known.long().numpy(), rows.detach()
    is_good = next(feats, None) is None
    check(is_good, f"{names[1]}: holds more rows than {names[0]} has ids")


def _in_order(source: MappedColumn, order: np.ndarray) -> Column:
    if len(order) == len(source) and np.array_equal(order, np.arange(len(order))):
        return source
    return SelectedColumn([source], order)


def _integers_of(path: str, count: int | None = None) -> MappedColumn:
    return _integers(read_saved(path), path, count)


def _integers(value: Any, where: str, count: int | None = None) -> MappedColumn:
    is_column = isinstance(value, MappedColumn) and len(value.shape) == 1
    is_good = is_column and not (value.dtype.is_floating_point or value.dtype.is_complex)
    check(is_good, f"{where}: got {value!r:.80}, expected integers in one column")
    check(count in (None, len(value)), f"{where}: has {len(value)} rows, expected {count}")
    return value


def _rows_of(value: Any, where: str, count: int) -> MappedColumn:
    is_good = isinstance(value, MappedColumn) and value.shape and len(value) == count
    check(is_good, f"{where}: got {value!r:.80}, expected {count} rows")
    return value


def _entry(content: Any, key: Any, where: str) -> Any:
    if not isinstance(content, Mapping) or key not in content:
        there = sorted(map(str, content)) if isinstance(content, Mapping) else type(content)
        raise PartitionError(f"{where}: holds {there!s:.200}, expected a dictionary with {key!r}")
    return content[key]


def _types_of(meta: Any, is_hetero: bool, path: str) -> tuple[list[str], list[EType]]:
    """Node and edge types that a format's description names, in its order, or the only ones."""
    if not is_hetero:
        return [NTYPE_HOMO], [ETYPE_HOMO]
    ntypes, etypes = list(_entry(meta, "node_types", path) or ()), []
    for one in _entry(meta, "edge_types", path) or ():
        is_good = isinstance(one, (list, tuple)) and len(one) == 3
        check(is_good, f"{path}: edge type {one!r}, expected source, relation, destination")
        etypes.append((one[0], one[1], one[2]))
    for name in (*ntypes, *(one for etype in etypes for one in etype)):
        is_good = isinstance(name, str) and name not in ("", ".", "..")
        is_good = is_good and not set(name) & set("/:\0")
        check(is_good, f"{path}: type {name!r}, expected a name without '/' and ':'")
    are_good = ntypes and etypes and len({*ntypes, *etypes}) == len(ntypes) + len(etypes)
    check(are_good, f"{path}: types {ntypes} and {etypes}, expected one or more, once")
    for etype in etypes:
        is_good = {etype[0], etype[2]} <= set(ntypes)
        check(is_good, f"{path}: {etype} joins other types than {ntypes}")
    return ntypes, etypes
