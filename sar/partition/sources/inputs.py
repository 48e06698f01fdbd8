"""Whatever graph an input names: files of many kinds, partitions, data sets, generators."""

from __future__ import annotations

import glob
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sar.errors import PartitionError
from sar.partition.arrays import GraphArrays
from sar.partition.foreign import is_foreign
from sar.partition.load import read_book
from sar.partition.progress import Counter, Progress, blocks, rows_in, silent
from sar.partition.sources.apart import open_apart
from sar.partition.sources.open import closest
from sar.words import INPUTS

TABLES = (".parquet", ".pq", ".csv", ".tsv", ".csv.gz", ".tsv.gz", ".npy")
DESCRIPTIONS = (".yaml", ".yml")
IDS = "ids"  # the folder of external ids, by node type
_CHUNKED = "metadata.json"


class Opened(NamedTuple):
    """A graph, and for partitions int32 [N], the part of each node, and how many there are."""

    graph: GraphArrays
    parts: np.ndarray | None = None
    num_parts: int | None = None


def open_input(
    text: str, scratch: Path, *, allow_nan: bool = False, progress: Progress = silent
) -> Opened:
    """The graph that ``text`` names; what is larger than memory comes to lie in ``scratch``.

    External ids are kept in ``scratch/ids/<node type>.parquet``, where there are such.

    Args:
        allow_nan: take features and weights that are no finite numbers.

    Raises ``ValueError`` or ``SarError`` that names the file, and row and value where it can;
    ``FileNotFoundError``; ``MissingDependencyError``; ``OSError`` for a full disk.
    """
    # Libraries of tables are loaded where there are tables.
    if os.path.isdir(text):
        return _open_folder(Path(text), scratch, allow_nan, progress)
    if text.endswith((*DESCRIPTIONS, ".json")):
        return _open_json(text, scratch, allow_nan, progress)
    if text.endswith(TABLES):
        from sar.partition.sources.description import read_edges

        paths = [Path(one) for one in sorted(glob.glob(text))] or [Path(text)]
        if not paths[0].exists():
            raise FileNotFoundError(f"input {text!r}: there is no such file{_near(text)}")
        name = paths[0].name.split(".")[0]
        return Opened(read_edges(paths, scratch, name, allow_nan=allow_nan, progress=progress))
    if text.endswith(".pt"):
        from sar.partition.sources.pyg import read_pyg_file

        graph = read_pyg_file(Path(text), Path(text).stem)
    else:
        near = "" if os.path.isfile(text) or ":" in text else _near(text)
        if near and Path(text).suffix:  # names of data sets have none
            raise FileNotFoundError(f"input {text!r}: there is no such file{near}")
        graph = open_apart(text)
    if not allow_nan:
        check_finite(graph, text, progress)
    return Opened(graph)


def reads_other_files(text: str) -> bool:
    """Whether what ``text`` names is spread over files that it does not name itself."""
    return text.endswith((*DESCRIPTIONS, ".json")) or glob.has_magic(text) or os.path.isdir(text)


def _near(text: str) -> str:
    folder = os.path.dirname(text) or "."
    known = os.listdir(folder) if os.path.isdir(folder) else []
    return closest(os.path.basename(text), known)


def _open_folder(folder: Path, scratch: Path, allow_nan: bool, progress: Progress) -> Opened:
    if (folder / _CHUNKED).is_file():
        return _open_json(str(folder / _CHUNKED), scratch, allow_nan, progress)
    jsons = sorted(folder.glob("*.json"))
    if is_foreign(folder):
        return _open_partitions(folder, folder, scratch, progress)
    if len(jsons) == 1:
        return _open_json(str(jsons[0]), scratch, allow_nan, progress)
    raise ValueError(
        f"input {str(folder)!r} is a folder without partitions or {_CHUNKED}; accepted: {INPUTS}"
    )


def _open_json(text: str, scratch: Path, allow_nan: bool, progress: Progress) -> Opened:
    """A description, DGL's chunks, or partitions: the keys tell."""
    path = Path(text)
    if not path.is_file():
        raise FileNotFoundError(f"input {text!r}: there is no such file{_near(text)}")
    content = _keys(path) if path.suffix == ".json" else {"edges"}
    if {"part_method", "num_parts", "node_map"} & content:
        return _open_partitions(path, path.parent, scratch, progress)
    if "num_nodes_per_chunk" in content or "edge_type" in content:
        from sar.partition.sources.chunked import read_chunked

        return Opened(read_chunked(path, scratch, allow_nan=allow_nan, progress=progress))
    from sar.partition.sources.description import read_description

    return Opened(read_description(path, scratch, allow_nan=allow_nan, progress=progress))


def _open_partitions(path: Path, folder: Path, scratch: Path, progress: Progress) -> Opened:
    """External ids, which a cut before kept, come along: nodes have the numbers that they had."""
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
        _check_column(what, column, counter)


def _check_column(where: str, column: torch.Tensor, counter: Counter) -> None:
    for low, high in blocks(len(column), counter, rows_in(column[:1].nbytes)):
        block = column[low:high].reshape(high - low, -1)
        if not bool(block.isfinite().all()):
            row, at = (~block.isfinite()).nonzero()[0].tolist()
            raise ValueError(
                f"{where}: row {low + row} holds {block[row, at].item()}, expected finite numbers; "
                "allow_nan (--allow-nan) takes it as it is"
            )
