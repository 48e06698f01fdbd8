"""Partitions are read as a graph in original ids, and cut or written anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from graph_forms import SOURCES, one_type, several_types
from round_trips import files_of, read_back, same
from written_graphs import EDGES, NODES, cut, plain

from sar.partition import progress
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from sar.partition.book import graph_digest
from sar.partition.cut import METHODS, PartitionOptions
from sar.partition.load import read_book
from sar.partition.run import partition
from sar.partition.sources.parts import read_partitions
from sar.partition.write import write_partitions


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several, and most have no edge of some part."""
    monkeypatch.setattr(progress, "BLOCK", 7)


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
        *((("random", formats)) for formats in (("dgl", "pyg"), ("pyg", "dgl"), ("pyg", "pyg"))),
    ],
)
def test_without_the_graph_it_is_cut_as_with_it(
    make: Callable[[], GraphArrays], method: str, formats: tuple[str, str], tmp_path: Path
) -> None:
    """To the byte, whatever the order of columns."""
    before = PartitionOptions(3, "random", seed=9, format=formats[0], name="g")
    path = partition(make(), tmp_path / "before", before).path
    options = PartitionOptions(4, method, seed=2, format=formats[1], name="g")
    partition(path, tmp_path / "again", options)
    graph = make()
    for columns in (*graph.node_data.values(), *graph.edge_data.values()):
        for name in list(columns):
            columns[name] = columns.pop(name) if name == "feat" else columns[name]
    partition(graph, tmp_path / "direct", options)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "direct")


@pytest.mark.parametrize("make", [one_type, several_types])
def test_parts_are_kept_from_format_to_format(
    make: Callable[[], GraphArrays], tmp_path: Path
) -> None:
    first = path = partition(make(), tmp_path / "0", PartitionOptions(3, "random", name="g")).path
    owner, digest = read_back(path, 3).owner, read_book(path).graph_digest
    for number, format in enumerate(("pyg", "pyg", "dgl"), 1):
        options = PartitionOptions(3, "keep", format=format, name="g")
        path = partition(path, tmp_path / str(number), options).path
        kept = read_back(path, 3).owner
        assert all(torch.equal(parts, kept[ntype]) for ntype, parts in owner.items())
        (scratch := tmp_path / f"scratch{number}").mkdir()
        assert graph_digest(read_partitions(path, scratch)[0]) == digest
    assert read_book(path).graph_digest == digest
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
        options = PartitionOptions(4 - number, "random", format=format, overwrite=number > 0)
        given = partition(given, tmp_path / "out", options).path
        ids = files_of(tmp_path / "out" / "ids")
        assert set(ids) == {"item.parquet", "tag.parquet", "user.parquet"}
        first = first or ids
        assert ids == first
        same(read_back(given, 4 - number).graph, source.graph)
