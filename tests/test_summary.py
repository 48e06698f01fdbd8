"""The summary of a partitioned graph: what `sar inspect` counts, shows and predicts."""

import contextlib
import io
import json
from importlib import import_module

import partition_files as files
import pytest
import torch
from harness.graphs import shop, to_dgl
from test_plan import COSTS

import sar
from sar import PartitionError
from sar.__main__ import main
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


@pytest.mark.parametrize("make", [one_type, lambda: to_dgl(shop())], ids=["one type", "several"])
def test_files_of_dgl_are_counted_as_ours(make, tmp_path):
    """Whose counts are those of sets of nodes and edges."""
    dgl.seed(0)  # with some draws a part lacks a type, which DGL cannot write
    path = cut(make(), tmp_path / "theirs", 2)
    found = summarize(path)
    known = summarize(sar.partition_graph(path, tmp_path / "ours", 2, method="keep", name="g"))
    sums = ("num_nodes", "num_edges", "cut_edges", "halo_nodes", "boundary_nodes", "train_nodes")
    assert all(found[key] > 0 for key in sums) and found["halo_hops"] == 1
    for key in (*sums, "sum_rows", "rows", "parts", "nodes", "edges"):
        assert found[key] == known[key], key


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
    halo = torch.tensor(found["rows"]["halo"])
    to, start = divmod(int(halo.argmax()), 3)
    assert f", most from part {start} to part {to}: {int(halo.max())}" in out


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


def test_inspect_predicts(parts, capsys, monkeypatch):
    """What is predicted from the counts is what the planner predicts from the files."""
    monkeypatch.setattr(import_module("sar.plan.predict"), "measure_costs", lambda *_, **__: COSTS)
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
    told = fails(capsys, path, "--hidden", "8")
    assert "node types a, b, of which none has 'label'" in told
    assert main(["inspect", path]) == 0
    text = capsys.readouterr().out
    assert "a:r:b" in text and "node type" in text
