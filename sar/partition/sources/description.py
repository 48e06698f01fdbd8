"""A graph that a YAML or JSON file describes, and bare files of edges.

```yaml
name: papers
nodes:                      # left out: one type of nodes, whose ids are 0..N-1, N the largest + 1
  paper:
    count: 1000             # ids are 0..999
    ids: {files: "papers-*.parquet", column: paper_id}   # or: external ids, row r is node r
    columns:
      feat: {files: feat.npy}
      emb: {files: "papers-*.parquet", columns: [e0, e1]}
edges:
  - type: [paper, cites, paper]    # left out: ("_N", "_E", "_N")
    files: ["cites-*.parquet"]     # relative to the description
    src: citing                    # a column's name, or number where files name none
    dst: cited
    columns: {weight: w}
```

`ids: external`, or nothing at all about a type among several, numbers ids of any kind in the order
in which edges name them: type after type, row after row, the source before the destination. Such a
type has no rows, so it cannot have columns. Where ids in CSV are texts that may look like integers,
say `ids: text`, or of a table `dtype: text`.
"""

from __future__ import annotations

import json
import reprlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, CanonicalEtype, GraphArrays
from sar.partition.progress import Progress, silent
from sar.partition.sources.assemble import Edges, Nodes, Values, assemble
from sar.partition.sources.blocks import DTYPES, Key
from sar.partition.sources.open import closest
from sar.partition.sources.tables import Table, find_files, table_of

_EXTERNAL, _TEXT = "external", "text"
_COLUMN_KEYS = ("files", "column", "columns", "delimiter", "dtype")


def read_description(
    path: Path, scratch: Path, *, allow_nan: bool = False, progress: Progress = silent
) -> GraphArrays:
    """The graph that the file describes; edges and copied columns lie in ``scratch``.

    allow_nan: take features and weights that are no finite numbers.

    Raises ValueError naming the file, and the key, or the row and the value; FileNotFoundError for
    files that are not there; OSError for a full disk.
    """
    path = Path(path)
    reader = _Reader(path)
    content = reader.table(_load(path), ("name", "nodes", "edges"), "the description")
    edges = [reader.edges(one, number) for number, one in enumerate(reader.list(content, "edges"))]
    for number, one in enumerate(edges):
        if one.etype in [before.etype for before in edges[:number]]:
            raise reader.error(f"edges[{number}]", f"type {one.etype} is there twice")
    nodes = reader.nodes(content.get("nodes"), [one.etype for one in edges], edges)
    name = content.get("name", path.stem)
    if not isinstance(name, str) or not name or "/" in name:
        raise reader.error("name", f"is {name!r}, expected a text without '/'")
    return assemble(name, nodes, edges, Path(scratch), allow_nan, progress)


def read_edges(
    paths: Sequence[Path],
    scratch: Path,
    name: str,
    *,
    allow_nan: bool = False,
    progress: Progress = silent,
) -> GraphArrays:
    """A homogeneous graph out of files of edges alone.

    The columns `src` and `dst`, where there are such, else the first two, are ids: integers are
    the numbers of the nodes, texts get numbers in the order in which they come. Other columns of
    numbers become edge data; columns of texts are left out, with a warning.

    Raises as :func:`read_description`.
    """
    table = table_of([Path(path) for path in paths])
    names = table.names()
    src, dst = _ends(table)
    keys = names if names is not None else list(range(table.width()))
    kinds = table.numbers([key for key in keys if key not in (src, dst)])
    used = {str(key): Values(table, (key,)) for key, number in kinds.items() if number}
    if names is None:
        used = {f"column{key}": values for key, values in used.items()}
    texts = [key for key, number in kinds.items() if not number]
    if texts:
        warnings.warn(f"{table.paths[0]}: columns {texts} hold no numbers: left out", stacklevel=2)
    edges = [Edges(ETYPE_HOMO, table, src, dst, used)]
    nodes = {NTYPE_HOMO: _bare(table, (src, dst))}
    return assemble(name, nodes, edges, Path(scratch), allow_nan, progress)


def _ends(table: Table) -> tuple[Key, Key]:
    """The columns of ids where nobody named them."""
    names = table.names()
    if names is None:
        return 0, 1
    if "src" in names and "dst" in names:
        return "src", "dst"
    if len(names) < 2:
        raise ValueError(f"{table.paths[0]}: has columns {names}, expected two of ids at least")
    return names[0], names[1]


def _bare(table: Table, ends: Sequence[Key]) -> Nodes:
    """Nodes of a graph without a word about them: if both columns are texts, external ids."""
    return Nodes(dense=any(table.integers(ends).values()))


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
    """A mapping, none of whose keys is there twice: of two, one would be lost without a word."""
    keys = [key for key, _ in pairs]
    for number, key in enumerate(keys):
        if key in keys[:number]:
            raise ValueError(f"key {key!r} is there twice")
    return dict(pairs)


class _Loader(yaml.SafeLoader):
    """Plain values only, and each key once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        _once([(self.construct_object(key, deep=True), None) for key, _ in node.value])
        return super().construct_mapping(node, deep)


class _Reader:
    """Checks a description, part by part; errors name the file and the key."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def error(self, where: str, what: str) -> ValueError:
        return ValueError(f"{self._path}: {where}: {what}")

    def table(self, value: Any, keys: Sequence[str], where: str) -> dict[str, Any]:
        """A mapping with no other keys."""
        if not isinstance(value, dict):
            raise self.error(where, f"is {_short(value)}, expected a mapping of {', '.join(keys)}")
        for key in value:
            if key not in keys:
                near = closest(str(key), keys)
                raise self.error(where, f"key {key!r} is unknown{near}; expected {', '.join(keys)}")
        return value

    def list(self, content: Mapping[str, Any], key: str) -> list:
        value = content.get(key)
        if not isinstance(value, list) or not value:
            raise self.error(
                key, f"is {_short(value)}, expected a list with an entry for each type"
            )
        return value

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        """Of anything by name; nothing is an empty one."""
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(k, str) and k for k in value):
            raise self.error(where, f"is {_short(value)}, expected a mapping with names as keys")
        return value

    def files(self, value: Mapping[str, Any], where: str, *, header: bool | None) -> Table:
        patterns = value.get("files")
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(patterns, list) or not patterns or not all(map(_is_text, patterns)):
            raise self.error(f"{where}.files", f"is {_short(patterns)}, expected names of files")
        delimiter = value.get("delimiter")
        if delimiter is not None and not isinstance(delimiter, str):
            raise self.error(f"{where}.delimiter", f"is {delimiter!r}, expected a character")
        try:
            paths = find_files(self._path.parent, patterns)
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"{self._path}: {where}.files: {error}") from error
        return table_of(paths, delimiter=delimiter, header=header)

    def edges(self, value: Any, number: int) -> Edges:
        where = f"edges[{number}]"
        keys = ("type", "files", "src", "dst", "columns", "delimiter")
        value = self.table(value, keys, where)
        etype = self.etype(value.get("type"), where)
        given = [self.key(value[end], f"{where}.{end}") for end in ("src", "dst") if end in value]
        if len(given) == 1:
            raise self.error(where, "has one of 'src' and 'dst', expected both or none")
        table = self.files(value, where, header=_header(given))
        src, dst = given or _ends(table)
        columns = {}
        for name, one in self.mapping(value.get("columns"), f"{where}.columns").items():
            place = f"{where}.columns.{name}"
            if isinstance(one, dict):
                columns[name] = self.values(one, place)
            else:
                columns[name] = Values(table, self.keys(one, place))
        return Edges(etype, table, src, dst, columns)

    def etype(self, value: Any, where: str) -> CanonicalEtype:
        if value is None:
            return ETYPE_HOMO
        if not isinstance(value, list) or len(value) != 3 or not all(map(_is_text, value)):
            raise self.error(
                f"{where}.type", f"is {_short(value)}, expected [source, name, destination]"
            )
        for one in value:
            self.check_name(one, f"{where}.type")
        return value[0], value[1], value[2]

    def check_name(self, name: str, where: str) -> None:
        if not name or "/" in name or ":" in name or name.startswith("."):
            raise self.error(where, f"name {name!r}, expected one without '/', ':' and leading '.'")

    def key(self, value: Any, where: str) -> Key:
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise self.error(where, f"is {_short(value)}, expected a column's name or number")
        return value

    def keys(self, value: Any, where: str) -> tuple[Key, ...]:
        values = value if isinstance(value, list) else [value]
        if not values:
            raise self.error(where, "names no column")
        return tuple(self.key(one, where) for one in values)

    def values(self, value: Any, where: str) -> Values:
        """One column: `{files, column | columns, delimiter, dtype}`."""
        value = self.table(value, _COLUMN_KEYS, where)
        if "column" in value and "columns" in value:
            raise self.error(where, "has 'column' and 'columns', expected one of them")
        keys = value.get("column", value.get("columns"))
        found = None if keys is None else self.keys(keys, where)
        table = self.files(value, where, header=_header(found or ()))
        dtype = value.get("dtype")
        if dtype is not None and dtype not in DTYPES:
            near = closest(str(dtype), DTYPES)
            raise self.error(f"{where}.dtype", f"is {dtype!r}{near}; expected {', '.join(DTYPES)}")
        if (found is None) != (table.kind == "npy"):
            need = "a 'column'" if found is None else "no 'column': its rows are taken whole"
            raise self.error(where, f"{table.paths[0].name} needs {need}")
        return Values(table, found, dtype)

    def nodes(
        self, value: Any, etypes: Sequence[CanonicalEtype], edges: Sequence[Edges]
    ) -> dict[str, Nodes]:
        named = [ntype for source, _, dst in etypes for ntype in (source, dst)]
        if value is None and set(named) == {NTYPE_HOMO} and len(edges) == 1:
            return {NTYPE_HOMO: _bare(edges[0].table, (edges[0].src, edges[0].dst))}
        given = self.mapping(value, "nodes")
        unknown = [ntype for ntype in named if given and ntype not in given]
        if unknown:
            near = closest(unknown[0], given)
            raise self.error("edges", f"type {unknown[0]!r} is not among the nodes{near}")
        found = {ntype: self.node(given.get(ntype), f"nodes.{ntype}") for ntype in (*given, *named)}
        for ntype in found:
            self.check_name(ntype, "nodes")
        return found

    def node(self, value: Any, where: str) -> Nodes:
        value = self.table({} if value is None else value, ("count", "ids", "columns"), where)
        count, ids = value.get("count"), value.get("ids")
        if count is not None and (
            isinstance(count, bool) or not isinstance(count, int) or count < 0
        ):
            raise self.error(f"{where}.count", f"is {_short(count)}, expected a number of nodes")
        if count is not None and ids is not None:
            raise self.error(where, "has 'count' and 'ids', expected one of them")
        given = self.mapping(value.get("columns"), f"{where}.columns")
        columns = {n: self.values(one, f"{where}.columns.{n}") for n, one in given.items()}
        if ids in (None, _EXTERNAL, _TEXT):
            if columns and count is None:
                raise self.error(where, "has columns, which need 'count' or a column of 'ids'")
            return Nodes(count, None, columns, texts=ids == _TEXT)
        return Nodes(None, self.ids(ids, f"{where}.ids"), columns, texts=ids.get("dtype") == _TEXT)

    def ids(self, value: Any, where: str) -> Values:
        """`{files, column, delimiter, dtype: text}`."""
        if not isinstance(value, dict):
            raise self.error(
                where, f"is {_short(value)}, expected a column, {_EXTERNAL!r} or {_TEXT!r}"
            )
        if value.get("dtype", _TEXT) != _TEXT:
            raise self.error(f"{where}.dtype", f"is {value['dtype']!r}, expected {_TEXT!r}")
        column = self.values({k: v for k, v in value.items() if k != "dtype"}, where)
        if column.keys and len(column.keys) != 1:
            raise self.error(where, "expected one column")
        return column


def _header(keys: Sequence[Key]) -> bool | None:
    """Numbers are for files whose first line names no columns."""
    if not keys:
        return None
    return not any(isinstance(key, int) for key in keys)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _short(value: Any) -> str:
    """What is nested deep or long is cut: an alias can make a few lines endless."""
    return reprlib.repr(value)
