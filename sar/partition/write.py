"""Writes a graph that has been cut, in the layout of DGL's `partition_graph`.

Ids are reshuffled: nodes are ordered by (partition, node type, original id), edges by (partition of
the destination, edge type, original id), so that each partition owns one contiguous range of
either.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.errors import PartitionError
from sar.files import remove_left_over, scratch_folder
from sar.partition.arrays import ORIG_EID, CanonicalEtype, GraphArrays
from sar.partition.dgl_format import read_graph, read_tensor_dict
from sar.partition.digest import (
    FileSeal,
    Seals,
    array_seal,
    file_digest,
    graph_digest,
    seal,
)
from sar.partition.require import require_dgl

HALO_HOPS = 1
_HEADER_USED, _HEADER_BYTES = 32, 4096  # magic, version, kind, number of graphs; padding


@dataclass
class _Layout:
    """Where every node and edge goes.

    node_order[ntype], edge_order[etype]: int64, original ids in the order of the new ids of that
        type.
    node_ranges, edge_ranges: int64 [P, 2], the new ids of that type in each partition.
    new_ids[ntype]: int64 [N], new id of each original node.
    """

    node_order: dict[str, np.ndarray]
    node_ranges: dict[str, np.ndarray]
    new_ids: dict[str, np.ndarray]
    edge_order: dict[CanonicalEtype, np.ndarray]
    edge_ranges: dict[CanonicalEtype, np.ndarray]
    num_parts: int


def write_partitions(
    graph: GraphArrays,
    node_parts: np.ndarray | Tensor,
    out_dir: str | os.PathLike,
    graph_name: str | None = None,
    *,
    num_parts: int | None = None,
    method: str = "custom",
    overwrite: bool = False,
) -> str:
    """Write `graph`, cut as `node_parts` says, below `out_dir`; returns the path of the JSON file.

    node_parts: int [N], partition of each node, types one after another in the order of
        `graph.num_nodes`.
    num_parts: the largest id in `node_parts` + 1 unless given (give it when the last partitions may
        be empty).
    method: what the JSON's `part_method` says.
    overwrite: replace an `out_dir` that is not empty; only one that holds partitions or nothing
        else is replaced.

    Everything is written into a folder beside `out_dir` that takes its name at the end: an error
    leaves nothing behind. Edges get their original id as the edge feature `orig_eid`, unless they
    have one of that name. An edge is written once, with the partition of its destination, and so
    are the sources it needs from other partitions (halo nodes). Raises ValueError for a bad
    assignment or name, FileExistsError, MissingDependencyError without dgl, OSError when the folder
    cannot be written.
    """
    parts = _check_parts(graph.validate(), node_parts, num_parts)
    num_parts = parts[1]
    name = _check_graph_name(graph.name if graph_name is None else graph_name)
    require_dgl("writing partitions")
    out = Path(out_dir).absolute()
    check_output(out, overwrite)
    layout = _lay_out(graph, parts[0], num_parts)
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_left_over(out.parent)
    with scratch_folder(out.parent) as scratch:
        work = scratch / "parts"
        work.mkdir()
        files: dict[str, FileSeal] = {}
        for part in range(num_parts):
            files |= _write_part(graph, layout, part, work / f"part{part}")
        seals = Seals(graph_digest(graph), files)
        _write_json(graph, layout, name, method, work / f"{name}.json", seals)
        _move_into_place(work, out, scratch / "old")
    return str(out / f"{name}.json")


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
    if not names:
        return
    if not overwrite:
        raise FileExistsError(
            f"output folder {str(out)!r} is not empty; overwrite (--overwrite) replaces it"
        )
    strange = [n for n in names if not re.fullmatch(r"part\d+|.+\.json", n)]
    if strange or "part0" not in names:
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
    parts = parts.astype(np.int64)
    low, high = (int(parts.min()), int(parts.max())) if len(parts) else (0, -1)
    if num_parts is None:
        num_parts = max(high + 1, 1)
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}, expected 1 or more")
    if low < 0 or high >= num_parts:
        raise ValueError(f"node_parts spans [{low}, {high}], expected [0, {num_parts - 1}]")
    return parts, num_parts


def _check_graph_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(
            f"graph_name is {name!r}, expected letters, digits, '.', '_', '-', "
            "the first a letter or digit"
        )
    return name


def _lay_out(graph: GraphArrays, parts: np.ndarray, num_parts: int) -> _Layout:
    offsets = graph.node_offsets()
    part_of = {t: parts[offsets[t] : offsets[t] + n] for t, n in graph.num_nodes.items()}
    node_order, node_ranges = _reshuffle(part_of, num_parts)
    new_ids = {}
    for ntype, order in node_order.items():
        new_ids[ntype] = np.empty(len(order), dtype=np.int64)
        new_ids[ntype][order] = _expand(node_ranges[ntype])
    edge_part = {t: part_of[t[2]][dst.numpy()] for t, (_, dst) in graph.edges.items()}
    edge_order, edge_ranges = _reshuffle(edge_part, num_parts)
    return _Layout(node_order, node_ranges, new_ids, edge_order, edge_ranges, num_parts)


def _reshuffle(part_of: dict, num_parts: int) -> tuple[dict, dict]:
    """Per type: old ids ordered by (partition, old id), and each partition's range of new ids."""
    counts = np.zeros((num_parts, len(part_of)), dtype=np.int64)
    order = {}
    for column, (key, part) in enumerate(part_of.items()):
        counts[:, column] = np.bincount(part, minlength=num_parts)
        order[key] = np.argsort(part, kind="stable")
    ends = np.cumsum(counts.reshape(-1)).reshape(counts.shape)
    ranges = np.stack([ends - counts, ends], axis=2)  # [P, types, 2], part-major
    return order, {key: ranges[:, column] for column, key in enumerate(part_of)}


def _expand(ranges: np.ndarray) -> np.ndarray:
    """All ids of [P, 2] ranges, one range after another."""
    return np.concatenate([np.arange(start, end) for start, end in ranges.tolist()])


def _rows(order: np.ndarray, ranges: np.ndarray, part: int) -> np.ndarray:
    """Original ids of one type in one partition, in the order of their new ids."""
    sizes = ranges[:, 1] - ranges[:, 0]
    first = int(sizes[:part].sum())
    return order[first : first + int(sizes[part])]


def _write_part(
    graph: GraphArrays, layout: _Layout, part: int, folder: Path
) -> dict[str, FileSeal]:
    """Writes the files of a part; returns what they have to be when they are read."""
    dgl = require_dgl("writing partitions")
    folder.mkdir()
    graph_file = str(folder / "graph.dgl")
    node_feats: dict[str, Tensor] = {}
    edge_feats: dict[str, Tensor] = {}
    for ntype, node_data in graph.node_data.items():
        rows = torch.from_numpy(_rows(layout.node_order[ntype], layout.node_ranges[ntype], part))
        for name, value in node_data.items():
            node_feats[f"{ntype}/{name}"] = _storable(value, rows)
    for etype in graph.edges:
        rows = torch.from_numpy(_rows(layout.edge_order[etype], layout.edge_ranges[etype], part))
        edge_feats[f"{':'.join(etype)}/{ORIG_EID}"] = rows
        for name, value in graph.edge_data.get(etype, {}).items():
            edge_feats[f"{':'.join(etype)}/{name}"] = _storable(value, rows)
    try:
        dgl.save_graphs(graph_file, [_part_graph(graph, layout, part)], formats=["coo"])
        _clear_padding(graph_file)
        file = read_graph(graph_file).file
        seals = {f"{folder.name}/graph.dgl": FileSeal(file.size, file_digest(file))}
        for name, feats in (("node_feat.dgl", node_feats), ("edge_feat.dgl", edge_feats)):
            dgl.data.utils.save_tensors(str(folder / name), feats)
            # DGL says nothing when the disk is full: see that the sizes add up.
            read_tensor_dict(folder / name)
            size = (folder / name).stat().st_size
            arrays = {key: array_seal(value) for key, value in feats.items()}
            seals[f"{folder.name}/{name}"] = FileSeal(size, arrays=arrays)
        return seals
    except (PartitionError, dgl.DGLError) as error:
        raise OSError(f"{folder.name} could not be written; is the disk full?") from error


def _clear_padding(graph_file: str) -> None:
    """DGL fills its header of 4096 bytes with whatever memory held; same graph, same file."""
    with open(graph_file, "r+b") as file:
        file.seek(_HEADER_USED)
        file.write(bytes(_HEADER_BYTES - _HEADER_USED))


def _storable(value: Tensor, rows: Tensor) -> Tensor:
    picked = value.detach().cpu().index_select(0, rows).contiguous()
    return picked.to(torch.uint8) if picked.dtype == torch.bool else picked


def _part_graph(graph: GraphArrays, layout: _Layout, part: int):
    """One partition as a DGL graph: inner nodes, halo nodes by ascending id; inner edges only."""
    dgl = require_dgl("writing partitions")
    src, dst, edge_types = _part_edges(graph, layout, part)
    start, end = _span(layout.node_ranges, part)
    eid_start, eid_end = _span(layout.edge_ranges, part)
    remote = (src < start) | (src >= end)
    halo = np.unique(src[remote])
    local_src = src - start
    local_src[remote] = (end - start) + np.searchsorted(halo, src[remote])
    nids = np.concatenate([np.arange(start, end), halo])
    node_types, node_parts = _types_and_parts(layout, nids)
    result = dgl.graph(
        (torch.from_numpy(local_src), torch.from_numpy(dst - start)), num_nodes=len(nids)
    )
    result.ndata[dgl.NID] = torch.from_numpy(nids)
    result.ndata["inner_node"] = (torch.arange(len(nids)) < end - start).to(torch.uint8)
    result.ndata["part_id"] = torch.from_numpy(node_parts)
    result.edata[dgl.EID] = torch.arange(eid_start, eid_end)
    result.edata["inner_edge"] = torch.ones(eid_end - eid_start, dtype=torch.uint8)
    if not graph.is_homogeneous:
        result.ndata[dgl.NTYPE] = torch.from_numpy(node_types).to(torch.int32)
        result.edata[dgl.ETYPE] = torch.from_numpy(edge_types).to(torch.int32)
    return result


def _part_edges(
    graph: GraphArrays, layout: _Layout, part: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of one partition's inner edges in order: new ids of the end points, edge type ids."""
    none = np.zeros(0, dtype=np.int64)
    srcs, dsts, types = [none], [none], [none]
    for type_id, (etype, (src, dst)) in enumerate(graph.edges.items()):
        rows = _rows(layout.edge_order[etype], layout.edge_ranges[etype], part)
        srcs.append(layout.new_ids[etype[0]][src.numpy()[rows]])
        dsts.append(layout.new_ids[etype[2]][dst.numpy()[rows]])
        types.append(np.full(len(rows), type_id))
    return np.concatenate(srcs), np.concatenate(dsts), np.concatenate(types)


def _span(ranges: dict, part: int) -> tuple[int, int]:
    """All new ids of a partition, types together."""
    if not ranges:
        return 0, 0
    of_part = [r[part] for r in ranges.values()]
    return int(of_part[0][0]), int(of_part[-1][1])


def _types_and_parts(layout: _Layout, nids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ends = np.stack([r[:, 1] for r in layout.node_ranges.values()], axis=1).reshape(-1)
    # The first range that ends after the id holds it, empty ranges included.
    found = np.searchsorted(ends, nids, side="right")
    num_types = len(layout.node_ranges)
    return found % num_types, found // num_types


def _write_json(
    graph: GraphArrays, layout: _Layout, name: str, method: str, path: Path, seals: Seals
) -> None:
    content: dict[str, Any] = {
        "graph_name": name,
        "num_nodes": graph.total_nodes,
        "num_edges": graph.total_edges,
        "part_method": method,
        "num_parts": layout.num_parts,
        "halo_hops": HALO_HOPS,
        "node_map": {t: r.tolist() for t, r in layout.node_ranges.items()},
        "edge_map": {":".join(t): r.tolist() for t, r in layout.edge_ranges.items()},
        "ntypes": {t: i for i, t in enumerate(graph.num_nodes)},
        "etypes": {":".join(t): i for i, t in enumerate(graph.edges)},
    }
    for part in range(layout.num_parts):
        content[f"part-{part}"] = {
            "node_feats": f"part{part}/node_feat.dgl",
            "edge_feats": f"part{part}/edge_feat.dgl",
            "part_graph": f"part{part}/graph.dgl",
        }
    path.write_text(json.dumps(seal(content, seals), indent=4) + "\n")


def _move_into_place(work: Path, out: Path, old: Path) -> None:
    """Rename `work` to `out`; what was there is put aside as `old` first."""
    if not out.exists():
        work.rename(out)
        return
    out.rename(old)
    try:
        work.rename(out)
    except OSError:
        old.rename(out)
        raise
