"""The summary of a partitioned graph, against numbers counted on the whole graph with DGL."""

import builtins
import contextlib
import importlib
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
    graph = dgl.to_simple(files.random_graph(200, 1500))
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
    assert found["end_rows"] == num_ends(path, 3)
    rows = found["rows"]["halo"]
    assert [sum(row) for row in rows] == [one["halo_nodes"] for one in found["parts"]]
    assert sum(map(sum, found["rows"]["ended"])) == found["end_rows"]
    assert found["rows"]["ended"] != rows  # the sums may be the same by chance
    assert sum(map(sum, found["rows"]["fewest"])) == sums["fewest"]
    needed = [owners(path, part) for part in range(3)]
    for part in range(3):
        others = [owner == part for other, (owner, _) in enumerate(needed) if other != part]
        nids = [nids for other, (_, nids) in enumerate(needed) if other != part]
        found_nids = torch.cat([ids[mask] for ids, mask in zip(nids, others)]).unique()
        assert found["parts"][part]["boundary_nodes"] == len(found_nids)
        owner, nids = needed[part]
        for peer in range(3):
            expected = 0 if peer == part else len(nids[owner == peer].unique())
            assert rows[part][peer] == expected
    train = [one["train_nodes"] for one in found["parts"]]
    assert sum(train) == found["train_nodes"] == int(graph.ndata["train_mask"].sum())
    assert found["train_balance"] == pytest.approx(max(train) * 3 / sum(train))
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
    path = cut(files.random_graph(20, 60), tmp_path, 1)
    found = summarize(path)
    assert (found["cut_edges"], found["halo_nodes"]) == (0, 0)
    assert found["node_balance"] == found["edge_balance"] == found["halo_balance"] == 1.0
    assert found["train_nodes"] is found["train_balance"] is None
    assert found["rows"] == {"halo": [[0]], "fewest": [[0]], "ended": [[0]]}


def test_a_missing_part_is_an_error(tmp_path):
    path = cut(files.random_graph(50, 200), tmp_path, 2)
    (tmp_path / "part1/graph.dgl").unlink()
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


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("suffix", ["png", "SVG"])
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


def test_a_plot_without_matplotlib(parts, tmp_path, capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    err = fails(capsys, parts, "--plot", str(tmp_path / "cut.png"))
    assert "pip install 'sar-gnn[plot]'" in err


def test_inspect_predicts(parts, capsys):
    """What is predicted from the counts is what the planner predicts from the files."""
    assert main(["inspect", parts, "--hidden", "16", "--layers", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["predicted"]
    assert found["model"]["hidden"] == 16 and found["model"]["layers"] == 2
    assert (found["features"], found["classes"]) == (7, 16)
    assert len(found["memory_bytes"]) == len(found["sent_bytes"]) == 3
    assert min(found["memory_bytes"]) > 1e8 and min(found["sent_bytes"]) > 0


def test_inspect_predicts_in_lines(parts, capsys, monkeypatch):
    from sar.plan import Costs

    costs = Costs(1e6, 1e3, 10.0, *[0.0] * 3, [8], [4], [], *[0.0] * 3, 3, 1e8, 100)
    predicting = importlib.import_module("sar.plan.predict")
    monkeypatch.setattr(predicting, "measure_costs", lambda work, seconds: costs)
    assert main(["inspect", parts, "--model", "gcn"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("memory      0.09 to 0.09 GiB a rank (predicted: 3-layer gcn, ")
    assert lines[-1].startswith("traffic     0.00 to 0.00 MB sent by a rank")


def test_wrong_predictions(tmp_path, capsys):
    path = str(cut(files.random_graph(20, 60), tmp_path / "plain", 2))
    assert "no 'feat'" in fails(capsys, path, "--hidden", "8")
    assert "--layers: got '0'" in fails(capsys, path, "--layers", "0")
    several = dgl.heterograph(
        {("a", "r", "b"): ([0, 1], [1, 2]), ("b", "s", "a"): ([0, 1], [1, 2])}
    )
    path = str(cut(several, tmp_path / "several", 1))
    assert "2 node and 2 edge types" in fails(capsys, path, "--hidden", "8")


def test_a_bar_on_a_terminal(parts, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    import sys

    assert main(["inspect", parts]) == 0
    assert "reading" in sys.stderr.getvalue() and "part" in sys.stderr.getvalue()
