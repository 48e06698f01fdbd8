"""`sar partition` and `sar inspect` as a user starts them."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sar.__main__ import COMMANDS, main
from sar.partition.sources.open import open_source

SMALL = "synthetic:nodes=200,edges=1000,features=3"


@pytest.fixture
def sar(nursery) -> Callable[..., tuple[int, str, str]]:
    """``sar(..)``: the status of the command, and what it has written."""

    def run(*arguments: str) -> tuple[int, str, str]:
        child = nursery.start(["-m", "sar", *arguments], dict(os.environ))
        return child.wait(100), child.text("out"), child.text("err")

    return run


def fails(capsys, *arguments: str) -> str:
    """The one line that a wrong call prints."""
    status = main(list(arguments))
    out, err = capsys.readouterr()
    assert status == 2
    assert out == "" and "Traceback" not in err
    return err


@pytest.fixture
def parts(tmp_path) -> Path:
    assert main(["partition", SMALL, "--parts", "3", "--out", str(tmp_path / "parts")]) == 0
    return tmp_path / "parts" / "synthetic.json"


@pytest.mark.system
def test_partition_and_inspect(sar, tmp_path):
    status, out, err = sar("partition", SMALL, "--parts", "3", "--out", str(tmp_path / "p"))
    assert (status, err) == (0, "")
    assert "200 nodes, 1,000 edges" in out
    assert str(tmp_path / "p" / "synthetic.json") in out
    status, out, err = sar("inspect", str(tmp_path / "p" / "synthetic.json"))
    assert status == 0, err
    assert "3 partitions (coarsen, 1 hop of halo)" in out


@pytest.mark.system
def test_a_user_error_is_one_line(sar, tmp_path):
    status, _, err = sar(
        "partition", "synthetic:nodez=3", "--parts", "3", "--out", str(tmp_path / "p")
    )
    assert status == 2
    assert err.count("\n") == 1 and "did you mean 'nodes'" in err
    assert not list(tmp_path.iterdir())


def test_cut_and_balance_agree_with_the_files(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["partition", SMALL, "--parts", "3", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    (written,) = out.glob("*.json")
    assert main(["inspect", str(written), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert f"cut      {summary['cut_edges']:,} edges" in text
    nodes, edges = summary["node_balance"], summary["edge_balance"]
    assert f"mean {nodes:.3f}" in text and f"mean {edges:.3f}" in text
    assert summary["num_parts"] == 3 and summary["part_method"] == "coarsen"
    assert summary["node_features"]["_N/feat"] == {"dtype": "float32", "shape": [3]}


def test_inspect_table(parts, capsys):
    capsys.readouterr()
    main(["inspect", str(parts), "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(parts)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for number, part in enumerate(summary["parts"]):
        wanted = [number, part["num_nodes"], part["num_edges"], part["cut_edges"]]
        row = next(line for line in lines if line.startswith(f"{number} "))
        assert [int(word.replace(",", "")) for word in row.split()][:4] == wanted
    assert any(line.split() == ["_N/feat", "float32", "3"] for line in lines)
    assert any(line.split() == ["_N/label", "int64", "scalar"] for line in lines)


def test_inspect_of_a_heterogeneous_graph(tmp_path, capsys):
    content = {
        "num_nodes/a": np.array(6),
        "num_nodes/b": np.array(4),
        "edges/a/to/b": np.array([[0, 1, 2, 5], [0, 1, 3, 3]]),
    }
    np.savez(tmp_path / "h.npz", **content)
    out = str(tmp_path / "p")
    arguments = ["partition", str(tmp_path / "h.npz"), "--parts", "2", "--out", out]
    assert main([*arguments, "--method", "contiguous"]) == 0
    capsys.readouterr()
    assert main(["inspect", f"{out}/h.json"]) == 0
    text = capsys.readouterr().out
    assert "a:to:b" in text and "node type" in text


def test_same_seed_same_files(tmp_path):
    """By random cut: METIS in DGL reads memory that it has not written and seldom differs."""
    cut = ["--method", "random", "--parts", "2", "--seed", "7"]
    files = []
    for name in ("one", "two"):
        out = tmp_path / name
        assert main(["partition", SMALL, *cut, "--out", str(out)]) == 0
        files.append({f.relative_to(out): f.read_bytes() for f in out.rglob("*") if f.is_file()})
    assert files[0] == files[1]
    assert len(files[0]) == 2 * 3 + 1


def test_options(tmp_path):
    out = str(tmp_path / "p")
    arguments = ["partition", SMALL, "--parts", "2", "--out", out, "--name", "mine"]
    for extra in (["--method", "random"], ["--balance", "nodes", "--overwrite"]):
        assert main([*arguments, *extra]) == 0
    assert (tmp_path / "p" / "mine.json").exists()


def test_more_partitions_than_nodes_are_told(tmp_path, capsys):
    out = str(tmp_path / "p")
    for method in ("random", "coarsen"):
        said = fails(capsys, "partition", SMALL, "--parts", "300", "--out", out, "--method", method)
        assert "num_parts is 300" in said and "has 200 nodes" in said
    assert not list(tmp_path.iterdir())


def test_the_root_is_no_output(capsys):
    assert "not empty" in fails(capsys, "partition", SMALL, "--parts", "2", "--out", "/")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["partiton"], "did you mean partition?"),
        (["partition", SMALL, "--parts", "0", "--out", "OUT"], "integer of 1 or more"),
        (["partition", SMALL, "--parts", "x", "--out", "OUT"], "integer of 1 or more"),
        (["partition", SMALL, "--parts", "2"], "--out"),
        (["partition", SMALL, "--parts", "2", "--out", "OUT", "--sed", "1"], "did you mean --seed"),
        (["partition", SMALL, "--parts", "2", "--out", "OUT", "--method", "mets"], "mean metis"),
        (["partition", SMALL, "--parts", "2", "--out", "OUT", "--seed", "-1"], "0 or more"),
        (["partition", SMALL, "--parts", "2", "--out", "OUT", "--name", "a/b"], "graph_name"),
        (["partition", "gone.npz", "--parts", "2", "--out", "OUT"], "does not exist"),
        (["inspect", "gone.json"], "gone.json"),
    ],
)
def test_wrong_calls(tmp_path, capsys, arguments, words):
    arguments = [str(tmp_path / "p") if word == "OUT" else word for word in arguments]
    assert words in fails(capsys, *arguments)
    assert not list(tmp_path.iterdir())


def test_output_is_checked_before_the_work(parts, capsys, monkeypatch):
    capsys.readouterr()
    monkeypatch.setattr("sar.partition.run.open_input", lambda *_, **__: pytest.fail("too late"))
    err = fails(capsys, "partition", SMALL, "--parts", "2", "--out", str(parts.parent))
    assert "not empty" in err


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(FileNotFoundError):
        main(["partition", "gone.npz", "--parts", "2", "--out", str(tmp_path / "p"), "--debug"])


def test_interrupt(tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("sar.partition.run.open_input", interrupted)
    assert main(["partition", SMALL, "--parts", "2", "--out", str(tmp_path / "p")]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_commands_are_known():
    assert {"partition", "inspect"} <= set(COMMANDS)
    assert open_source(SMALL).total_nodes == 200
