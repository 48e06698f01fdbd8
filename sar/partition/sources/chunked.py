"""Graphs in the chunked format that DGL's tools for distributed partitioning read.

A `metadata.json` names types, the counts of each chunk, and the files of edges (`csv` or `parquet`,
the first two columns are ids inside their types; or `numpy`) and of data (`numpy`, `parquet` or
`csv`, whose columns become one).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sar.partition.arrays import CanonicalEtype, GraphArrays
from sar.partition.progress import Progress, silent
from sar.partition.sources.assemble import Edges, Nodes, Values, assemble
from sar.partition.sources.open import closest
from sar.partition.sources.tables import Table, parquet_schema, table_of

_KINDS = {"csv": "csv", "parquet": "parquet", "numpy": "npy"}


def read_chunked(
    path: Path, scratch: Path, *, allow_nan: bool = False, progress: Progress = silent
) -> GraphArrays:
    """The graph of a `metadata.json`; what is copied lies in ``scratch``.

    allow_nan: take features and weights that are no finite numbers.

    Raises ValueError naming the file and the key, or the row and the value; FileNotFoundError;
    OSError for a full disk.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    metadata = _Metadata(path, content)
    name = content.get("graph_name", path.parent.name)
    if not isinstance(name, str) or not name or "/" in name:
        raise metadata.error("graph_name", f"is {name!r}, expected a text without '/'")
    nodes = metadata.nodes()
    edges = metadata.edges(nodes)
    return assemble(name, nodes, edges, Path(scratch), allow_nan, progress)


class _Metadata:
    """Checks the JSON, part by part; errors name the file and the key."""

    def __init__(self, path: Path, content: Any) -> None:
        self._path = path
        self._content = self.mapping(content, "the whole file")

    def error(self, where: str, what: str) -> ValueError:
        return ValueError(f"{self._path}: {where}: {what}")

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(where, f"is {type(value).__name__}, expected an object")
        return value

    def nodes(self) -> dict[str, Nodes]:
        data = self.mapping(self._content.get("node_data", {}), "node_data")
        counts = dict(self._counts("node"))
        self._check_known(data, counts, "node_data")
        return {
            ntype: Nodes(
                sum(chunks), None, self._data(data.get(ntype), f"node_data.{ntype}", chunks)
            )
            for ntype, chunks in counts.items()
        }

    def edges(self, nodes: Mapping[str, Nodes]) -> list[Edges]:
        tables = self.mapping(self._content.get("edges"), "edges")
        data = self.mapping(self._content.get("edge_data", {}), "edge_data")
        counts = dict(self._counts("edge"))
        self._check_known(data, counts, "edge_data")
        self._check_known(tables, counts, "edges")
        found = []
        for text, chunks in counts.items():
            etype = self._etype(text, nodes)
            table = self._table(tables.get(text), f"edges.{text}", chunks)
            columns = self._data(data.get(text), f"edge_data.{text}", chunks)
            found.append(Edges(etype, table, 0, 1, columns))
        return found

    def _counts(self, what: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Each type, and how many of it are in each chunk; newer files tell only the sum."""
        types = self._content.get(f"{what}_type")
        if not isinstance(types, list) or not types or not all(isinstance(t, str) for t in types):
            raise self.error(f"{what}_type", "expected a list of names")
        if len(set(types)) != len(types):
            raise self.error(f"{what}_type", "names a type twice")
        key = f"num_{what}s_per_chunk"
        if key not in self._content and f"num_{what}s_per_type" in self._content:
            key = f"num_{what}s_per_type"
        counts = self._content.get(key)
        if not isinstance(counts, list) or len(counts) != len(types):
            raise self.error(key, f"expected a list with an entry for each of {types}")
        for name, chunks in zip(types, counts):
            chunks = chunks if isinstance(chunks, list) else [chunks]
            if not all(type(count) is int and count >= 0 for count in chunks):
                raise self.error(f"{key}, {name!r}", f"is {chunks!r}, expected counts")
            yield name, tuple(chunks)

    def _check_known(self, given: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
        for name in given:
            if name not in known:
                near = closest(name, known)
                raise self.error(where, f"type {name!r} is unknown{near}; known: {list(known)}")

    def _etype(self, text: str, nodes: Mapping[str, Nodes]) -> CanonicalEtype:
        parts = text.split(":")
        if len(parts) != 3 or not all(parts):
            raise self.error("edge_type", f"is {text!r}, expected 'source:name:destination'")
        for ntype in (parts[0], parts[2]):
            if ntype not in nodes:
                raise self.error(
                    "edge_type",
                    f"{text!r}: {ntype!r} is not among the nodes{closest(ntype, nodes)}",
                )
        return parts[0], parts[1], parts[2]

    def _data(self, given: Any, where: str, chunks: tuple[int, ...]) -> dict[str, Values]:
        columns = {}
        for name, entry in self.mapping(given or {}, where).items():
            table = self._table(entry, f"{where}.{name}", chunks)
            if table.kind == "npy":
                columns[name] = Values(table)
            else:
                shape = _stored_shape(table) if table.kind == "parquet" else ()
                columns[name] = Values(table, tuple(range(table.width())), shape=shape)
        return columns

    def _table(self, entry: Any, where: str, chunks: tuple[int, ...]) -> Table:
        entry = self.mapping(entry, where)
        form = self.mapping(entry.get("format"), f"{where}.format")
        kind, files = form.get("name"), entry.get("data")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise self.error(f"{where}.format.name", f"is {kind!r}, expected one of {list(_KINDS)}")
        if not isinstance(files, list) or not files or not all(isinstance(f, str) for f in files):
            raise self.error(f"{where}.data", "expected a list of names of files")
        if len(chunks) == len(files):
            rows: tuple[int, ...] | None = chunks
        elif len(chunks) == 1:
            rows = None  # the sum is checked when all is read
        else:
            raise self.error(f"{where}.data", f"has {len(files)} files, expected {len(chunks)}")
        delimiter = form.get("delimiter", " " if kind == "csv" else None)
        if delimiter is not None and not isinstance(delimiter, str):
            raise self.error(f"{where}.format.delimiter", f"is {delimiter!r}, expected a character")
        paths = [self._path.parent / file for file in files]
        return table_of(paths, kind=_KINDS[kind], delimiter=delimiter, header=False, rows=rows)


def _stored_shape(table: Table) -> tuple[int, ...]:
    """What a row's shape was, where DGL's tools made columns of its numbers; else nothing."""
    told = (parquet_schema(table.paths[0]).metadata or {}).get(b"shape")
    sizes = [int(size) for size in re.findall(rb"\d{1,9}", told)] if told else []
    return tuple(sizes[1:])
