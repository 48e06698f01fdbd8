"""The summary of a partitioned graph, against numbers counted on DGL's files with DGL."""

import contextlib
import io
import json

import partition_files as files
import pytest
import torch

from sar.__main__ import main
from sar.cli.inspect import _busiest
from sar.errors import PartitionError
from sar.partition.summary import summarize

dgl = pytest.importorskip("dgl")
pytest.importorskip("dgl.distributed")


def cut(graph, folder, parts, method="random"):
    with contextlib.redirect_stdout(io.StringIO()):
        dgl.distributed.partition_graph(graph, "g", parts, str(folder), part_method=method)
    return folder / "g.json"


def one_type():
    graph = dgl.to_simple(files.random_graph(200, 1500))
    graph.ndata["train_mask"] = torch.rand(200) < 0.5
    graph.edata["w"] = torch.randn(graph.num_edges(), 2, 3).double()
    return graph


def several_types():
    sizes = {"a": 40, "b": 30}
    relations = ("a", "r", "b"), ("b", "s", "a"), ("a", "t", "a")
    return dgl.heterograph(
        {
            (src, name, dst): tuple(torch.randint(0, sizes[one], (200,)) for one in (src, dst))
            for src, name, dst in relations
        }
    )


def inner_edges(path, part):
    """Part and id of the source, and destination, of every inner edge of a part, through DGL."""
    graph = dgl.load_graphs(str(path.parent / f"part{part}/graph.dgl"))[0][0]
    inner = graph.edata["inner_edge"].bool()
    src, dst = (ids[inner] for ids in graph.edges(order="eid"))
    return graph.ndata["part_id"][src], graph.ndata["_ID"][src], graph.ndata["_ID"][dst]


@pytest.mark.parametrize("make", [one_type, several_types])
def test_counts_of_files_that_dgl_wrote(make, tmp_path):
    torch.manual_seed(0)
    graph = make()
    path = cut(graph, tmp_path, 3, "metis" if make is one_type else "random")
    found = summarize(path)
    assert json.loads(json.dumps(found)) == found
    assert (found["graph_name"], found["num_parts"], found["halo_hops"]) == ("g", 3, 1)
    assert (found["num_nodes"], found["num_edges"]) == (graph.num_nodes(), graph.num_edges())
    ends = [inner_edges(path, part) for part in range(3)]
    for part, ((owner, src, _), one) in enumerate(zip(ends, found["parts"], strict=True)):
        assert (one["num_edges"], one["cut_edges"]) == (len(owner), int((owner != part).sum()))
        halo = [len(src[owner == peer].unique()) * (peer != part) for peer in range(3)]
        assert found["rows"]["halo"][part] == halo and one["halo_nodes"] == sum(halo)
        others = [ids[home == part] for other, (home, ids, _) in enumerate(ends) if other != part]
        assert one["boundary_nodes"] == len(torch.cat(others).unique())
        by_type = [edges["cut_per_part"][part] for edges in found["edges"].values()]
        assert sum(by_type) == one["cut_edges"]
    for key in ("num_nodes", "num_edges", "cut_edges", "halo_nodes", "boundary_nodes"):
        assert found[key] == sum(one[key] for one in found["parts"]) > 0
    for ntype in graph.ntypes:
        assert found["nodes"][ntype]["total"] == graph.num_nodes(ntype)
    totals = {name: one["total"] for name, one in found["edges"].items()}
    assert totals == {":".join(one): graph.num_edges(one) for one in graph.canonical_etypes}
    sums = found["sum_rows"]
    assert sums["pulled"] >= found["halo_nodes"] and sums["pulled"] >= sums["fewest"] > 0
    assert sums["saved"] == 1 - sums["fewest"] / sums["pulled"]
    assert sum(map(sum, found["rows"]["fewest"])) == sums["fewest"]
    assert sum(map(sum, found["rows"]["ended"])) == found["end_rows"] >= sums["fewest"]
    assert found["rows"]["ended"] != found["rows"]["halo"]  # the sums may be the same by chance
    if make is several_types:
        assert found["train_nodes"] is found["train_balance"] is None
        return
    assert sums["pulled"] == found["halo_nodes"]
    pairs = {
        (part, home, end)
        for part, (owner, _, dst) in enumerate(ends)
        for home, end in zip(owner.tolist(), dst.tolist())
        if home != part
    }
    assert found["end_rows"] == len(pairs)
    train = [one["train_nodes"] for one in found["parts"]]
    assert sum(train) == found["train_nodes"] == int(graph.ndata["train_mask"].sum())
    assert found["train_balance"] == pytest.approx(max(train) * 3 / sum(train))
    assert found["node_features"] == {"_N/train_mask": {"dtype": "bool", "shape": []}}
    assert found["edge_features"]["_N:_E:_N/w"] == {"dtype": "float64", "shape": [2, 3]}


def test_one_part_has_no_cut_and_a_missing_one_is_an_error(tmp_path):
    found = summarize(cut(files.random_graph(20, 60), tmp_path / "one", 1))
    assert (found["cut_edges"], found["halo_nodes"]) == (0, 0)
    assert found["node_balance"] == found["edge_balance"] == found["halo_balance"] == 1.0
    assert found["rows"] == {"halo": [[0]], "fewest": [[0]], "ended": [[0]]}
    path = cut(files.random_graph(50, 200), tmp_path / "two", 2)
    (path.parent / "part1/graph.dgl").unlink()
    with pytest.raises(PartitionError, match="part1/graph.dgl"):
        summarize(path)


# ------------------------------------------------------------------------------- `sar inspect`


@pytest.fixture
def parts(tmp_path):
    torch.manual_seed(0)
    graph = files.random_graph(60, 300)
    graph.ndata["feat"] = torch.randn(60, 7)
    graph.ndata["train_mask"] = torch.rand(60) < 0.5
    return str(cut(graph, tmp_path / "parts", 3))


def test_inspect_shows_boundary_and_training(parts, capsys):
    assert main(["inspect", parts]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # no bar where standard error is no terminal
    lines, found = out.splitlines(), summarize(parts)
    assert f"boundary    {found['boundary_nodes']} nodes that other partitions need" in lines
    head = next(line.split() for line in lines if line.startswith("part "))
    assert head[-2:] == ["boundary", "training"]
    last = next(line.split() for line in lines if line.startswith("2 "))
    assert last[-2:] == [str(found["parts"][2][f"{key}_nodes"]) for key in ("boundary", "train")]
    (balance,) = [line for line in lines if line.startswith("balance")]
    assert f"training {found['train_balance']:.3f}" in balance
    assert _busiest([[0, 3], [5, 0]]) == ", most from part 0 to part 1: 5"
    assert _busiest([[0]]) == ""


@pytest.mark.parametrize(("size", "suffix"), [(1, "png"), (3, "SVG"), (40, "png")])
def test_inspect_draws(size, suffix, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = cut(files.random_graph(400, 2000), tmp_path / "parts", size)
    picture = tmp_path / f"new/cut.{suffix}"
    for _ in range(2):
        assert main(["inspect", str(path), "--plot", str(picture), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.split("\n}\n")[0] + "}")["num_parts"] == size
    start = picture.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in start
    assert [file.name for file in picture.parent.iterdir()] == [picture.name]


def fails(capsys, *arguments):
    assert main(["inspect", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_wrong_plots(parts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sar.cli.inspect.summarize", lambda *_, **__: pytest.fail("too late"))
    for name in ("cut.gif", "cut"):
        assert "ends in .png or .svg" in fails(capsys, parts, "--plot", str(tmp_path / name))
    (tmp_path / "folder.png").mkdir()
    assert "is a folder" in fails(capsys, parts, "--plot", str(tmp_path / "folder.png"))
    assert "cannot write" in fails(capsys, parts, "--plot", "/proc/cut.png")


def test_inspect_predicts(parts, capsys):
    """What is predicted from the counts is what the planner predicts from the files."""
    assert main(["inspect", parts, "--hidden", "16", "--layers", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["predicted"]
    assert found["model"]["hidden"] == 16 and found["model"]["layers"] == 2
    assert (found["features"], found["classes"]) == (7, 16)
    assert len(found["memory_bytes"]) == len(found["sent_bytes"]) == 3
    assert min(found["memory_bytes"]) > 1e8 and min(found["sent_bytes"]) > 0


def test_wrong_predictions(tmp_path, capsys):
    path = str(cut(files.random_graph(20, 60), tmp_path / "plain", 2))
    assert "no 'feat'" in fails(capsys, path, "--hidden", "8")
    assert "--layers: got '0'" in fails(capsys, path, "--layers", "0")
    several = dgl.heterograph(
        {("a", "r", "b"): ([0, 1], [1, 2]), ("b", "s", "a"): ([0, 1], [1, 2])}
    )
    path = str(cut(several, tmp_path / "several", 1))
    assert "2 node and 2 edge types" in fails(capsys, path, "--hidden", "8")
    assert main(["inspect", path]) == 0
    text = capsys.readouterr().out
    assert "a:r:b" in text and "node type" in text
