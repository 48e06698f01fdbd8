"""What is read, cut and written is the graph that there was: every form of input, every output."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from graph_forms import BARE, GRAPHS, PARTITIONS, SOURCES
from harness.covering import covering
from harness.graphs import GraphArrays
from round_trips import read_back, same

from sar import PartitionOptions
from sar.partition.methods.base import Given
from sar.partition.run import partition

pytest.importorskip("dgl")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*left out"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
FORMATS = ("dgl", "pyg")
SIZES = (1, 2, 3, 8)
CUTS = ("coarsen", "metis", "random", "one part empty", "keep")
Row = tuple[str, str, str, int, str]  # source, graph, format, parts, cut


def product() -> Iterator[Row]:
    for row in itertools.product(SOURCES, GRAPHS, FORMATS, SIZES, CUTS):
        source, graph, _, size, cut = row
        if source in BARE and graph != "one":
            continue
        if source == "DGL's file" and row[1:] != ("several", "dgl", 2, "random"):
            continue  # a process of its own reads it, which takes seconds
        if cut == "metis" and source != "npy":
            continue  # and one cuts it
        if cut == "keep" and (source not in PARTITIONS or size != 3):
            continue
        yield row


def by_rows(graph: GraphArrays) -> GraphArrays:
    """With the numbers that the columns `feat` and `weight` tell."""
    number = {t: data["feat"][:, 0].long() for t, data in graph.node_data.items()}
    node_data = {
        t: {name: rows[number[t].argsort()] for name, rows in data.items()}
        for t, data in graph.node_data.items()
    }
    edges, edge_data = {}, {}
    for etype, (src, dst) in graph.edges.items():
        order = graph.edge_data[etype]["weight"].argsort()
        edges[etype] = number[etype[0]][src][order], number[etype[2]][dst][order]
        edge_data[etype] = {name: rows[order] for name, rows in graph.edge_data[etype].items()}
    return replace(graph, edges=edges, node_data=node_data, edge_data=edge_data)


def with_empty_part(count: int, size: int) -> np.ndarray:
    """Part 1 is empty, where there are more than one."""
    parts = np.random.default_rng(size).integers(0, size, count)
    return np.where(parts == 1, 0, parts)


@pytest.mark.parametrize("row", covering(product()), ids=lambda row: "-".join(map(str, row)))
def test_the_graph_comes_back(row: Row, tmp_path: Path) -> None:
    name, kind, format, size, cut = row
    graph = GRAPHS[kind]()
    (folder := tmp_path / "in").mkdir()
    source = SOURCES[name](graph, folder)
    given = with_empty_part(source.graph.total_nodes, size)
    method = Given(given) if cut == "one part empty" else cut
    options = PartitionOptions(size, method, seed=3, format=format, allow_nan=False)
    done = partition(source.given, tmp_path / "out", options)
    back = read_back(done.path, size)
    same(back.graph if source.keeps_ids else by_rows(back.graph), source.graph)
    owner = torch.cat(list(back.owner.values())).numpy()
    if cut == "one part empty":
        assert np.array_equal(owner, given)
    if cut == "keep" and source.parts is not None:
        assert np.array_equal(owner, source.parts)
    for ntype, ids in (source.external or {}).items():
        kept = pq.read_table(tmp_path / "out" / "ids" / f"{ntype}.parquet").to_pydict()
        assert kept == {"id": ids, "node": list(range(len(ids)))}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
