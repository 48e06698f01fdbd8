"""Partitions are read as a graph in original ids, and cut or written anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from graph_forms import SOURCES, one_type, several_types
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from harness.parts import load_partition, write_partitions
from round_trips import files_of, read_back, same
from written_graphs import EDGES, NODES, cut, plain

import sar
from sar.partition.sources.parts import read_partitions

pytestmark = pytest.mark.usefixtures("small_blocks")
METHODS = ("coarsen", "hotness", "random", "contiguous")


@pytest.mark.parametrize("damage", ["twice", "far", "float"])
def test_ids_that_are_no_numbering_stay_a_column(damage: str, tmp_path: Path) -> None:
    graph = plain()
    ids = torch.arange(NODES)
    ids[3] = {"twice": 4, "far": 1000}.get(damage, 3)
    graph.node_data[NTYPE_HOMO]["orig_id"] = ids.double() if damage == "float" else ids
    graph.edge_data[ETYPE_HOMO]["orig_eid"] = torch.arange(EDGES) + 5
    path = write_partitions(graph, cut(graph, 3), tmp_path / "out")
    found, own = read_partitions(path, tmp_path)
    assert np.array_equal(own, np.sort(cut(graph, 3)))
    order = np.argsort(cut(graph, 3), kind="stable")
    assert torch.equal(
        found.node_data[NTYPE_HOMO]["feat"], graph.node_data[NTYPE_HOMO]["feat"][order]
    )
    assert found.node_data[NTYPE_HOMO]["orig_id"].tolist() == ids[order].tolist()
    eids = found.edge_data[ETYPE_HOMO]["orig_eid"] - 5
    for got, expected in zip(found.edges[ETYPE_HOMO], graph.edges[ETYPE_HOMO], strict=True):
        assert torch.equal(torch.from_numpy(order)[got], expected[eids])


# ---------------------------------------------------------------- through `sar partition`


@pytest.mark.parametrize("make", [one_type, several_types])
@pytest.mark.parametrize(
    ("method", "formats"),
    [
        *((method, ("dgl", "dgl")) for method in METHODS),
        pytest.param("metis", ("dgl", "dgl"), marks=pytest.mark.slow),
        *((("random", formats)) for formats in (("dgl", "pyg"), ("pyg", "dgl"), ("pyg", "pyg"))),
    ],
)
def test_without_the_graph_it_is_cut_as_with_it(
    make: Callable[[], GraphArrays], method: str, formats: tuple[str, str], tmp_path: Path
) -> None:
    """To the byte, whatever the order of columns."""
    before = {"method": "random", "seed": 9, "format": formats[0], "name": "g"}
    path = sar.partition_graph(make(), tmp_path / "before", 3, **before)
    options = {"method": method, "seed": 2, "format": formats[1], "name": "g"}
    sar.partition_graph(path, tmp_path / "again", 4, **options)
    graph = make()
    for columns in (*graph.node_data.values(), *graph.edge_data.values()):
        for name in list(columns):
            columns[name] = columns.pop(name) if name == "feat" else columns[name]
    sar.partition_graph(graph, tmp_path / "direct", 4, **options)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "direct")


@pytest.mark.parametrize("make", [one_type, several_types])
def test_parts_are_kept_from_format_to_format(
    make: Callable[[], GraphArrays], tmp_path: Path
) -> None:
    first = path = sar.partition_graph(make(), tmp_path / "0", 3, method="random", name="g")
    owner, digest = read_back(path, 3).owner, load_partition(path, 0).book.graph_digest
    for number, format in enumerate(("pyg", "pyg", "dgl"), 1):
        options = {"method": "keep", "format": format, "name": "g"}
        path = sar.partition_graph(path, tmp_path / str(number), 3, **options)
        kept = read_back(path, 3).owner
        assert all(torch.equal(parts, kept[ntype]) for ntype, parts in owner.items())
    assert load_partition(path, 0).book.graph_digest == digest
    old, new = (files_of(Path(one).parent) for one in (first, path))
    assert {k: v for k, v in old.items() if k != "g.json"} == {
        k: v for k, v in new.items() if k != "g.json"
    }


@pytest.mark.parametrize("formats", [("dgl", "pyg", "dgl"), ("pyg", "dgl", "pyg")])
def test_ids_of_others_come_along(formats: tuple[str, ...], tmp_path: Path) -> None:
    """And a folder may be cut into itself."""
    source = SOURCES["YAML, CSV"](several_types(), tmp_path)
    given, first = source.given, None
    for number, format in enumerate(formats):
        options = {"method": "random", "format": format, "overwrite": number > 0}
        given = sar.partition_graph(given, tmp_path / "out", 4 - number, **options)
        ids = files_of(tmp_path / "out" / "ids")
        assert set(ids) == {"item.parquet", "tag.parquet", "user.parquet"}
        first = first or ids
        assert ids == first
        same(read_back(given, 4 - number).graph, source.graph)
