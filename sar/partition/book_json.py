"""Reading a partition's JSON into a `PartitionBook`, with every check that needs no other file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import cache

import numpy as np

from sar.errors import PartitionError
from sar.partition.arrays import NTYPE_HOMO, EType
from sar.partition.book import PartitionBook, read_digests

MAX_ID = 2**62
MAX_PARTS = 2**16
MAX_BYTES = 2**30  # of the JSON: ten times what so many parts need
_DEEPEST = 16  # folders above a file that are looked up one by one
FILE_KEYS = ("part_graph", "node_feats", "edge_feats")


def parse_book(path: str) -> PartitionBook:
    """The book in a JSON file; see `sar.partition.load.read_book`."""
    config = _load_json(path)
    num_parts = _count(config, "num_parts", path)
    if not 1 <= num_parts <= MAX_PARTS:
        raise PartitionError(f"{path}: num_parts is {num_parts}, expected 1 to {MAX_PARTS}")
    ntypes = _type_names(config.get("ntypes", {NTYPE_HOMO: 0}), "ntypes", path)
    raw_etypes = _type_names(config.get("etypes", {"_N:_E:_N": 0}), "etypes", path)
    canonical = {name: _canonical_etype(name, ntypes, path) for name in raw_etypes}
    if len(set(canonical.values())) != len(canonical):
        raise PartitionError(f"{path}: etypes names the same edge type twice: {raw_etypes}")
    node_map = _typed_map(config, "node_map", ntypes, path)
    edge_map = _typed_map(config, "edge_map", raw_etypes, path)
    node_ranges = _tiled_ranges(node_map, num_parts, "node_map", path)
    edge_ranges = _tiled_ranges(edge_map, num_parts, "edge_map", path)
    book = PartitionBook(
        graph_name=_text(config, "graph_name", path),
        num_parts=num_parts,
        ntypes=ntypes,
        canonical_etypes=[canonical[name] for name in raw_etypes],
        node_ranges=node_ranges,
        edge_ranges={canonical[name]: edge_ranges[name] for name in raw_etypes},
        json_path=os.path.abspath(path),
        halo_hops=_halo_hops(config, num_parts, path),
        part_method=str(config.get("part_method", "")),
        files=_part_files(config, num_parts, path),
        digests=read_digests(config, path),
    )
    _check_total(book.num_nodes(), config, "num_nodes", "node_map", path)
    _check_total(book.num_edges(), config, "num_edges", "edge_map", path)
    return book


def _load_json(path: str) -> dict:
    try:
        if os.path.isdir(path):
            raise PartitionError(f"{path}: a folder, expected the JSON of a partitioned graph")
        if not os.path.isfile(path):
            raise PartitionError(f"{path}: no such file, expected the JSON of a partitioned graph")
        if (size := os.path.getsize(path)) > MAX_BYTES:
            raise PartitionError(f"{path}: has {size} bytes, expected at most {MAX_BYTES}")
        with open(path, "rb") as stream:
            raw = stream.read()
        _check_announced(raw, path)
        config = json.loads(raw.decode("utf-8"))
    except PartitionError:
        raise
    except (OSError, ValueError, RecursionError) as err:
        raise PartitionError(
            f"{path}: not a readable JSON file ({err}), expected that of a partitioned graph; "
            f"`sar partition` makes one of a graph that is not cut yet"
        ) from err
    if not isinstance(config, dict):
        raise PartitionError(f"{path}: holds a {type(config).__name__}, expected a JSON object")
    return config


def _check_announced(raw: bytes, path: str) -> None:
    """Refuse absurdly many parts before the entries of all of them are parsed."""
    at = raw.find(b'"num_parts"')
    found = re.compile(rb'"num_parts"\s*:\s*(\d+)').match(raw, at) if at >= 0 else None
    if found and (len(found[1]) > len(str(MAX_PARTS)) or int(found[1]) > MAX_PARTS):
        digits = found[1][:20].decode()
        raise PartitionError(f"{path}: num_parts is {digits}, expected 1 to {MAX_PARTS}")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_ID


def _require(config: dict, key: str, path: str) -> object:
    if key not in config:
        raise PartitionError(f"{path}: key {key!r} is missing, so this is not a partition's JSON")
    return config[key]


def _count(config: dict, key: str, path: str) -> int:
    value = _require(config, key, path)
    if not isinstance(value, int) or not _is_id(value):
        raise PartitionError(f"{path}: {key} is {_short(value)}, expected a whole number")
    return value


def _text(config: dict, key: str, path: str) -> str:
    value = _require(config, key, path)
    if not isinstance(value, str):
        raise PartitionError(f"{path}: {key} is {_short(value)}, expected a string")
    return value


def _short(value: object, limit: int = 80) -> str:
    # Slices first where it can: the value may be a list of millions.
    text = repr(value[:8] if isinstance(value, list) else value)
    return text if len(text) <= limit else text[:limit] + "..."


def _halo_hops(config: dict, num_parts: int, path: str) -> int | None:
    if "halo_hops" not in config:
        return None
    hops = _count(config, "halo_hops", path)
    if hops == 0 and num_parts > 1:
        raise PartitionError(
            f"{path}: the graph was cut with num_hops=0, so edges from other parts are missing; "
            "partition it again with num_hops=1"
        )
    return hops


def _type_names(ids: object, key: str, path: str) -> list[str]:
    """Type names ordered by id, from ``{name: id}``."""
    if not isinstance(ids, dict) or not ids or not all(_is_id(one) for one in ids.values()):
        raise PartitionError(f"{path}: {key} is {_short(ids)}, expected names with ids")
    if sorted(ids.values()) != list(range(len(ids))):
        raise PartitionError(
            f"{path}: {key} has ids {_short(list(ids.values()))}, expected "
            f"each of 0 to {len(ids) - 1} once"
        )
    return sorted(ids, key=lambda name: ids[name])


def _canonical_etype(name: str, ntypes: list[str], path: str) -> EType:
    pieces = name.split(":")
    if len(pieces) == 1 and len(ntypes) == 1:
        return (ntypes[0], name, ntypes[0])  # older files name the relation only
    if len(pieces) == 1:
        raise PartitionError(
            f"{path}: edge type {name!r} has no node types, expected 'src:relation:dst'; files "
            "from before canonical edge types work for one node type only: rewrite the JSON with "
            "DGL's change_etype_to_canonical_etype tool or partition again"
        )
    if len(pieces) != 3 or pieces[0] not in ntypes or pieces[2] not in ntypes:
        raise PartitionError(
            f"{path}: edge type {name!r}, expected 'src:relation:dst' with node types of {ntypes}"
        )
    return (pieces[0], pieces[1], pieces[2])


def _typed_map(config: dict, key: str, names: list[str], path: str) -> dict[str, list]:
    """``{type name: list}`` of an id map, ordered as ``names``; accepts a bare list."""
    value = _require(config, key, path)
    if isinstance(value, list):
        value = {names[0]: value}
    if isinstance(value, dict) and any(isinstance(one, str) for one in value.values()):
        value = next(one for one in value.values() if isinstance(one, str))
    if isinstance(value, str):
        raise PartitionError(
            f"{path}: {key} names the file {value!r}; graphs whose ids were not shuffled into "
            "ranges are not supported: partition again with a current DGL (reshuffle=True)"
        )
    if not isinstance(value, dict) or not all(isinstance(one, list) for one in value.values()):
        raise PartitionError(f"{path}: {key} is {_short(value)}, expected lists of ranges")
    if key == "edge_map":
        value = _match_etypes(value, names)
    if set(value) != set(names):
        raise PartitionError(f"{path}: {key} has types {sorted(value)}, expected {sorted(names)}")
    return {name: value[name] for name in names}


def _match_etypes(value: dict, names: list[str]) -> dict:
    """Renames keys that spell an edge type differently from ``etypes`` ('r' and 's:r:d')."""
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
    if all(_is_id(one) for one in values):
        values = [list(pair) for pair in zip([0, *values[:-1]], values)]
    for part, pair in enumerate(values):
        good = isinstance(pair, list) and len(pair) == 2 and all(_is_id(one) for one in pair)
        if not good or pair[0] > pair[1]:
            raise PartitionError(
                f"{what} of part {part} is {_short(pair)}, expected [start, end] with start <= end"
            )
    return np.array(values, dtype=np.int64).reshape(num_parts, 2)


def _tiled_ranges(
    typed: dict[str, list], num_parts: int, key: str, path: str
) -> dict[str, np.ndarray]:
    """Ranges per type, checked to tile the id space in (part, type) order.

    Empty ranges may say any position in the file; they get the one that tiles.
    """
    parsed = [_as_ranges(one, num_parts, f"{path}: {key}[{name!r}]") for name, one in typed.items()]
    table = np.stack(parsed, axis=1).reshape(-1, 2)
    sizes = table[:, 1] - table[:, 0]
    ends = np.cumsum(sizes)
    starts = ends - sizes
    wrong = np.flatnonzero((table[:, 0] != starts) & (sizes > 0))
    if len(wrong):
        part, type_id = divmod(int(wrong[0]), len(typed))
        got, expected = int(table[wrong[0], 0]), int(starts[wrong[0]])
        problem = "overlaps the range before it" if got < expected else "leaves a gap before it"
        raise PartitionError(
            f"{path}: {key}[{list(typed)[type_id]!r}] of part {part} starts at {got} "
            f"and {problem}, expected {expected}"
        )
    tiled = np.stack([starts, ends], axis=1).reshape(num_parts, len(typed), 2)
    return {name: np.ascontiguousarray(tiled[:, i]) for i, name in enumerate(typed)}


def _check_total(total: int, config: dict, key: str, source: str, path: str) -> None:
    expected = _count(config, key, path)
    if total != expected:
        raise PartitionError(f"{path}: {key} is {expected} but the ranges of {source} hold {total}")


def _part_files(config: dict, num_parts: int, path: str) -> list[dict[str, str]]:
    """Absolute paths of every part's files, checked to stay below the JSON's folder."""
    root = os.path.realpath(os.path.dirname(os.path.abspath(path)))

    @cache
    def real(name: str) -> str:
        """`realpath` below the root, which alone takes seconds for ten thousands of parts."""
        if name == root:
            return root
        above, _, last = name.rpartition(os.sep)
        found = f"{real(above)}{os.sep}{last}"
        if last in ("", ".", "..") or os.path.islink(found):
            return os.path.realpath(found)
        return found

    files = []
    for part in range(num_parts):
        entry = _require(config, f"part-{part}", path)
        if not isinstance(entry, dict):
            raise PartitionError(f"{path}: part-{part} is {_short(entry)}, expected file names")
        if "part_graph" not in entry:
            raise PartitionError(f"{path}: part-{part} names no 'part_graph' file")
        files.append(
            {
                key: _below(root, entry[key], f"{path}: part-{part}[{key!r}]", real)
                for key in FILE_KEYS
                if key in entry
            }
        )
    return files


def _below(root: str, name: object, what: str, real: Callable[[str], str]) -> str:
    """Absolute real path of ``name``; links are followed. Raises PartitionError naming ``what``
    where that is not below the folder ``root``."""
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
