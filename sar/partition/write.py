"""Writes a graph that has been cut.

Ids are reshuffled: nodes are ordered by (partition, node type, original id), edges by (partition of
the destination, edge type, original id), so that each partition owns one contiguous range of
either.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from sar.files import OutFiles, exchange, naming, parents_of, remove_left_over, scratch_folder
from sar.partition.arrays import EType, GraphArrays
from sar.partition.formats.dgl_writer import write_dgl
from sar.partition.formats.pyg_writer import write_pyg
from sar.partition.progress import Progress, silent
from sar.words import FORMATS

# What is in a folder of partitions of either format.
_OURS = re.compile(r"part_?\d+|.+\.json|(node|edge)_map(\.pt)?|node_data\.npz|ids")


def write_partitions(
    graph: GraphArrays,
    node_parts: np.ndarray | Tensor,
    out_dir: str | os.PathLike,
    graph_name: str | None = None,
    *,
    num_parts: int | None = None,
    method: str = "custom",
    overwrite: bool = False,
    format: str = "dgl",
    progress: Progress = silent,
    beside: Sequence[Path] = (),
    last: Callable[[], None] | None = None,
) -> str:
    """Write `graph`, cut as `node_parts` says, below `out_dir`; returns the path to load.

    node_parts: int [N], partition of each node, types one after another in the order of
        `graph.num_nodes`.
    num_parts: the largest id in `node_parts` + 1 unless given (give it when the last partitions may
        be empty).
    method: what the JSON's `part_method` says.
    overwrite: replace an `out_dir` that is not empty; only one that holds partitions or nothing
        else is replaced.
    format: "dgl", the layout of `dgl.distributed.partition_graph`, or "pyg", that of
        `torch_geometric.distributed.Partitioner` (see `sar.partition.formats.pyg_writer`).
    progress: see `sar.partition.progress`.
    beside: files and folders on the same file system that are moved in.
    last: called when everything is written, just before it takes its place.

    Everything is written into a folder beside `out_dir` that takes its name at the end: an error
    leaves nothing behind. Edges get their original id as the edge feature `orig_eid`, unless they
    have one of that name. An edge is written once, with the partition of its destination, and so
    are the sources it needs from other partitions (halo nodes). The tensors of `graph` may be maps
    of files: they are read in blocks, and what is kept in memory is about 5 bytes for each node.
    Raises ValueError for a bad assignment, name or format; FileExistsError; OSError, with a path.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}, expected one of {FORMATS}")
    graph = _in_order(graph.validate(progress))
    parts, num_parts = _check_parts(graph, node_parts, num_parts)
    name = check_graph_name(graph.name if graph_name is None else graph_name)
    out = output_folder(out_dir)
    remove_left_over(out.parent)
    check_output(out, overwrite)
    with parents_of(out), scratch_folder(out.parent) as scratch:
        work = scratch / "parts"
        work.mkdir()
        with OutFiles(work, out) as files:
            if format == "dgl":
                write_dgl(graph, parts, num_parts, files, name, method, progress)
            else:
                write_pyg(graph, parts, num_parts, files, scratch, progress)
        for path in beside:
            path.rename(work / path.name)
        if last is not None:
            last()
        check_output(out, overwrite)  # others may have written there meanwhile
        with naming(out):
            _move_into_place(work, out)
    return str(out / f"{name}.json" if format == "dgl" else out)


def _in_order(graph: GraphArrays) -> GraphArrays:
    """With columns by name: the bytes of the files depend on what a graph holds, not on the order
    in which something gave it. A pickle tells strings that are one object from equal ones."""
    nodes = {sys.intern(ntype): count for ntype, count in graph.num_nodes.items()}
    edges = {_interned(etype): ends for etype, ends in graph.edges.items()}
    return replace(
        graph,
        num_nodes=nodes,
        edges=edges,
        node_data={t: _by_name(graph.node_data[t]) for t in nodes if t in graph.node_data},
        edge_data={t: _by_name(graph.edge_data[t]) for t in edges if t in graph.edge_data},
    )


def _interned(etype: EType) -> EType:
    source, relation, destination = map(sys.intern, etype)
    return source, relation, destination


def _by_name(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    return {sys.intern(name): columns[name] for name in sorted(columns)}


def output_folder(path: str | os.PathLike) -> Path:
    """Where it is written: a link to a folder stays, and what it points to is replaced."""
    out = Path(path).absolute()
    return out.resolve() if out.is_symlink() else out


def check_output(out: Path, overwrite: bool) -> None:
    """Raise unless partitions may be written to `out`.

    Cheap, and done again by `write_partitions`; call it before a long cut. Raises FileExistsError,
    NotADirectoryError, PermissionError.
    """
    above = (folder for folder in out.absolute().parents if folder.exists())
    parent = next(above, out)
    for folder in (out, parent):
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"output folder {str(out)!r}: {folder} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"output folder {str(out)!r}: {parent} is not writable")
    if not out.exists():
        return
    names = sorted(entry.name for entry in out.iterdir())
    if names:
        _check_replaced(out, names, overwrite)
    if out.is_mount():
        raise FileExistsError(
            f"output folder {str(out)!r} is a mount point, which cannot be replaced; name a folder "
            "in it"
        )


def _check_replaced(out: Path, names: list[str], overwrite: bool) -> None:
    if not overwrite:
        raise FileExistsError(
            f"output folder {str(out)!r} is not empty; overwrite (--overwrite) replaces it"
        )
    strange = [n for n in names if not _OURS.fullmatch(n)]
    if strange or not {"part0", "part_0"} & set(names):
        # Somebody else's files: a slip in the path must not delete them.
        raise FileExistsError(
            f"output folder {str(out)!r} is not replaced: it holds {(strange or names)[0]!r}, "
            "which does not look like partitions"
        )


def _check_parts(
    graph: GraphArrays, node_parts: np.ndarray | Tensor, num_parts: int | None
) -> tuple[np.ndarray, int]:
    parts = np.asarray(node_parts)
    if parts.shape != (graph.total_nodes,) or parts.dtype.kind not in "iu":
        raise ValueError(
            f"node_parts is {parts.dtype} {parts.shape}, expected integers "
            f"of shape ({graph.total_nodes},)"
        )
    low, high = (int(parts.min()), int(parts.max())) if len(parts) else (0, -1)
    if num_parts is None:
        num_parts = max(high + 1, 1)
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}, expected 1 or more")
    if low < 0 or high >= num_parts:
        raise ValueError(f"node_parts spans [{low}, {high}], expected [0, {num_parts - 1}]")
    return parts, num_parts


def check_graph_name(name: str) -> str:
    """``name``, if files can be called so. Raises ValueError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(
            f"graph_name is {name!r}, expected letters, digits, '.', '_', '-', "
            "the first a letter or digit"
        )
    return name


def _move_into_place(work: Path, out: Path) -> None:
    """`work` becomes `out`, and what was there becomes `work`."""
    if out.exists() and any(out.iterdir()):
        exchange(work, out)
    else:
        work.rename(out)
