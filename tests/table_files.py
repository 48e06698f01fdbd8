"""One small graph, in tables of every format, as descriptions and as chunks of DGL's tools."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from sar.partition.arrays import ETYPE_HOMO, GraphArrays

NODES, EDGES = 20, 90
RNG = np.random.default_rng(7)
SRC, DST = RNG.integers(0, NODES, (2, EDGES))
SRC[0], DST[1] = NODES - 1, 0
WEIGHT = RNG.random(EDGES)
SPARSE = RNG.permutation(-(10**15) + np.arange(NODES) * 123_456_789_012)
TEXTS = np.array([f"id-{value:x}-{'ä' * (value % 3)}" for value in range(NODES)], dtype=object)
FEAT = RNG.random((NODES, 3), dtype=np.float32)
FORMATS = ("parquet", "csv", "tsv", "csv.gz", "tsv.gz")


def save(path: Path, columns: dict[str, np.ndarray], header: bool = True) -> Path:
    """A table in the format of the file's name."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path, row_group_size=40)
        return path
    mark = "\t" if ".tsv" in path.suffixes else ","
    lines = [mark.join(columns)] if header else []
    lines += [mark.join(map(str, row)) for row in zip(*columns.values())]
    text = "\n".join(lines) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


class Trap:
    """Its pickle makes a file "trapped" where it is read by who does what it says."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch trapped",)


def describe(folder: Path, content: object, suffix: str = "yaml") -> Path:
    path = folder / f"graph.{suffix}"
    path.write_text(json.dumps(content) if suffix == "json" else yaml.safe_dump(content))
    return path


def ends(graph: GraphArrays, etype=ETYPE_HOMO) -> list[list[int]]:
    return [one.tolist() for one in graph.edges[etype]]


def first_come(*ids: np.ndarray) -> dict:
    """Numbers of ids in the order in which they come."""
    return {one: number for number, one in enumerate(dict.fromkeys(np.concatenate(ids).tolist()))}


def chunks(folder: Path, **changes: object) -> Path:
    """Two chunks of each type; edges in CSV, Parquet and numpy."""
    pairs, at = np.stack([SRC, DST], 1), EDGES // 2
    halves = (slice(7), slice(at)), (slice(7, None), slice(at, None))
    for number, (rows, edges) in enumerate(halves):
        np.save(folder / f"feat{number}.npy", FEAT[rows])
        save(folder / f"l{number}.parquet", {"l": np.arange(NODES)[rows]})
        np.savetxt(folder / f"e{number}.txt", pairs[edges], "%d")
        save(folder / f"p{number}.parquet", {"0": pairs[edges, 0], "1": pairs[edges, 1]})
        np.save(folder / f"n{number}.npy", pairs[edges])
        np.save(folder / f"w{number}.npy", WEIGHT[edges])

    def files(kind: str, pattern: str, **options: str) -> dict:
        names = [pattern.format(number) for number in range(2)]
        return {"format": {"name": kind, **options}, "data": names}

    columns = {"feat": files("numpy", "feat{}.npy"), "label": files("parquet", "l{}.parquet")}
    content = {
        "graph_name": "mag",
        "node_type": ["paper", "author"],
        "num_nodes_per_chunk": [[7, NODES - 7]] * 2,
        "edge_type": ["author:writes:paper", "paper:cites:paper", "author:knows:author"],
        "num_edges_per_chunk": [[at, EDGES - at]] * 3,
        "edges": {
            "author:writes:paper": files("csv", "e{}.txt", delimiter=" "),
            "paper:cites:paper": files("parquet", "p{}.parquet"),
            "author:knows:author": files("numpy", "n{}.npy"),
        },
        "node_data": {"paper": columns},
        "edge_data": {"paper:cites:paper": {"w": files("numpy", "w{}.npy")}},
    } | changes
    path = folder / "metadata.json"
    path.write_text(json.dumps(content))
    return path
