"""Graphs in the chunked format that DGL's tools for distributed partitioning read: `metadata.json`.

It names types, counts of each chunk, and files: of edges (`csv`, `parquet`: the first two columns
are ids inside their types; `numpy`) and of data, whose columns become one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sar.partition.arrays import EType, GraphArrays
from sar.partition.progress import Progress, silent
from sar.partition.sources.assemble import Edges, Nodes, Values, assemble
from sar.partition.sources.description import Checked
from sar.partition.sources.tables import Table, parquet_schema, table_of

_KINDS = {"csv": "csv", "parquet": "parquet", "numpy": "npy"}


def read_chunked(
    path: Path, scratch: Path, *, allow_nan: bool = False, progress: Progress = silent
) -> GraphArrays:
    """The graph of a `metadata.json`; arguments and errors as of
    :func:`sar.partition.sources.description.read_description`."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    metadata = _Metadata(path, content)
    name = metadata.graph_name(content.get("graph_name", path.parent.name), "graph_name")
    nodes = metadata.nodes()
    edges = metadata.edges(nodes)
    return assemble(name, nodes, edges, Path(scratch), allow_nan, progress)


class _Metadata(Checked):
    def __init__(self, path: Path, content: Any) -> None:
        super().__init__(path)
        self._content = self.mapping(content, "the whole file")

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        self.want(isinstance(value, dict), where, value, "an object")
        return value

    def nodes(self) -> dict[str, Nodes]:
        counts = dict(self._counts("node"))
        data, found = self._by_type("node_data", counts, {}), {}
        for ntype, chunks in counts.items():
            columns = self._data(data.get(ntype), f"node_data.{ntype}", chunks)
            found[ntype] = Nodes(sum(chunks), None, columns)
        return found

    def edges(self, nodes: Mapping[str, Nodes]) -> list[Edges]:
        counts, found = dict(self._counts("edge")), []
        tables = self._by_type("edges", counts, None)
        data = self._by_type("edge_data", counts, {})
        for text, chunks in counts.items():
            etype = self._etype(text, nodes)
            table = self._table(tables.get(text), f"edges.{text}", chunks)
            columns = self._data(data.get(text), f"edge_data.{text}", chunks)
            found.append(Edges(etype, table, 0, 1, columns))
        return found

    def _counts(self, what: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Each type, and how many of it are in each chunk; newer files tell only the sum."""
        where = f"{what}_type"
        types = self.texts(self._content.get(where), where, "a list of names")
        self.need(len(set(types)) == len(types), where, "names a type twice")
        key = f"num_{what}s_per_chunk"
        if key not in self._content and f"num_{what}s_per_type" in self._content:
            key = f"num_{what}s_per_type"
        counts: Any = self._content.get(key)
        is_good = isinstance(counts, list) and len(counts) == len(types)
        self.want(is_good, key, counts, f"a list with an entry for each of {types}")
        for name, chunks in zip(types, counts):
            chunks = chunks if isinstance(chunks, list) else [chunks]
            is_good = all(type(count) is int and count >= 0 for count in chunks)
            self.want(is_good, f"{key}, {name!r}", chunks, "counts")
            yield name, tuple(chunks)

    def _by_type(self, key: str, known: Mapping[str, Any], default: Any) -> dict[str, Any]:
        given = self.mapping(self._content.get(key, default), key)
        for name in given:
            self.known(name, known, key, "type")
        return given

    def _etype(self, text: str, nodes: Mapping[str, Nodes]) -> EType:
        parts, where = text.split(":"), "edge_type"
        is_good = len(parts) == 3 and all(parts)
        self.want(is_good, where, text, "'source:name:destination'")
        for ntype in (parts[0], parts[2]):
            self.known(ntype, nodes, f"{where} {text!r}", "type of nodes")
        return parts[0], parts[1], parts[2]

    def _data(self, given: Any, where: str, chunks: tuple[int, ...]) -> dict[str, Values]:
        columns = {}
        for name, entry in self.mapping(given or {}, where).items():
            table = self._table(entry, f"{where}.{name}", chunks)
            if table.kind == "npy":
                columns[name] = Values(table)
                continue
            told = b""  # what a row's shape was, where DGL's tools made columns of its numbers
            if table.kind == "parquet":
                told = (parquet_schema(table.paths[0]).metadata or {}).get(b"shape", b"")
            shape = tuple(map(int, re.findall(rb"\d{1,9}", told)[1:]))
            columns[name] = Values(table, tuple(range(len(table.keys()))), shape=shape)
        return columns

    def _table(self, entry: Any, where: str, chunks: tuple[int, ...]) -> Table:
        entry = self.mapping(entry, where)
        form = self.mapping(entry.get("format"), f"{where}.format")
        kind: Any = form.get("name")
        self.known(kind, tuple(_KINDS), f"{where}.format.name", "format")
        files = self.texts(entry.get("data"), f"{where}.data", "a list of names of files")
        what = f"has {len(files)} files, expected {len(chunks)}"
        self.need(len(chunks) in (1, len(files)), f"{where}.data", what)
        rows = chunks if len(chunks) == len(files) else None  # the sum is checked when all is read
        given = form.get("delimiter", " " if kind == "csv" else None)
        delimiter = self.delimiter(given, f"{where}.format")
        paths = [self.path.parent / file for file in files]
        return table_of(paths, kind=_KINDS[kind], delimiter=delimiter, header=False, rows=rows)
