"""Digests of partitions: written into their JSON, compared when they are loaded.

The JSON's key ``sar`` (which DGL ignores) holds XXH3-128 digests in hexadecimal: of each part's
graph file, of each array of its feature files with the array's dtype and shape, of the graph before
it was cut, and of the rest of the JSON. They tell damage, not forgery.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from sar.errors import PartitionError
from sar.partition.arrays import GraphArrays
from sar.partition.column import bytes_of
from sar.partition.progress import Counter, Progress, blocks, rows_in, silent

KEY = "sar"
_HEX = 32
_CHARACTERS = set("0123456789abcdef")


@dataclass(frozen=True)
class ArrayDigest:
    """What an array of a feature file has to be."""

    dtype: str
    shape: list[int]
    digest: str


@dataclass(frozen=True)
class FileDigest:
    """What a file has to be: its size, and its digest or those of its arrays by name."""

    size: int
    digest: str = ""
    arrays: dict[str, ArrayDigest] = field(default_factory=dict)


@dataclass(frozen=True)
class Digests:
    """All that the key ``sar`` holds.

    Attributes:
        graph: digest of the graph before it was cut, the same for every cut; ``None`` where nobody
            knows it, as the digests were added later.
        files: by path relative to the JSON's folder.
    """

    graph: str | None
    files: dict[str, FileDigest]


def graph_digest(graph: GraphArrays, progress: Progress = silent) -> str:
    """Of nodes, edges and data in the order of the input, block after block: maps stay in files."""
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
    """The JSON's content with its key ``sar``."""
    files = {
        name: {key: value for key, value in asdict(one).items() if value or key == "size"}
        for name, one in digests.files.items()
    }
    told: dict[str, Any] = {"graph": digests.graph, "files": files}
    return {**content, KEY: {**told, "json": _json_digest({**content, KEY: told})}}


def read_digests(config: dict[str, Any], path: str) -> Digests | None:
    """What the JSON at ``path`` tells; ``None`` for partitions that hold no digests.

    Raises ``PartitionError`` for a JSON that is not as it was written.
    """
    if KEY not in config:
        return None
    told = config[KEY]
    if not isinstance(told, dict) or not isinstance(told.get("files"), dict):
        raise PartitionError(f"{path}: key {KEY!r} holds no digests")
    own = {key: value for key, value in told.items() if key != "json"}
    try:
        found = _json_digest({**config, KEY: own})
    except RecursionError as error:
        raise PartitionError(f"{path}: is nested too deep, which no partitions are") from error
    if told.get("json") != found:
        raise PartitionError(
            f"{path}: is not as it was written: damaged, or edited by hand. After an edit, remove "
            f"its key {KEY!r}; the partitions are then loaded without verification"
        )
    files = {name: _file_digest(entry, name, path) for name, entry in told["files"].items()}
    graph = told.get("graph")
    return Digests(None if graph is None else _hex(graph, "the graph", path), files)


def _file_digest(entry: Any, name: str, path: str) -> FileDigest:
    if not isinstance(entry, dict) or not isinstance(entry.get("size"), int):
        raise PartitionError(f"{path}: the digests of {name!r} are {entry!r}, expected an object")
    if "digest" in entry:
        return FileDigest(entry["size"], _hex(entry["digest"], name, path))
    told, arrays = entry.get("arrays", {}), {}
    if not isinstance(told, dict):
        raise PartitionError(f"{path}: the digests of {name!r} are {told!r}, expected an object")
    for array, one in told.items():
        if not isinstance(one, dict) or set(one) != {"dtype", "shape", "digest"}:
            raise PartitionError(f"{path}: the digest of {array!r} in {name!r} is {one!r}")
        digest = _hex(one["digest"], array, path)
        arrays[array] = ArrayDigest(one["dtype"], one["shape"], digest)
    return FileDigest(entry["size"], arrays=arrays)


def _hex(value: Any, what: str, path: str) -> str:
    if not isinstance(value, str) or len(value) != _HEX or not set(value) <= _CHARACTERS:
        raise PartitionError(f"{path}: the digest of {what} is {value!r}, expected {_HEX} digits")
    return value


def _json_digest(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True))


def relative(path: str, folder: str | os.PathLike) -> str:
    """The name of a file in :class:`Digests`."""
    return Path(os.path.relpath(path, folder)).as_posix()
