"""Writes a graph that has been cut, in the layout of DGL's `partition_graph`, without DGL.

Nothing as large as the edges or the features is made in memory: inputs that are maps of files stay
in them, and each column is read once, in the order of original ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.files import OutFiles
from sar.partition.arrays import ORIG_EID, GraphArrays
from sar.partition.book import Digests, FileDigest, graph_digest, with_digests
from sar.partition.column import bytes_of
from sar.partition.formats.dgl_files import FeatureFile, Kind, PartGraph
from sar.partition.formats.layout import (
    COPIED_BYTES,
    Group,
    Layout,
    edge_groups,
    lay_out,
    node_groups,
)
from sar.partition.progress import Counter, Progress, blocks, rows_in, silent

GRAPH, NODE_FEATS, EDGE_FEATS = "graph.dgl", "node_feat.dgl", "edge_feat.dgl"


def write_dgl(
    graph: GraphArrays,
    parts: np.ndarray,
    num_parts: int,
    files: OutFiles,
    name: str,
    method: str,
    progress: Progress = silent,
) -> None:
    """Write `NAME.json` and the folders of the parts, of a valid graph; ``parts``: int [N], types
    one after another."""
    layout = lay_out(graph, parts, num_parts, progress)
    for part in range(num_parts):
        with files.placed(f"part{part}") as folder:
            folder.mkdir()
    digests = _write_nodes(graph, layout, files, progress)
    digests |= _write_edges(graph, layout, files, progress)
    content = _description(graph, layout, name, method)
    names = [content[f"part-{part}"] for part in range(num_parts)]
    ordered = {
        path: digests[path]
        for own in names
        for path in (own["part_graph"], own["node_feats"], own["edge_feats"])
    }
    described = with_digests(content, Digests(graph_digest(graph, progress), ordered))
    files.write(f"{name}.json", 0, (json.dumps(described, indent=4) + "\n").encode())


def _write_nodes(
    graph: GraphArrays, layout: Layout, files: OutFiles, progress: Progress
) -> dict[str, FileDigest]:
    """Write the features of nodes; returns the digest of each file."""
    tables = _feature_files(graph.node_data, layout, layout.node_ranges, files, NODE_FEATS)
    rows = sum(graph.num_nodes[t] for t, columns in graph.node_data.items() if columns)
    counter = Counter(progress, "writing nodes", rows)
    for ntype, columns in graph.node_data.items():
        for group in node_groups(layout, ntype, counter) if columns else ():
            _append(tables, ntype, columns, group)
    return {table.name: table.finish() for table in tables}


def _write_edges(
    graph: GraphArrays, layout: Layout, files: OutFiles, progress: Progress
) -> dict[str, FileDigest]:
    """Write the features of edges, and the graphs; returns the digest of each file."""
    # Edges that have no original ids get those of this graph, which are made here: None.
    data = {":".join(t): {ORIG_EID: None, **graph.edge_data.get(t, {})} for t in graph.edges}
    ranges = {":".join(etype): own for etype, own in layout.edge_ranges.items()}
    tables = _feature_files(data, layout, ranges, files, EDGE_FEATS)
    graphs = [
        PartGraph(files, f"part{part}/{GRAPH}", layout, part, graph.is_homogeneous)
        for part in range(layout.num_parts)
    ]
    counter = Counter(progress, "writing edges", graph.total_edges)
    for etype in graph.edges:
        kind = ":".join(etype)
        stored = {name: column for name, column in data[kind].items() if column is not None}
        rows = (layout.edge_ranges[etype][:, 0] - layout.edge_spans[:, 0]).tolist()
        for group in edge_groups(graph, layout, etype, counter):
            for part, where in group.parts():
                graphs[part].write_ends(rows[part], group.src[where], group.dst[where])
                rows[part] += where.stop - where.start
                if ORIG_EID not in stored:
                    ids = group.order[where].astype(np.int64)
                    ids += group.low
                    tables[part].append(f"{kind}/{ORIG_EID}", ids)
            _append(tables, kind, stored, group)
    digests = {table.name: table.finish() for table in tables}
    counter = Counter(progress, "writing graphs", 3 * graph.total_edges)
    return digests | {one.name: one.finish(counter) for one in graphs}


def _feature_files(
    data: Mapping[str, Any],
    layout: Layout,
    ranges: dict[str, np.ndarray],
    files: OutFiles,
    name: str,
) -> list[FeatureFile]:
    """A file for each part, with the rows that it owns of each column."""
    found = []
    for part in range(layout.num_parts):
        arrays: dict[str, Kind] = {}
        for kind, columns in data.items():
            start, stop = ranges[kind][part].tolist()
            for column, rows in columns.items():
                dtype, shape = (torch.int64, ()) if rows is None else (rows.dtype, rows.shape[1:])
                dtype = torch.uint8 if dtype == torch.bool else dtype
                arrays[f"{kind}/{column}"] = dtype, (stop - start, *shape)
        found.append(FeatureFile(files, f"part{part}/{name}", arrays))
    return found


def _append(tables: list[FeatureFile], kind: str, columns: dict[str, Tensor], group: Group) -> None:
    """Append the rows of a group, to each part its own, in runs of a few MB."""
    for name, rows in columns.items():
        some = rows.detach()[group.low : group.high]
        step = rows_in(some[:1].nbytes, COPIED_BYTES)
        for part, where in group.parts():
            order = torch.from_numpy(group.order[where]).to(rows.device)
            for low, high in blocks(len(order), size=step):
                picked = bytes_of(some.index_select(0, order[low:high]))
                tables[part].append(f"{kind}/{name}", picked)


def _description(graph: GraphArrays, layout: Layout, name: str, method: str) -> dict[str, Any]:
    content: dict[str, Any] = {
        "graph_name": name,
        "num_nodes": graph.total_nodes,
        "num_edges": graph.total_edges,
        "part_method": method,
        "num_parts": layout.num_parts,
        "halo_hops": 1,
        "node_map": {t: r.tolist() for t, r in layout.node_ranges.items()},
        "edge_map": {":".join(t): r.tolist() for t, r in layout.edge_ranges.items()},
        "ntypes": {t: i for i, t in enumerate(graph.num_nodes)},
        "etypes": {":".join(t): i for i, t in enumerate(graph.edges)},
    }
    for part in range(layout.num_parts):
        content[f"part-{part}"] = {
            "node_feats": f"part{part}/{NODE_FEATS}",
            "edge_feats": f"part{part}/{EDGE_FEATS}",
            "part_graph": f"part{part}/{GRAPH}",
        }
    return content
