"""Writing a graph that has been cut.

Nodes are ordered by (partition, node type, original id), edges by (partition of the destination,
edge type, original id): each partition owns one contiguous range of either.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sar.files import OutFiles, exchange, naming, parents_of, remove_left_over, scratch_folder
from sar.partition.arrays import EType, GraphArrays
from sar.partition.formats.dgl_writer import write_dgl
from sar.partition.formats.pyg_writer import write_pyg
from sar.partition.methods.base import check_parts
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

    node_parts: int [N], types one after another in the order of `graph.num_nodes`.
    num_parts: by default the largest of them + 1; the last partitions may be empty.
    method: what the JSON's `part_method` says.
    overwrite: replace an `out_dir` that holds partitions and nothing else.
    format: "dgl", the layout of `dgl.distributed.partition_graph`, or "pyg", that of
        `torch_geometric.distributed.Partitioner`.
    beside: files and folders on the same file system that are moved in.
    last: called when everything is written, just before it takes its place.

    Everything is written into a folder beside `out_dir` that takes its name at the end: an error
    leaves nothing behind. Edges get their original id as the edge feature `orig_eid`, unless they
    have one, and lie with the partition of their destination. The tensors of `graph` may be maps of
    files: they are read in blocks; in memory are about 5 bytes for each node.
    Raises ValueError for a bad assignment, name or format; FileExistsError; OSError, with a path.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}, expected one of {FORMATS}")
    graph = _in_order(graph.validate(progress))
    most = sys.maxsize if num_parts is None else num_parts
    parts = check_parts(node_parts, graph.total_nodes, most, "node_parts")
    num_parts = num_parts or int(parts.max(initial=0)) + 1
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
            if out.exists() and any(out.iterdir()):
                exchange(work, out)  # what was there goes with the scratch folder
            else:
                work.rename(out)
    return str(out / f"{name}.json" if format == "dgl" else out)


def _in_order(graph: GraphArrays) -> GraphArrays:
    """Sort columns by name: the files' bytes depend on what a graph holds, not on the order in
    which it came. A pickle tells strings that are one object from equal ones, hence `intern`."""
    nodes = {sys.intern(ntype): count for ntype, count in graph.num_nodes.items()}
    edges: dict[EType, tuple[Tensor, Tensor]] = {}
    for (source, relation, end), pair in graph.edges.items():
        edges[sys.intern(source), sys.intern(relation), sys.intern(end)] = pair

    def by_name(kinds: Iterable[Any], data: dict[Any, dict[str, Tensor]]) -> dict:
        return {
            kind: {sys.intern(name): data[kind][name] for name in sorted(data[kind])}
            for kind in kinds
            if kind in data
        }

    data = by_name(nodes, graph.node_data), by_name(edges, graph.edge_data)
    return GraphArrays(graph.name, nodes, edges, *data)


def output_folder(path: str | os.PathLike) -> Path:
    """The folder to write: a link to a folder stays, and what it points to is replaced."""
    out = Path(path).absolute()
    return out.resolve() if out.is_symlink() else out


def check_output(out: Path, overwrite: bool) -> None:
    """Raise unless partitions may be written to `out`: FileExistsError, NotADirectoryError,
    PermissionError. Cheap; called before a long cut, and again by `write_partitions`."""
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
    if names and not overwrite:
        raise FileExistsError(
            f"output folder {str(out)!r} is not empty; overwrite (--overwrite) replaces it"
        )
    strange = [name for name in names if not _OURS.fullmatch(name)]
    if strange or (names and not {"part0", "part_0"} & set(names)):
        # Somebody else's files: a slip in the path must not delete them.
        raise FileExistsError(
            f"output folder {str(out)!r} is not replaced: it holds {(strange or names)[0]!r}, "
            "which does not look like partitions"
        )
    if out.is_mount():
        raise FileExistsError(
            f"output folder {str(out)!r} is a mount point, which cannot be replaced; name a folder "
            "in it"
        )


def check_graph_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(
            f"graph_name is {name!r}, expected letters, digits, '.', '_', '-', "
            "the first a letter or digit"
        )
    return name
