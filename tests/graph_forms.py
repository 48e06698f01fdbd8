"""One graph in every form that is read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from foreign_files import edge_rows, pyg_data, write_glt, write_pyg
from harness.graphs import to_dgl

from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, EType, GraphArrays
from sar.partition.write import write_partitions

FOREIGN_PARTS = 3  # of partitions that are read


def one_type(nodes: int = 45, edges: int = 130, seed: int = 0) -> GraphArrays:
    """Multi-edges, self loops, and nodes without edges; `feat` and `weight` name their rows."""
    return _graph("one", {NTYPE_HOMO: nodes}, {ETYPE_HOMO: edges}, seed)


def several_types(seed: int = 0) -> GraphArrays:
    counts = {"item": 23, "tag": 9, "user": 31}
    etypes = {
        ("item", "bought_by", "user"): 60,
        ("tag", "marks", "item"): 30,
        ("user", "buys", "item"): 70,
        ("user", "follows", "user"): 55,
    }
    return _graph("several", counts, etypes, seed)


def _graph(name: str, counts: dict[str, int], etypes: dict[EType, int], seed: int) -> GraphArrays:
    rng = np.random.default_rng(seed)
    edges, edge_data = {}, {}
    for etype, count in etypes.items():
        ends = [rng.integers(0, max(1, counts[one] - 3), count) for one in etype[::2]]
        for one in ends:  # some edges are there twice
            one[: count // 9] = one[count // 9 : 2 * (count // 9)]
        edges[etype] = torch.from_numpy(ends[0]), torch.from_numpy(ends[1])
        edge_data[etype] = {
            "weight": torch.arange(count) + 0.5,
            "type": torch.from_numpy(rng.integers(0, 3, count)),
        }
    node_data = {}
    for ntype, count in counts.items():
        feat = torch.from_numpy(rng.random((count, 3), dtype=np.float32))
        feat[:, 0] = torch.arange(count)
        label = torch.from_numpy(rng.integers(-1, 4, count))
        node_data[ntype] = {"feat": feat, "label": label}
        for mask in ("train_mask", "val_mask"):
            node_data[ntype][mask] = torch.from_numpy(rng.random(count) < 0.5)
    return GraphArrays(name, counts, edges, node_data, edge_data).validate()


GRAPHS: dict[str, Callable[[], GraphArrays]] = {"one": one_type, "several": several_types}


@dataclass(frozen=True)
class Source:
    """A form of a graph.

    Attributes:
        given: what `partition` takes.
        graph: what is in it; nodes and edges in its order.
        external: by node type, the id outside of each node.
        keeps_ids: whether rows and edges have the numbers of ``graph``.
        parts: of each node, for partitions.
    """

    given: Any
    graph: GraphArrays
    external: dict[str, list] | None = None
    keeps_ids: bool = True
    parts: np.ndarray | None = None


def _without(graph: GraphArrays, nodes: tuple[str, ...] = (), edges: tuple[str, ...] = ()):
    """The graph without some columns."""
    node = {t: {k: v for k, v in d.items() if k not in nodes} for t, d in graph.node_data.items()}
    edge = {t: {k: v for k, v in d.items() if k not in edges} for t, d in graph.edge_data.items()}
    return replace(graph, node_data=node, edge_data=edge)


ALL_EDGE_COLUMNS = ("weight", "type")

# ------------------------------------------------------------------------------ graphs in memory


def dgl_graph(graph: GraphArrays, folder: Path) -> Source:
    return Source(to_dgl(graph), graph)


def dgl_file(graph: GraphArrays, folder: Path) -> Source:
    import dgl

    whole = to_dgl(graph)
    for ntype in whole.ntypes:
        for mask in ("train_mask", "val_mask"):  # its files hold no bool
            whole.nodes[ntype].data[mask] = whole.nodes[ntype].data[mask].to(torch.uint8)
    dgl.save_graphs(str(folder / "graph.bin"), [whole])
    return Source(str(folder / "graph.bin"), graph)


def pyg_object(graph: GraphArrays, folder: Path) -> Source:
    data = pyg_data(graph)
    for ntype, columns in graph.node_data.items():
        store = data if graph.is_homogeneous else data[ntype]
        store.y = columns["label"]
        store.train_mask, store.val_mask = columns["train_mask"], columns["val_mask"]
    for etype, columns in graph.edge_data.items():
        store = data if graph.is_homogeneous else data[etype]
        store.weight, store.type = columns["weight"], columns["type"]
    return Source(data, _with_rows(graph))


def _with_rows(graph: GraphArrays) -> GraphArrays:
    """With the edges' feature that PyG's and GraphLearn's have."""
    edge = {etype: {**data, "feat": edge_rows(data)} for etype, data in graph.edge_data.items()}
    return replace(graph, edge_data=edge)


def pyg_file(graph: GraphArrays, folder: Path) -> Source:
    source = pyg_object(graph, folder)
    torch.save(source.given, folder / "graph.pt")
    return replace(source, given=folder / "graph.pt")


# ----------------------------------------------------------------------------------- files of all


def npz(graph: GraphArrays, folder: Path) -> Source:
    content: dict[str, Any] = {}
    if graph.is_homogeneous:
        content["num_nodes"] = graph.total_nodes
        content["src"], content["dst"] = graph.edges[ETYPE_HOMO]
        content |= graph.node_data[NTYPE_HOMO]
    else:
        for ntype, count in graph.num_nodes.items():
            content[f"num_nodes/{ntype}"] = count
            content |= {f"{k}/{ntype}": v for k, v in graph.node_data[ntype].items()}
        for etype, ends in graph.edges.items():
            content[f"edges/{'/'.join(etype)}"] = torch.stack(ends)
    np.savez(folder / "graph.npz", **{key: np.asarray(value) for key, value in content.items()})
    return Source(folder / "graph.npz", _without(graph, edges=ALL_EDGE_COLUMNS))


def _table(path: Path, columns: dict[str, Any]) -> str:
    """In the format of the file's name, which is given back."""
    columns = {name: np.asarray(values) for name, values in columns.items()}
    if path.suffix == ".parquet":
        arrays = {
            name: pa.array(list(values)) if values.ndim > 1 else pa.array(values)
            for name, values in columns.items()
        }
        pq.write_table(pa.table(arrays), path, row_group_size=20)
    else:
        lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values()))]
        path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path.name


def _described(graph: GraphArrays, folder: Path, suffix: str, ids: dict[str, np.ndarray]) -> Source:
    """With external ids, whose table has the nodes' columns."""
    nodes, edges = {}, []
    for ntype, columns in graph.node_data.items():
        values: dict[str, Any] = {"key": ids[ntype]}
        own: dict[str, Any] = {}
        name = f"{ntype}.{suffix}"
        for column, rows in columns.items():
            if rows.dim() == 1:
                values[column] = rows.int() if rows.dtype == torch.bool else rows
                own[column] = {"files": name, "column": column}
            else:
                several = {f"{column}{k}": rows[:, k] for k in range(rows.shape[1])}
                values |= several
                own[column] = {"files": name, "columns": list(several), "dtype": "float32"}
        _table(folder / name, values)
        key = {"files": name, "column": "key"}
        if ids[ntype].dtype == object:
            key["dtype"] = "text"
        nodes[ntype] = {"ids": key, "columns": own}
    for number, (etype, (src, dst)) in enumerate(graph.edges.items()):
        columns = graph.edge_data[etype]
        values = {"a": ids[etype[0]][src], "b": ids[etype[2]][dst], **columns}
        name = _table(folder / f"edges{number}.{suffix}", values)
        kept = {"weight": {"files": name, "column": "weight", "dtype": "float32"}, "type": "type"}
        one = {"files": name, "src": "a", "dst": "b", "columns": kept}
        edges.append({**one, "type": list(etype)})
    content = {"name": graph.name, "nodes": nodes, "edges": edges}
    (folder / "graph.yaml").write_text(yaml.safe_dump(content))
    return Source(folder / "graph.yaml", graph, {t: one.tolist() for t, one in ids.items()})


def described_parquet(graph: GraphArrays, folder: Path) -> Source:
    """64-bit ids without order."""
    rng = np.random.default_rng(1)
    ids = {t: rng.permutation(count) * 10**15 - 7 for t, count in graph.num_nodes.items()}
    return _described(graph, folder, "parquet", ids)


def described_csv(graph: GraphArrays, folder: Path) -> Source:
    """Texts as ids, some of which look like numbers."""
    ids = {
        t: np.array([f"{n:03}" if n % 2 else f"{t}-ü{n}" for n in range(count)], dtype=object)
        for t, count in graph.num_nodes.items()
    }
    return _described(graph, folder, "csv.gz", ids)


def described_npy(graph: GraphArrays, folder: Path) -> Source:
    """Dense ids; features stay in their files."""
    nodes, edges = {}, []
    for ntype, columns in graph.node_data.items():
        for name, rows in columns.items():
            np.save(folder / f"{ntype}-{name}.npy", rows)
        own = {name: {"files": f"{ntype}-{name}.npy"} for name in columns}
        nodes[ntype] = {"count": graph.num_nodes[ntype], "columns": own}
    for number, (etype, ends) in enumerate(graph.edges.items()):
        np.save(folder / f"edges{number}.npy", torch.stack(ends))
        for name, rows in graph.edge_data[etype].items():
            np.save(folder / f"edges{number}-{name}.npy", rows)
        own = {n: {"files": f"edges{number}-{n}.npy"} for n in graph.edge_data[etype]}
        edges.append({"type": list(etype), "files": f"edges{number}.npy", "columns": own})
    (folder / "g.yaml").write_text(yaml.safe_dump({"nodes": nodes, "edges": edges}))
    return Source(folder / "g.yaml", graph)


def chunked(graph: GraphArrays, folder: Path) -> Source:
    """Two chunks of each type, as DGL's tools want them."""

    def save(name: str, rows: Any, kind: str = "numpy") -> dict:
        rows, files = np.asarray(rows), []
        for number, some in enumerate((rows[: len(rows) // 3], rows[len(rows) // 3 :])):
            path = folder / f"{name}-{number}.{ {'numpy': 'npy'}.get(kind, kind) }"
            if kind == "numpy":
                np.save(path, some)
            elif kind == "csv":
                np.savetxt(path, some, "%d")
            else:
                pq.write_table(pa.table({str(k): some[:, k] for k in range(2)}), path)
            files.append(path.name)
        form = {"name": kind, **({"delimiter": " "} if kind == "csv" else {})}
        return {"format": form, "data": files}

    def sizes(count: int) -> list[int]:
        return [count // 3, count - count // 3]

    kinds = ("csv", "parquet", "numpy")
    etypes = {":".join(etype): etype for etype in graph.edges}
    content = {
        "graph_name": graph.name,
        "node_type": list(graph.num_nodes),
        "num_nodes_per_chunk": [sizes(count) for count in graph.num_nodes.values()],
        "edge_type": list(etypes),
        "num_edges_per_chunk": [sizes(len(src)) for src, _ in graph.edges.values()],
        "edges": {
            name: save(f"e{n}", torch.stack(graph.edges[etype], 1), kinds[n % 3])
            for n, (name, etype) in enumerate(etypes.items())
        },
        "node_data": {
            t: {name: save(f"{t}-{name}", rows) for name, rows in columns.items()}
            for t, columns in graph.node_data.items()
        },
        "edge_data": {
            name: {k: save(f"d{n}-{k}", rows) for k, rows in graph.edge_data[etype].items()}
            for n, (name, etype) in enumerate(etypes.items())
        },
    }
    (folder / "metadata.json").write_text(json.dumps(content))
    return Source(folder, graph)


def bare_edges(suffix: str, graph: GraphArrays, folder: Path) -> Source:
    """Nodes are as many as edges name; `.npy` has no columns."""
    (src, dst), data = graph.edges[ETYPE_HOMO], graph.edge_data[ETYPE_HOMO]
    count, path = int(max(src.max(), dst.max())) + 1, folder / f"edges.{suffix}"
    left = GraphArrays("edges", {NTYPE_HOMO: count}, graph.edges, {}, {ETYPE_HOMO: dict(data)})
    if suffix == "npy":
        np.save(path, torch.stack([src, dst]))
        left.edge_data = {}
    else:
        _table(path, {"src": src, "dst": dst, **data})
        if suffix != "parquet":  # it tells no width
            left.edge_data[ETYPE_HOMO]["weight"] = data["weight"].double()
    return Source(path, left)


# -------------------------------------------------------------------------------------- partitions


def _cut(graph: GraphArrays) -> np.ndarray:
    return np.arange(graph.total_nodes) * 7 % FOREIGN_PARTS


def written(format: str, graph: GraphArrays, folder: Path) -> Source:
    parts, own = (
        _cut(graph),
        replace(graph, node_data={t: {**d} for t, d in graph.node_data.items()}),
    )
    own.with_orig_ids()
    path = write_partitions(own, parts, folder / "w", num_parts=FOREIGN_PARTS, format=format)
    return Source(path, graph, parts=parts)


def dgls_own(graph: GraphArrays, folder: Path) -> Source:
    """Which keep no original ids; DGL tells what it gave."""
    import dgl

    whole = to_dgl(graph)
    for ntype in whole.ntypes:
        for mask in ("train_mask", "val_mask"):
            whole.nodes[ntype].data[mask] = whole.nodes[ntype].data[mask].to(torch.uint8)
    where = str(folder / "dgl")
    dgl.seed(0)  # of its own generator; it fails where a part has no edge of some type
    dgl.distributed.partition_graph(whole, "mine", FOREIGN_PARTS, where, part_method="random")
    return Source(f"{where}/mine.json", graph, keeps_ids=False)


def _beside(graph: GraphArrays, folder: Path) -> None:
    """What neither PyG nor GraphLearn has a place for."""
    names = ("label", "train_mask", "val_mask")
    suffix = {t: "" if graph.is_homogeneous else f"/{t}" for t in graph.num_nodes}
    rows = {f"{n}{suffix[t]}": d[n].numpy() for t, d in graph.node_data.items() for n in names}
    np.savez(folder / "node_data.npz", **rows)


def pygs_own(graph: GraphArrays, folder: Path) -> Source:
    parts = _cut(graph)
    where = write_pyg(graph, parts, FOREIGN_PARTS, folder / "pyg")
    _beside(graph, where)
    return Source(where, _without(_with_rows(graph), edges=ALL_EDGE_COLUMNS), parts=parts)


def graphlearns(graph: GraphArrays, folder: Path) -> Source:
    parts = _cut(graph)
    where = write_glt(graph, parts, FOREIGN_PARTS, folder / "glt")
    _beside(graph, where)
    return Source(where, _without(_with_rows(graph), edges=("type",)), parts=parts)


Maker = Callable[[GraphArrays, Path], Source]
SOURCES: dict[str, Maker] = {
    "DGL": dgl_graph,
    "DGL's file": dgl_file,
    "PyG": pyg_object,
    "PyG's file": pyg_file,
    "npz": npz,
    "YAML, Parquet": described_parquet,
    "YAML, CSV": described_csv,
    "YAML, npy": described_npy,
    "chunks": chunked,
    "Parquet": lambda *args: bare_edges("parquet", *args),
    "CSV": lambda *args: bare_edges("csv.gz", *args),
    "npy": lambda *args: bare_edges("npy", *args),
    "our DGL": lambda *args: written("dgl", *args),
    "our PyG": lambda *args: written("pyg", *args),
    "DGL's partitions": dgls_own,
    "PyG's partitions": pygs_own,
    "GraphLearn's": graphlearns,
}
BARE = ("Parquet", "CSV", "npy")  # of one type
PARTITIONS = tuple(SOURCES)[-5:]
