"""Columns of the partitions where users look for them: on DGL's graphs, and by short names."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import dgl
import dgl.function as fn
import pytest
import torch
from harness import run_threads
from harness.graphs import homogeneous, sample, to_dgl
from harness.parts import Cutter, joined
from torch import Tensor

import sar
from sar.partition.features import FeatureStore
from sar.train.memory import resident_mb

GRAPHS = ("mixed", "hetero", "sparse_hetero", "no_edges", "shop")
WIDE = 8 << 20  # bytes of a column


def eager(column: Any) -> Tensor:
    return column.materialize() if hasattr(column, "materialize") else column


def typed_columns(graph: Any) -> dict[Any, dict[str, Tensor]]:
    """Every column of each node type and relation, as scripts read them."""
    found = {t: {n: graph.nodes[t].data[n] for n in graph.nodes[t].data} for t in graph.ntypes}
    for etype in graph.canonical_etypes:
        data = graph.edges[etype].data
        found[etype] = {name: eager(data[name]) for name in data}
    return found


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_columns_of_dgls_whole_graph(partitioned: Cutter, name: str, size: int) -> None:
    graph = sample(name)
    graph = graph if "orig_id" in str(graph.node_data) else graph.with_orig_ids()
    whole, path = to_dgl(graph), partitioned(graph, size, "adversarial")

    def case(group: Any) -> dict[Any, dict[str, Tensor]]:
        ours = sar.construct_full_graph(sar.load_partition_data(path))
        if len(ours.ntypes) > 1:
            kind = ours.ntypes[0]
            assert ours.ndata["feat"][kind] is ours.nodes[kind].data["feat"]
        else:
            assert ours.srcdata["feat"] is ours.dstdata["feat"] is ours.ndata["feat"]
        return typed_columns(ours)

    ranks = run_threads(size, case)
    for kind, columns in typed_columns(whole).items():
        own = "orig_id" if isinstance(kind, str) else "orig_eid"
        assert {*ranks[0][kind]} == {*columns} | {own}
        ids = [rank[kind][own] for rank in ranks]
        for column, want in columns.items():
            got = joined([rank[kind][column] for rank in ranks], ids, len(want))
            want = want.bool() if column.endswith("_mask") else want
            assert torch.equal(got, want), (kind, column)


@pytest.mark.parametrize("change", ["", "loops", "no loops", "reverse", "local", "slice"])
def test_messages_of_stored_columns(partitioned: Cutter, change: str) -> None:
    """Nothing is put into the graph: it is cut, and messages are sent."""
    graph = sample("mixed").with_orig_ids()
    path = partitioned(graph, 3, "random")

    def sums(given: Any) -> Tensor:
        if change == "loops":
            given = dgl.add_self_loop(given, fill_data=2.0)
        elif change == "no loops":
            names = None if isinstance(given, sar.ShardedGraph) else ["weight"]  # theirs has ints
            given = dgl.add_self_loop(dgl.remove_self_loop(given), names, fill_data="mean")
        elif change == "reverse":
            given = dgl.reverse(given, copy_edata=True)
        elif change == "local":
            given = given.local_var()
        elif change == "slice":
            given = given["_E"]
        given.update_all(fn.u_mul_e("feat", "weight", "m"), fn.sum("m", "out"))
        return given.dstdata["out"]

    def case(group: Any) -> tuple[Tensor, Tensor]:
        ours = sar.construct_full_graph(sar.load_partition_data(path))
        return sums(ours), ours.ndata["orig_id"]

    rows, ids = zip(*run_threads(3, case), strict=True)
    torch.testing.assert_close(joined(rows, ids, 57), sums(to_dgl(graph)))


def test_assigning_works_as_in_dgl(partitioned: Cutter) -> None:
    graph = deepcopy(sample("mixed").with_orig_ids())  # columns are written in place below
    data = sar.load_partition_data(partitioned(graph, 1))
    for given in (sar.construct_full_graph(data), to_dgl(graph)):
        feat, other = given.ndata["feat"].clone(), given.local_var()
        with given.local_scope():
            given.ndata["feat"] = feat * 2
            given.edata.pop("weight")
            assert "weight" not in given.edata and torch.equal(given.ndata["feat"], feat * 2)
        assert torch.equal(given.ndata["feat"], feat) and "weight" in given.edata
        given.ndata["feat"] += 1  # in place: a copy of the graph has the same tensor
        assert torch.equal(given.ndata["feat"], feat + 1)
        assert torch.equal(other.ndata["feat"], feat + 1)
        given.ndata["feat"] = torch.zeros(57, 2)
        assert given.ndata["feat"].shape == (57, 2) and other.ndata["feat"].shape == feat.shape
        del given.ndata["label"]
        with pytest.raises(KeyError, match="label"):
            given.ndata["label"]
        with pytest.raises(Exception, match="57|match"):
            given.ndata["feat"] = torch.zeros(3)
    assert torch.equal(data.node_features["feat"], feat), "what was loaded stays as it was"


def test_a_column_first_read_in_inference_mode_trains_later(partitioned: Cutter) -> None:
    graph = sar.construct_full_graph(sar.load_partition_data(partitioned(sample("mixed"), 1)))
    layer = torch.nn.Linear(6, 2)
    with torch.inference_mode():
        layer(graph.ndata["feat"])
    layer(graph.ndata["feat"]).sum().backward()
    assert layer.weight.grad is not None


def test_a_column_with_other_rows_is_told_to_all(partitioned: Cutter) -> None:
    path = partitioned(sample("mixed").with_orig_ids(), 3)

    def case(group: Any) -> None:
        data = sar.load_partition_data(path)
        if group.rank == 1:
            data.node_features["_N/mine"] = torch.zeros(2)
        with pytest.raises(ValueError, match=r"'mine': got shape \(2,\), expected \d+ rows"):
            sar.construct_full_graph(data)

    run_threads(3, case)


def test_columns_that_nobody_reads_take_no_memory(tmp_path: Path) -> None:
    nodes, ends = 1 << 16, torch.arange(1 << 16)
    graph = homogeneous("wide", nodes, ends, ends.roll(1))
    width = WIDE // 4 // nodes
    graph.node_data["_N"] |= {f"n{i}": torch.ones(nodes, width) for i in range(3)}
    graph.edge_data["_N", "_E", "_N"] |= {f"e{i}": torch.ones(nodes, width) for i in range(3)}
    path = Cutter(tmp_path)(graph, 1, [0] * nodes)
    del graph
    data = sar.load_partition_data(path)
    sar.construct_full_graph(data)  # imports and compiles
    before = resident_mb()
    whole = sar.construct_full_graph(data)
    kept = [whole, whole.remove_self_loop().add_self_loop(), dgl.add_self_loop(whole)]
    kept += [whole.local_var(), whole.reverse(copy_edata=True), whole.to("cpu")]
    assert resident_mb() - before < WIDE / 2**20, "less than one of six columns"
    first = kept[1].edata["e0"].materialize()
    assert first.shape == (2 * nodes, width) and whole.edata["e0"].shape == (nodes, width)
    assert whole.stored_columns()[0].data_ptr() == whole.edata["e0"].materialize().data_ptr()


STORE = {
    "a/feat": torch.ones(1), "b/feat": torch.ones(1) * 2, "a/x": torch.ones(1) * 3,
    "u:follows:u/weight": torch.ones(1) * 4, "u:buys:i/weight": torch.ones(1) * 5,
    "u:buys:i/price": torch.ones(1) * 6, "_TYPE": torch.ones(1) * 7, "a/_TYPE": torch.ones(1) * 8,
}  # fmt: skip


def store() -> FeatureStore:
    found = FeatureStore()
    for name, value in STORE.items():
        found[name] = value
    return found


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("x", "a/x"),
        ("price", "u:buys:i/price"),
        ("follows/weight", "u:follows:u/weight"),
        ("u:buys:i/weight", "u:buys:i/weight"),
        ("_TYPE", "_TYPE"),
    ],
)
def test_short_names_of_columns(name: str, full: str) -> None:
    columns = store()
    assert name in columns and torch.equal(columns[name], STORE[full])
    assert columns.info(name) == columns.info(full) and columns.in_memory(name)
    columns[name] = torch.zeros(1)
    assert len(columns) == len(STORE) and float(columns[full]) == 0
    del columns[name]
    assert full not in list(columns)


def test_short_names_of_several_columns_and_of_none() -> None:
    columns = store()
    for name, listed in (("feat", "'a/feat', 'b/feat'"), ("weight", "'u:follows:u/weight', 'u:")):
        for read in (columns.__getitem__, columns.get, columns.info, columns.__delitem__):
            with pytest.raises(ValueError, match=f"{name}.*several types.*{listed}"):
                read(name)
        with pytest.raises(ValueError, match="several types"):
            columns[name] = torch.zeros(1)
    with pytest.raises(KeyError, match="did you mean 'u:buys:i/price'"):
        columns["prize"]
    assert "prize" not in columns and columns.get("prize", 1) == 1
    columns["new"] = torch.zeros(1)
    assert float(columns["new"]) == 0 and len(columns) == len(STORE) + 1
