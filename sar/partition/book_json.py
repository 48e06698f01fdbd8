"""Reading a partition's JSON into a `PartitionBook`, with every check that needs no other file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from sar.errors import PartitionError
from sar.partition.arrays import NTYPE_HOMO, EType
from sar.partition.book import PartitionBook, read_digests

MAX_ID = 2**62
MAX_PARTS = 2**16
MAX_BYTES = 2**30  # of the JSON: ten times what so many parts need
_DEEPEST = 16  # folders above a file that are looked up one by one
_NUM_PARTS = re.compile(rb'"num_parts"\s*:\s*(\d+)')
_FILES = ("part_graph", "node_feats", "edge_feats")


def parse_book(path: str) -> PartitionBook:
    """The book in a JSON file; see `sar.partition.load.read_book`."""
    try:
        return _book(_load_json(path), os.path.abspath(path))
    except PartitionError as error:  # the functions below do not name the file
        raise PartitionError(f"{path}: {error}") from error


def _book(config: dict, path: str) -> PartitionBook:
    num_parts = _count(config, "num_parts")
    if not 1 <= num_parts <= MAX_PARTS:
        raise PartitionError(f"num_parts is {num_parts}, expected 1 to {MAX_PARTS}")
    ntypes = _type_names(config, "ntypes", NTYPE_HOMO)
    names = _type_names(config, "etypes", "_N:_E:_N")
    etypes = [_canonical_etype(name, ntypes) for name in names]
    if len(set(etypes)) != len(etypes):
        raise PartitionError(f"etypes names the same edge type twice: {names}")
    node_ranges = _ranges(config, "node_map", ntypes, num_parts)
    edge_ranges = _ranges(config, "edge_map", names, num_parts)
    book = PartitionBook(
        graph_name=_get(config, "graph_name", lambda name: isinstance(name, str), "a string"),
        num_parts=num_parts,
        ntypes=ntypes,
        canonical_etypes=etypes,
        node_ranges=dict(zip(ntypes, node_ranges)),
        edge_ranges=dict(zip(etypes, edge_ranges)),
        json_path=path,
        halo_hops=_count(config, "halo_hops") if "halo_hops" in config else None,
        part_method=str(config.get("part_method", "")),
        files=_part_files(config, num_parts, os.path.realpath(os.path.dirname(path))),
        digests=read_digests(config),
    )
    if book.halo_hops == 0 and num_parts > 1:
        raise PartitionError(
            "the graph was cut with num_hops=0, so edges from other parts are missing; "
            "partition it again with num_hops=1"
        )
    for key, source, total in (
        ("num_nodes", "node_map", book.num_nodes()),
        ("num_edges", "edge_map", book.num_edges()),
    ):
        if (told := _count(config, key)) != total:
            raise PartitionError(f"{key} is {told} but the ranges of {source} hold {total}")
    return book


def _load_json(path: str) -> dict:
    try:
        if os.path.isdir(path):
            raise PartitionError("a folder, expected the JSON of a partitioned graph")
        if not os.path.isfile(path):
            raise PartitionError("no such file, expected the JSON of a partitioned graph")
        if (size := os.path.getsize(path)) > MAX_BYTES:
            raise PartitionError(f"has {size} bytes, expected at most {MAX_BYTES}")
        with open(path, "rb") as stream:
            raw = stream.read()
        # Absurdly many parts are refused before the entries of all of them are parsed.
        at = raw.find(b'"num_parts"')
        found = _NUM_PARTS.match(raw, at) if at >= 0 else None
        if found and (len(found[1]) > len(str(MAX_PARTS)) or int(found[1]) > MAX_PARTS):
            told = found[1][:20].decode()
            raise PartitionError(f"num_parts is {told}, expected 1 to {MAX_PARTS}")
        config = json.loads(raw.decode("utf-8"))
    except PartitionError:
        raise
    except (OSError, ValueError, RecursionError) as err:
        raise PartitionError(
            f"not a readable JSON file ({err}), expected that of a partitioned graph; "
            "`sar partition` makes one of a graph that is not cut yet"
        ) from err
    if not isinstance(config, dict):
        raise PartitionError(f"holds a {type(config).__name__}, expected a JSON object")
    return config


def _get(config: dict, key: str, fits: Callable[[Any], bool], expected: str) -> Any:
    if key not in config:
        raise PartitionError(f"key {key!r} is missing, so this is not a partition's JSON")
    if not fits(config[key]):
        raise PartitionError(f"{key} is {_short(config[key])}, expected {expected}")
    return config[key]


def _count(config: dict, key: str) -> int:
    return _get(config, key, _is_id, "a whole number")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_ID


def _short(value: object, limit: int = 80) -> str:
    # Slices first where it can: the value may be a list of millions.
    text = repr(value[:8] if isinstance(value, list) else value)
    return text if len(text) <= limit else text[:limit] + "..."


def _type_names(config: dict, key: str, only: str) -> list[str]:
    """Type names ordered by id, from ``{name: id}``; ``only`` in files that name none."""
    ids = config.get(key, {only: 0})
    if not isinstance(ids, dict) or not ids or not all(map(_is_id, ids.values())):
        raise PartitionError(f"{key} is {_short(ids)}, expected names with ids")
    if sorted(ids.values()) != list(range(len(ids))):
        told = _short(list(ids.values()))
        raise PartitionError(f"{key} has ids {told}, expected each of 0 to {len(ids) - 1} once")
    return sorted(ids, key=lambda name: ids[name])


def _canonical_etype(name: str, ntypes: list[str]) -> EType:
    pieces = name.split(":")
    if len(pieces) == 1 and len(ntypes) == 1:
        return (ntypes[0], name, ntypes[0])  # older files name the relation only
    if len(pieces) == 1:
        raise PartitionError(
            f"edge type {name!r} has no node types, expected 'src:relation:dst'; files "
            "from before canonical edge types work for one node type only: rewrite the JSON with "
            "DGL's change_etype_to_canonical_etype tool or partition again"
        )
    if len(pieces) != 3 or pieces[0] not in ntypes or pieces[2] not in ntypes:
        raise PartitionError(
            f"edge type {name!r}, expected 'src:relation:dst' with node types of {ntypes}"
        )
    return (pieces[0], pieces[1], pieces[2])


def _ranges(config: dict, key: str, names: list[str], num_parts: int) -> list[np.ndarray]:
    """int64 ``[num_parts, 2]`` of each name, checked to tile the id space in (part, type) order.
    Empty ranges may begin anywhere in the file; here they begin where they tile."""
    typed = _id_map(config, key, names)
    parsed = [_as_ranges(typed[name], num_parts, f"{key}[{name!r}]") for name in names]
    table = np.stack(parsed, axis=1).reshape(-1, 2)
    sizes = table[:, 1] - table[:, 0]
    ends = np.cumsum(sizes)
    starts = ends - sizes
    wrong = np.flatnonzero((table[:, 0] != starts) & (sizes > 0))
    if len(wrong):
        part, type_id = divmod(int(wrong[0]), len(names))
        got, expected = int(table[wrong[0], 0]), int(starts[wrong[0]])
        problem = "overlaps the range before it" if got < expected else "leaves a gap before it"
        raise PartitionError(
            f"{key}[{names[type_id]!r}] of part {part} starts at {got} and {problem}, expected "
            f"{expected}"
        )
    tiled = np.stack([starts, ends], axis=1).reshape(num_parts, len(names), 2)
    return [np.ascontiguousarray(tiled[:, number]) for number in range(len(names))]


def _id_map(config: dict, key: str, names: list[str]) -> dict[str, list]:
    """Lists of ranges by type name under ``key``; a bare list is the first type's."""
    value = _get(config, key, lambda _: True, "")
    if isinstance(value, list):
        value = {names[0]: value}
    if isinstance(value, dict) and any(isinstance(one, str) for one in value.values()):
        value = next(one for one in value.values() if isinstance(one, str))
    if isinstance(value, str):
        raise PartitionError(
            f"{key} names the file {value!r}; graphs whose ids were not shuffled into "
            "ranges are not supported: partition again with a current DGL (reshuffle=True)"
        )
    if not isinstance(value, dict) or not all(isinstance(one, list) for one in value.values()):
        raise PartitionError(f"{key} is {_short(value)}, expected lists of ranges")
    if key == "edge_map":
        value = _match_etypes(value, names)
    if set(value) != set(names):
        raise PartitionError(f"{key} has types {sorted(value)}, expected {sorted(names)}")
    return value


def _match_etypes(value: dict, names: list[str]) -> dict:
    """Rename keys that spell an edge type differently from ``etypes`` ('r' and 's:r:d')."""
    known = {name.split(":")[1] if name.count(":") == 2 else name: name for name in names}
    renamed = {}
    for key, ranges in value.items():
        middle = key.split(":")[1] if key.count(":") == 2 else key
        differs = (key.count(":") == 2) != (known.get(middle, key).count(":") == 2)
        renamed[known[middle] if key not in names and differs else key] = ranges
    return renamed


def _as_ranges(values: list, num_parts: int, what: str) -> np.ndarray:
    """int64 ``[num_parts, 2]`` from a list of ranges or, in older files, of end offsets."""
    if len(values) != num_parts:
        raise PartitionError(
            f"{what} has {len(values)} entries, expected one for each of the {num_parts} parts"
        )
    if all(map(_is_id, values)):
        values = [list(pair) for pair in zip([0, *values[:-1]], values)]
    for part, pair in enumerate(values):
        good = isinstance(pair, list) and len(pair) == 2 and all(map(_is_id, pair))
        if not good or pair[0] > pair[1]:
            raise PartitionError(
                f"{what} of part {part} is {_short(pair)}, expected [start, end] with start <= end"
            )
    return np.array(values, dtype=np.int64).reshape(num_parts, 2)


def _part_files(config: dict, num_parts: int, root: str) -> list[dict[str, str]]:
    """Absolute paths of every part's files, checked to stay below ``root``."""

    @cache
    def real(name: str) -> str:
        """`realpath` in steps from ``root``: at once it takes seconds for ten thousand parts."""
        if name == root:
            return root
        above, _, last = name.rpartition(os.sep)
        found = f"{real(above)}{os.sep}{last}"
        if last in ("", ".", "..") or os.path.islink(found):
            return os.path.realpath(found)
        return found

    files = []
    for number in range(num_parts):
        part = f"part-{number}"
        entry = _get(config, part, lambda one: isinstance(one, dict), "file names")
        if "part_graph" not in entry:
            raise PartitionError(f"{part} names no 'part_graph' file")
        own = [key for key in _FILES if key in entry]
        files.append({key: _below(root, entry[key], f"{part}[{key!r}]", real) for key in own})
    return files


def _below(root: str, name: object, what: str, real: Callable[[str], str]) -> str:
    """Absolute real path of ``name``; ``PartitionError`` naming ``what`` if it leaves ``root``."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise PartitionError(f"{what} is {_short(name)}, expected a relative path")
    full = f"{root}{os.sep}{name}"
    try:
        found = os.path.realpath(full) if name.count("/") > _DEEPEST else real(full)
        is_below = os.path.commonpath([root, found]) == root
    except (OSError, ValueError) as err:
        raise PartitionError(f"{what} is {_short(name)}, not a usable path ({err})") from err
    if os.path.isabs(name) or not is_below:
        raise PartitionError(f"{what} is {_short(name)}, expected a path below {root}")
    return found
