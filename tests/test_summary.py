"""The summary of a partitioned graph, against numbers counted on the whole graph with DGL."""

import contextlib
import io
import json

import pytest
import torch

from sar.errors import PartitionError
from sar.partition.summary import summarize

dgl = pytest.importorskip("dgl")
pytest.importorskip("dgl.distributed")


def cut(graph, folder, parts, method="random"):
    with contextlib.redirect_stdout(io.StringIO()):
        dgl.distributed.partition_graph(graph, "g", parts, str(folder), part_method=method)
    return folder / "g.json"


def owners(path, part):
    """Part and id of the source of every inner edge of a part, through DGL."""
    graph = dgl.load_graphs(str(path.parent / f"part{part}/graph.dgl"))[0][0]
    inner = graph.edata["inner_edge"].bool()
    src = graph.edges(order="eid")[0][inner]
    return graph.ndata["part_id"][src], graph.ndata["_ID"][src]


def num_ends(path, parts):
    """Destinations of cut edges, once for each part of their sources."""
    pairs = set()
    for part in range(parts):
        graph = dgl.load_graphs(str(path.parent / f"part{part}/graph.dgl"))[0][0]
        dst = graph.edges(order="eid")[1][graph.edata["inner_edge"].bool()]
        each = zip(owners(path, part)[0].tolist(), dst.tolist(), strict=True)
        pairs |= {(part, owner, row) for owner, row in each if owner != part}
    return len(pairs)


def test_homogeneous(tmp_path):
    torch.manual_seed(0)
    graph = dgl.to_simple(dgl.rand_graph(200, 1500))
    graph.ndata["feat"] = torch.randn(200, 7)
    graph.ndata["train_mask"] = torch.rand(200) < 0.5
    graph.edata["w"] = torch.randn(graph.num_edges(), 2, 3).double()
    path = cut(graph, tmp_path, 3, "metis")
    found = summarize(path)
    assert json.loads(json.dumps(found)) == found
    assert (found["graph_name"], found["num_parts"], found["part_method"]) == ("g", 3, "metis")
    assert found["halo_hops"] == 1
    assert (found["num_nodes"], found["num_edges"]) == (200, graph.num_edges())
    for part in range(3):
        owner, nids = owners(path, part)
        one = found["parts"][part]
        assert one["num_edges"] == len(owner)
        assert one["cut_edges"] == int((owner != part).sum())
        assert one["halo_nodes"] == len(nids[owner != part].unique())
    assert found["cut_edges"] == sum(one["cut_edges"] for one in found["parts"]) > 0
    assert found["halo_nodes"] == sum(one["halo_nodes"] for one in found["parts"]) > 0
    sums = found["sum_rows"]
    assert sums["pulled"] == found["halo_nodes"] >= sums["fewest"] > 0
    assert sums["saved"] == 1 - sums["fewest"] / sums["pulled"]
    assert found["end_rows"] == num_ends(path, 3) != sums["pulled"]
    sizes = [one["num_nodes"] for one in found["parts"]]
    assert sum(sizes) == 200 and found["nodes"]["_N"] == {"total": 200, "per_part": sizes}
    assert found["node_balance"] == pytest.approx(max(sizes) * 3 / 200)
    edges = found["edges"]["_N:_E:_N"]
    assert found["edge_balance"] == pytest.approx(max(edges["per_part"]) * 3 / edges["total"])
    assert edges["cut_per_part"] == [one["cut_edges"] for one in found["parts"]]
    assert found["node_features"] == {
        "_N/feat": {"dtype": "float32", "shape": [7]},
        "_N/train_mask": {"dtype": "bool", "shape": []},
    }
    assert found["edge_features"]["_N:_E:_N/w"] == {"dtype": "float64", "shape": [2, 3]}


def test_heterogeneous(tmp_path):
    torch.manual_seed(0)

    def ends(src, dst):
        return torch.randint(0, src, (200,)), torch.randint(0, dst, (200,))

    graph = dgl.heterograph(
        {
            ("a", "r", "b"): ends(40, 30),
            ("b", "s", "a"): ends(30, 40),
            ("a", "t", "a"): ends(40, 40),
        }
    )
    graph.nodes["b"].data["feat"] = torch.randn(30, 2)
    path = cut(graph, tmp_path, 2)
    found = summarize(path)
    assert json.loads(json.dumps(found)) == found
    assert found["nodes"]["a"]["total"] == 40 and found["nodes"]["b"]["total"] == 30
    assert {name: one["total"] for name, one in found["edges"].items()} == {
        "a:r:b": 200,
        "b:s:a": 200,
        "a:t:a": 200,
    }
    for part in range(2):
        owner, nids = owners(path, part)
        one = found["parts"][part]
        assert one["cut_edges"] == int((owner != part).sum())
        assert one["halo_nodes"] == len(nids[owner != part].unique())
        by_type = [one["cut_per_part"][part] for one in found["edges"].values()]
        assert sum(by_type) == one["cut_edges"]
    assert found["node_features"] == {"b/feat": {"dtype": "float32", "shape": [2]}}


def test_one_part_has_no_cut(tmp_path):
    path = cut(dgl.rand_graph(20, 60), tmp_path, 1)
    found = summarize(path)
    assert (found["cut_edges"], found["halo_nodes"]) == (0, 0)
    assert found["node_balance"] == found["edge_balance"] == 1.0


def test_a_missing_part_is_an_error(tmp_path):
    path = cut(dgl.rand_graph(50, 200), tmp_path, 2)
    (tmp_path / "part1/graph.dgl").unlink()
    with pytest.raises(PartitionError, match="part1/graph.dgl"):
        summarize(path)
