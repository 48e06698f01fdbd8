"""A graph that a YAML or JSON file describes, and bare files of edges.

`docs/formats.md` has an example and the table of keys. A type with `ids: external`, or about which
nothing is said among several types, has no rows, so it cannot have columns.
"""

from __future__ import annotations

import json
import reprlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sar.options import closest_name
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, EType, GraphArrays, need
from sar.partition.progress import Progress, silent
from sar.partition.sources.assemble import Edges, Nodes, Values, assemble
from sar.partition.sources.blocks import DTYPES, Key
from sar.partition.sources.tables import Table, find_files, table_of

_EXTERNAL, _TEXT = "external", "text"
_COLUMN_KEYS = ("files", "column", "columns", "delimiter", "dtype")


def read_description(
    path: Path, scratch: Path, *, allow_nan: bool = False, progress: Progress = silent
) -> GraphArrays:
    """The graph that the file describes; edges and copied columns lie in ``scratch``. ``allow_nan``
    takes features and weights that are no finite numbers.

    Raises ValueError naming the file, and the key, or the row and the value; FileNotFoundError for
    files that are not there; OSError for a full disk.
    """
    reader = _Reader(Path(path))
    content = reader.table(_load(reader.path), ("name", "nodes", "edges"), "the description")
    given: Any = content.get("edges")
    is_good = isinstance(given, list) and given
    reader.want(is_good, "edges", given, "a list with an entry for each type")
    edges: list[Edges] = []
    for number, value in enumerate(given):
        one = reader.edges(value, f"edges[{number}]")
        is_new = one.etype not in [before.etype for before in edges]
        reader.need(is_new, f"edges[{number}]", f"type {one.etype} is there twice")
        edges.append(one)
    nodes = reader.nodes(content.get("nodes"), edges)
    name = reader.graph_name(content.get("name", reader.path.stem), "name")
    return assemble(name, nodes, edges, Path(scratch), allow_nan, progress)


def read_edges(
    paths: Sequence[Path],
    scratch: Path,
    name: str,
    *,
    allow_nan: bool = False,
    progress: Progress = silent,
) -> GraphArrays:
    """A homogeneous graph out of files of edges alone; raises as :func:`read_description`.

    Columns `src` and `dst`, or else the first two, are ids: integers are the numbers of nodes,
    texts get numbers in the order in which they come. Other columns of numbers become edge data;
    columns of texts are left out, with a warning.
    """
    table = table_of([Path(path) for path in paths])
    src, dst = _ends(table)
    kinds = table.numbers([key for key in table.keys() if key not in (src, dst)])
    used = {
        key if isinstance(key, str) else f"column{key}": Values(table, (key,))
        for key, is_number in kinds.items()
        if is_number
    }
    texts = [key for key, is_number in kinds.items() if not is_number]
    if texts:
        warnings.warn(f"{table.paths[0]}: columns {texts} hold no numbers: left out", stacklevel=2)
    edges = [Edges(ETYPE_HOMO, table, src, dst, used)]
    nodes = {NTYPE_HOMO: _bare(edges[0])}
    return assemble(name, nodes, edges, Path(scratch), allow_nan, progress)


def _ends(table: Table) -> tuple[Key, Key]:
    keys = table.keys()
    need(len(keys) > 1, f"{table.paths[0]}: has columns {keys}, expected two of ids at least")
    return ("src", "dst") if {"src", "dst"} <= set(keys) else (keys[0], keys[1])


def _bare(edges: Edges) -> Nodes:
    """Nodes that nobody described: external ids if both columns of ends are texts."""
    return Nodes(dense=any(edges.table.integers((edges.src, edges.dst)).values()))


def _load(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text, object_pairs_hook=_once)
        return yaml.load(text, _Loader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        lines = str(error).split("\n")
        raise ValueError(f"{path}: cannot be read: {' '.join(map(str.strip, lines))}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping; ``ValueError`` for a repeated key, of which one would be lost without a word."""
    keys = [key for key, _ in pairs]
    for number, key in enumerate(keys):
        need(key not in keys[:number], f"key {key!r} is there twice")
    return dict(pairs)


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        _once([(self.construct_object(key, deep=True), None) for key, _ in node.value])
        return super().construct_mapping(node, deep)


class Checked:
    """Checks a file that describes a graph; errors name the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def need(self, is_good: object, where: str, what: str) -> None:
        need(is_good, f"{self.path}: {where}: {what}")

    def want(self, is_good: object, where: str, value: Any, expected: str) -> None:
        # What is nested deep or long is cut: an alias can make a few lines endless.
        self.need(is_good, where, f"is {reprlib.repr(value)}, expected {expected}")

    def known(self, name: Any, names: Collection[str], where: str, what: str) -> None:
        near = "" if name in names else closest_name(str(name), names)
        text = f"{what} {name!r} is unknown{near}; expected {', '.join(names)}"
        self.need(name in names, where, text)

    def texts(self, value: Any, where: str, expected: str) -> list[str]:
        self.want(isinstance(value, list) and value, where, value, expected)
        self.want(all(isinstance(one, str) and one for one in value), where, value, expected)
        return value

    def delimiter(self, value: Any, where: str) -> str | None:
        is_good = value is None or isinstance(value, str)
        self.want(is_good, f"{where}.delimiter", value, "a character")
        return value

    def graph_name(self, name: Any, where: str) -> str:
        is_good = isinstance(name, str) and name and "/" not in name
        self.want(is_good, where, name, "a text without '/'")
        return name


class _Reader(Checked):
    def table(self, value: Any, keys: Sequence[str], where: str) -> dict[str, Any]:
        self.want(isinstance(value, dict), where, value, f"a mapping of {', '.join(keys)}")
        for key in value:
            self.known(key, keys, where, "key")
        return value

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        found = {} if value is None else value
        is_good = isinstance(found, dict) and all(isinstance(one, str) and one for one in found)
        self.want(is_good, where, value, "a mapping with names as keys")
        return found

    def files(self, value: Mapping[str, Any], where: str, keys: Sequence[Key]) -> Table:
        """The table of ``files``; a number among ``keys``: no first line that names columns."""
        given = value.get("files")
        given = [given] if isinstance(given, str) else given
        patterns = self.texts(given, f"{where}.files", "names of files")
        delimiter = self.delimiter(value.get("delimiter"), where)
        try:
            paths = find_files(self.path.parent, patterns)
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"{self.path}: {where}.files: {error}") from error
        header = not any(isinstance(key, int) for key in keys) if keys else None
        return table_of(paths, delimiter=delimiter, header=header)

    def edges(self, value: Any, where: str) -> Edges:
        keys = ("type", "files", "src", "dst", "columns", "delimiter")
        value = self.table(value, keys, where)
        etype = self.etype(value.get("type"), f"{where}.type")
        given = [self.key(value[end], f"{where}.{end}") for end in ("src", "dst") if end in value]
        is_good = len(given) != 1
        self.need(is_good, where, "has one of 'src' and 'dst', expected both or none")
        table = self.files(value, where, given)
        src, dst = given or _ends(table)
        columns = {}
        for name, one in self.mapping(value.get("columns"), f"{where}.columns").items():
            place = f"{where}.columns.{name}"
            if isinstance(one, dict):
                columns[name] = self.values(one, place)
            else:
                columns[name] = Values(table, self.keys(one, place))
        return Edges(etype, table, src, dst, columns)

    def etype(self, value: Any, where: str) -> EType:
        if value is None:
            return ETYPE_HOMO
        expected = "[source, name, destination]"
        names = self.texts(value, where, expected)
        self.want(len(names) == 3, where, value, expected)
        for one in names:
            self.check_name(one, where)
        return names[0], names[1], names[2]

    def check_name(self, name: str, where: str) -> None:
        is_good = name and not set("/:") & set(name) and not name.startswith(".")
        self.need(is_good, where, f"name {name!r}, expected one without '/', ':' and leading '.'")

    def key(self, value: Any, where: str) -> Key:
        is_good = isinstance(value, (str, int)) and not isinstance(value, bool) and value != ""
        self.want(is_good, where, value, "a column's name or number")
        return value

    def keys(self, value: Any, where: str) -> tuple[Key, ...]:
        values = value if isinstance(value, list) else [value]
        self.need(values, where, "names no column")
        return tuple(self.key(one, where) for one in values)

    def values(self, value: Any, where: str) -> Values:
        """One column: `{files, column | columns, delimiter, dtype}`."""
        value = self.table(value, _COLUMN_KEYS, where)
        is_good = "column" not in value or "columns" not in value
        self.need(is_good, where, "has 'column' and 'columns', expected one of them")
        keys, dtype = value.get("column", value.get("columns")), value.get("dtype")
        found = None if keys is None else self.keys(keys, where)
        table = self.files(value, where, found or ())
        if dtype is not None:
            self.known(dtype, DTYPES, f"{where}.dtype", "type of number")
        need = "a 'column'" if found is None else "no 'column': its rows are taken whole"
        is_good = (found is None) == (table.kind == "npy")
        self.need(is_good, where, f"{table.paths[0].name} needs {need}")
        return Values(table, found, dtype)

    def nodes(self, value: Any, edges: Sequence[Edges]) -> dict[str, Nodes]:
        named = [ntype for one in edges for ntype in (one.etype[0], one.etype[2])]
        if value is None and set(named) == {NTYPE_HOMO} and len(edges) == 1:
            return {NTYPE_HOMO: _bare(edges[0])}
        given = self.mapping(value, "nodes")
        for ntype in named if given else ():
            self.known(ntype, given, "edges", "type of nodes")
        found = {ntype: self.node(given.get(ntype), f"nodes.{ntype}") for ntype in (*given, *named)}
        for ntype in found:
            self.check_name(ntype, "nodes")
        return found

    def node(self, value: Any, where: str) -> Nodes:
        value = self.table({} if value is None else value, ("count", "ids", "columns"), where)
        count, ids = value.get("count"), value.get("ids")
        is_good = count is None or (type(count) is int and count >= 0)
        self.want(is_good, f"{where}.count", count, "a number of nodes")
        is_good = count is None or ids is None
        self.need(is_good, where, "has 'count' and 'ids', expected one of them")
        given = self.mapping(value.get("columns"), f"{where}.columns")
        columns = {n: self.values(one, f"{where}.columns.{n}") for n, one in given.items()}
        if ids in (None, _EXTERNAL, _TEXT):
            is_good = not columns or count is not None
            self.need(is_good, where, "has columns, which need 'count' or a column of 'ids'")
            return Nodes(count, None, columns, texts=ids == _TEXT)
        return Nodes(None, self.ids(ids, f"{where}.ids"), columns, texts=ids.get("dtype") == _TEXT)

    def ids(self, value: Any, where: str) -> Values:
        """`{files, column, delimiter, dtype: text}`."""
        expected = f"a column, {_EXTERNAL!r} or {_TEXT!r}"
        self.want(isinstance(value, dict), where, value, expected)
        dtype = value.get("dtype", _TEXT)
        self.want(dtype == _TEXT, f"{where}.dtype", dtype, repr(_TEXT))
        column = self.values({k: v for k, v in value.items() if k != "dtype"}, where)
        self.need(len(column.keys or (0,)) == 1, where, "expected one column")
        return column
