"""Opens the INPUT of `sar partition`: files of many kinds, partitions, data sets, generators."""

from __future__ import annotations

import glob
import inspect
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sar import errors
from sar.errors import PartitionError, SarError
from sar.files import scratch_folder
from sar.options import closest_name
from sar.partition import child
from sar.partition.arrays import GraphArrays, need
from sar.partition.foreign import is_foreign
from sar.partition.load import read_book
from sar.partition.progress import Counter, Progress, blocks, rows_in, silent
from sar.partition.require import require_dgl, where_to_get_dgl
from sar.partition.sources.datasets import (
    dgl_dataset_names,
    load_dgl_dataset,
    load_ogb_dataset,
    load_ogb_links,
    read_dgl_file,
)
from sar.partition.sources.generate import bibliography_graph, community_graph, rmat_graph
from sar.partition.sources.npz import read_npz
from sar.words import INPUTS

TABLES = (".parquet", ".pq", ".csv", ".tsv", ".csv.gz", ".tsv.gz", ".npy")
DESCRIPTIONS = (".yaml", ".yml")
IDS = "ids"  # the folder of external ids, by node type
_CHUNKED = "metadata.json"
GENERATORS: dict[str, Callable[..., GraphArrays]] = {
    "synthetic": community_graph,
    "rmat": rmat_graph,
    "bibliography": bibliography_graph,
}
OGB_NAMES = ("ogbn-arxiv", "ogbn-products", "ogbn-proteins", "ogbn-papers100M", "ogbn-mag")
OGB_LINKS = (
    "ogbl-collab", "ogbl-citation2", "ogbl-ppa", "ogbl-ddi", "ogbl-vessel", "ogbl-wikikg2",
    "ogbl-biokg",
)  # fmt: skip
# Of a child that reads one file: memory and time beyond what it has, and what it leaves behind.
_SPARE_BYTES, _COPIES = 4 << 30, 8
_SPARE_SECONDS, _BYTES_PER_SECOND = 120, 10_000_000
_ARRAYS, _ERROR = "arrays.pt", "error.json"
_KINDS = (ValueError, FileNotFoundError, OSError, errors.MissingDependencyError, SarError)


class Opened(NamedTuple):
    """A graph; of partitions also int32 [N] ``parts`` of the nodes and the number of parts."""

    graph: GraphArrays
    parts: np.ndarray | None = None
    num_parts: int | None = None


def open_input(
    text: str, scratch: Path, *, allow_nan: bool = False, progress: Progress = silent
) -> Opened:
    """The graph that ``text`` names; what is larger than memory lies in ``scratch``, and external
    ids in ``scratch/ids/<node type>.parquet``. ``allow_nan`` takes data that are no finite numbers.

    Raises ``ValueError`` or ``SarError`` that names the file, and row and value where it can;
    ``FileNotFoundError``; ``MissingDependencyError``; ``OSError`` for a full disk.
    """
    # Libraries of tables are loaded where there are tables.
    path = _main_file(Path(text))
    if path.is_dir() or path.name.endswith((*DESCRIPTIONS, ".json")):
        return _open_described(path, scratch, allow_nan, progress)
    if text.endswith(TABLES):
        from sar.partition.sources.description import read_edges

        paths = [Path(one) for one in sorted(glob.glob(text))] or [path]
        if not paths[0].exists():
            raise _missing(text)
        name = paths[0].name.split(".")[0]
        return Opened(read_edges(paths, scratch, name, allow_nan=allow_nan, progress=progress))
    if text.endswith(".pt"):
        from sar.partition.sources.pyg import read_pyg_file

        graph = read_pyg_file(path, path.stem)
    else:
        # Names of data sets have no suffix.
        if not path.is_file() and ":" not in text and path.suffix and _near(text):
            raise _missing(text)
        graph = open_apart(text)
    if not allow_nan:
        check_finite(graph, text, progress)
    return Opened(graph)


def reads_other_files(text: str) -> bool:
    """Whether ``text`` names a graph spread over files that it does not name itself."""
    return text.endswith((*DESCRIPTIONS, ".json")) or glob.has_magic(text) or os.path.isdir(text)


def _near(text: str) -> str:
    folder = os.path.dirname(text) or "."
    known = os.listdir(folder) if os.path.isdir(folder) else []
    return closest_name(os.path.basename(text), known)


def _missing(text: str) -> FileNotFoundError:
    return FileNotFoundError(f"input {text!r}: there is no such file{_near(text)}")


def _main_file(path: Path) -> Path:
    """DGL's chunks in a folder, or its only JSON; the folder itself for foreign partitions."""
    chunked = path / _CHUNKED
    if not path.is_dir() or (is_foreign(path) and not chunked.is_file()):
        return path
    jsons = [chunked] if chunked.is_file() else list(path.glob("*.json"))
    what = f"input {str(path)!r} is a folder without partitions or {_CHUNKED}"
    need(len(jsons) == 1, f"{what}; accepted: {INPUTS}")
    return jsons[0]


def _open_described(path: Path, scratch: Path, allow_nan: bool, progress: Progress) -> Opened:
    if path.is_dir():
        return _open_partitions(path, path, scratch, progress)
    if not path.is_file():
        raise _missing(str(path))
    content = _keys(path) if path.suffix == ".json" else {"edges"}
    if {"part_method", "num_parts", "node_map"} & content:
        return _open_partitions(path, path.parent, scratch, progress)
    if "num_nodes_per_chunk" in content or "edge_type" in content:
        from sar.partition.sources.chunked import read_chunked as read
    else:
        from sar.partition.sources.description import read_description as read
    return Opened(read(path, scratch, allow_nan=allow_nan, progress=progress))


def _open_partitions(path: Path, folder: Path, scratch: Path, progress: Progress) -> Opened:
    """Open partitions and the external ids of an earlier cut: nodes keep their numbers."""
    from sar.partition.sources.parts import read_partitions

    opened = Opened(*read_partitions(path, scratch, progress), read_book(path).num_parts)
    kept = [folder / IDS / f"{ntype}.parquet" for ntype in opened.graph.num_nodes]
    for file in filter(Path.is_file, kept):
        (scratch / IDS).mkdir(exist_ok=True)
        shutil.copyfile(file, scratch / IDS / file.name)
    return opened


def _keys(path: Path) -> set[Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise PartitionError(f"{path}: is no JSON: {error}") from error
    return set(content) if isinstance(content, dict) else set()


def check_finite(graph: GraphArrays, where: str, progress: Progress = silent) -> None:
    """Raises ``ValueError`` that names ``where`` and the first NaN or infinity, labels left out."""
    checked = [
        (f"{where}: {name!r} of {kind!r}", column)
        for frames in (graph.node_data, graph.edge_data)
        for kind, columns in frames.items()
        for name, column in columns.items()
        if column.is_floating_point() and name != "label"
    ]
    counter = Counter(progress, "checking data", sum(len(column) for _, column in checked))
    for what, column in checked:
        for low, high in blocks(len(column), counter, rows_in(column[:1].nbytes)):
            block = column[low:high].reshape(high - low, -1)
            if not bool(block.isfinite().all()):
                row, at = (~block.isfinite()).nonzero()[0].tolist()
                raise ValueError(
                    f"{what}: row {low + row} holds {block[row, at].item()}, expected finite "
                    "numbers; allow_nan (--allow-nan) takes it as it is"
                )


def open_source(text: str) -> GraphArrays:
    """The graph that `text` names; every node type has `orig_id`.

    `synthetic`, `rmat` and `bibliography` take the options of their `.._graph` as
    `:name=value,...`; a data set takes `:root=FOLDER`. Raises ValueError for what is unknown (with
    the closest known name) or damaged, FileNotFoundError, SarError when a data set cannot be had,
    MissingDependencyError.
    """
    if os.path.isfile(text):
        return read_npz(text) if text.endswith(".npz") else read_dgl_file(text)
    if os.path.isdir(text):
        raise ValueError(f"input {text!r} is a folder; accepted: {INPUTS}")
    name, _, options = text.partition(":")
    if name in GENERATORS:
        # Every parameter of a generator is an option; the default's type is the option's.
        parameters = inspect.signature(GENERATORS[name]).parameters.values()
        types = {one.name: type(one.default) for one in parameters}
        return GENERATORS[name](**_parse_options(name, options, types))
    root = {"root": str}
    if name in OGB_NAMES:
        return load_ogb_dataset(name, **_parse_options(name, options, root))
    if name in OGB_LINKS:
        return load_ogb_links(name, **_parse_options(name, options, root))
    known, missing = [*OGB_NAMES, *OGB_LINKS], ""
    if not name.startswith(("ogbn-", "ogbl-")):
        datasets = dgl_dataset_names()
        if name.lower() in datasets or name in datasets.values():
            return load_dgl_dataset(name, **_parse_options(name, options, root))
        if os.sep in text or text.endswith((".npz", ".bin", ".dgl")):
            raise FileNotFoundError(f"input file {text!r} does not exist")
        missing = "" if datasets else f"; data sets of dgl.data need dgl: {where_to_get_dgl()}"
        known = [*GENERATORS, *known, *datasets]
    near = closest_name(name, known) + missing
    raise ValueError(f"input {name!r} is unknown{near}; accepted: {INPUTS}")


def _parse_options(source: str, text: str, types: Mapping[str, type]) -> dict[str, Any]:
    """`a=1,b=2` as keyword arguments. Raises ValueError naming the option and the valid ones."""
    options: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        near = closest_name(name, types) if name not in types else ""
        valid = ", ".join(types)
        need(name in types, f"{source}: option {name!r} is unknown{near}; valid: {valid}")
        is_good = equals and name not in options
        need(is_good, f"{source}: option {item!r}: expected each name once, as {name}=VALUE")
        try:
            options[name] = types[name](value)
        except ValueError:
            expected = types[name].__name__
            raise ValueError(f"{source}: option {name} is {value!r}, expected {expected}") from None
    return options


def open_apart(text: str) -> GraphArrays:
    """:func:`open_source`, in a child process where others' compiled code reads the file: that code
    ends the process, or worse, where a file is damaged. The child hands the arrays back in a file
    of tensors alone; ``ValueError`` when it dies."""
    if text.endswith(".npz") or text.partition(":")[0] in GENERATORS:
        return open_source(text)
    with scratch_folder() as folder:
        command = child.command(__file__, text, folder)
        # Compiled code writes much when it aborts; loaders of data sets tell of their downloads.
        pipe = subprocess.PIPE if os.path.isfile(text) else None
        done = subprocess.run(command, check=False, stderr=pipe, text=True, errors="replace")
        if (folder / _ERROR).exists():
            kind, message = json.loads((folder / _ERROR).read_text(encoding="utf-8"))
            raise next(one for one in _KINDS if one.__name__ == kind)(message)
        if done.returncode:
            words = (done.stderr or "").strip().splitlines()[-1:] if done.returncode > 0 else []
            how = ", ".join([child.death(done.returncode), *words])
            raise ValueError(f"{text}: its reader ended, {how}; is it damaged?")
        # The map stays when the folder goes.
        content = torch.load(folder / _ARRAYS, mmap=True, weights_only=True)
    return GraphArrays(**content)


def main(text: str, folder: str) -> int:
    try:
        if os.path.isfile(text):
            _limit(os.path.getsize(text))
        graph = open_source(text)
        torch.save(vars(graph), Path(folder) / _ARRAYS)
    except Exception as error:  # noqa: BLE001 - handed to the parent
        known = next((one.__name__ for one in _KINDS if isinstance(error, one)), None)
        message = str(error) if known else f"{text}: {type(error).__name__}: {error}"
        report = json.dumps([known or SarError.__name__, message])
        (Path(folder) / _ERROR).write_text(report, encoding="utf-8")
        return 1
    return 0


def _limit(size: int) -> None:
    """Bound memory and time of this process by what a file of ``size`` bytes can need: a damaged
    count asks for all memory of the machine, or for as many rounds."""
    with suppress(errors.MissingDependencyError):  # told when it is needed
        require_dgl("reading a file of dgl.save_graphs")  # its libraries do not count
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_AS, in_use + _SPARE_BYTES + _COPIES * size)
    _lower(resource.RLIMIT_CPU, _SPARE_SECONDS + size // _BYTES_PER_SECOND)


def _lower(limit: int, value: int) -> None:
    soft, hard = resource.getrlimit(limit)
    known = [one for one in (soft, hard, value) if one != resource.RLIM_INFINITY]
    resource.setrlimit(limit, (min(known), hard))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
