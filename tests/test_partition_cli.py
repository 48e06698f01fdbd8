"""`sar partition` and `sar inspect` as a user starts them."""

import json
import os
from collections.abc import Callable

import pytest

from sar.__main__ import main

SMALL = "synthetic:nodes=200,edges=1000,features=3"


@pytest.fixture
def sar(nursery) -> Callable[..., tuple[int, str, str]]:
    """``sar(..)``: the status of the command, and what it has written."""

    def run(*arguments: str) -> tuple[int, str, str]:
        child = nursery.start(["-m", "sar", *arguments], dict(os.environ))
        return child.wait(100), child.text("out"), child.text("err")

    return run


@pytest.mark.system
def test_partition_and_inspect(sar, tmp_path):
    status, out, err = sar("partition", SMALL, "--parts", "3", "--out", str(tmp_path / "p"))
    assert (status, err) == (0, "")
    assert "200 nodes, 1,000 edges" in out
    assert str(tmp_path / "p" / "synthetic.json") in out
    status, out, err = sar("inspect", str(tmp_path / "p" / "synthetic.json"))
    assert status == 0, err
    assert "3 partitions (coarsen, 1 hop of halo)" in out
    status, _, err = sar("partition", "synthetic:nodez=3", "--parts", "3", "--out", "out")
    assert status == 2 and err.count("\n") == 1 and "did you mean 'nodes'" in err


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
    assert main(["inspect", str(written)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for number, part in enumerate(summary["parts"]):
        wanted = [number, part["num_nodes"], part["num_edges"], part["cut_edges"]]
        row = next(line for line in lines if line.startswith(f"{number} "))
        assert [int(word.replace(",", "")) for word in row.split()][:4] == wanted
    assert any(line.split() == ["_N/feat", "float32", "3"] for line in lines)
    assert any(line.split() == ["_N/label", "int64", "scalar"] for line in lines)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("partiton", "did you mean partition?"),
        ("--parts x --out OUT", "integer of 1 or more"),
        ("--parts 2", "--out"),
        ("--parts 2 --out OUT --sed 1", "did you mean --seed"),
        ("--parts 2 --out OUT --seed -1", "0 or more"),
        ("--parts 2 --out OUT --name a/b", "graph_name"),
        ("--parts 2 --out /", "not empty"),
        ("--parts 2 --out FULL", "not empty"),
    ],
)
def test_wrong_calls(tmp_path, capsys, monkeypatch, arguments, words):
    """Are told before any work."""
    monkeypatch.setattr("sar.partition.run.open_input", lambda *_, **__: pytest.fail("too late"))
    (tmp_path / "full" / "mine").mkdir(parents=True)
    places = {"OUT": str(tmp_path / "p"), "FULL": str(tmp_path / "full")}
    given = [places.get(word, word) for word in arguments.split()]
    status = main(given if len(given) == 1 else ["partition", SMALL, *given])
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and "Traceback" not in err and words in err
    assert [one.name for one in tmp_path.iterdir()] == ["full"]


def test_an_interrupt_and_a_traceback_that_is_asked_for(tmp_path, capsys, monkeypatch):
    words = ["partition", "gone.npz", "--parts", "2", "--out", str(tmp_path / "p")]
    with pytest.raises(FileNotFoundError):
        main([*words, "--debug"])

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("sar.partition.run.open_input", interrupted)
    assert main(words) == 130 and "interrupted" in capsys.readouterr().err
