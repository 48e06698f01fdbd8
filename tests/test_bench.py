"""`sar bench`: wrong options, what it writes, and the package that it needs in a wheel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.registry import Options
from benchmarks.tables import measured, output
from benchmarks.tables.contenders import Request
from sar.__main__ import main
from sar.cli.bench import package_root

pytest.importorskip("dgl")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scale", "3"], "--scale: got '3', expected an integer of 8 or more"),
        (["--ranks", "0", "2"], "--ranks: got '0'"),
        (["--epochs", "0"], "--epochs: got '0'"),
        (["--bandwidth", "fast"], "--bandwidth: got 'fast'"),
        (["--sar-path", "nowhere"], "--sar-path: nowhere holds no folder 'sar'"),
        (["--model", "gta"], "did you mean gat?"),
    ],
)
def test_typos(words: list[str], message: str, capsys: Any) -> None:
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_no_file_is_overwritten_by_a_folder(tmp_path: Path, capsys: Any) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    assert main(["bench", "--out", str(taken)]) == 2
    assert "is a file, expected a folder" in capsys.readouterr().err


def test_the_measuring_package_is_found() -> None:
    assert (package_root() / "benchmarks" / "multihost.sh").is_file()


@pytest.mark.system
def test_rows_of_a_tiny_graph(tmp_path: Path) -> None:
    request = Request(8, "random", "sage", (2,), 1, (), None, Options(cache=tmp_path).cache)
    memory = measured.memory(request)
    assert [(row["contender"], row["ranks"]) for row in memory] == [("DGL", 1), ("sar, strict", 2)]
    assert memory[1]["even_share"] == pytest.approx(memory[0]["mb"] / 2)
    speed = {(row["contender"], row["ranks"]): row for row in measured.speed(request)}
    assert speed["DGL", 1]["sent_mb"] == 0 < speed["sar, strict", 2]["sent_mb"]
    assert speed["DGL", 1]["cpu_over_dgl"] == 1
    traffic = measured.traffic(request)
    assert {row["pass"] for row in traffic} >= {"forward", "backward"}
    total = sum(row["sent_mb"] for row in traffic)
    assert total == pytest.approx(speed["sar, strict", 2]["sent_mb"])
    assert measured.bandwidth(request) == ([], "no rate was asked for")


def test_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tables: dict[str, Any] = {
        "memory": [
            {"contender": "DGL", "ranks": 1, "mb": 100.0, "even_share": 100.0},
            {"contender": "sar, strict", "ranks": 4, "mb": 30.0, "even_share": 25.0},
        ],
        "speed": [{"contender": "DGL", "ranks": 1, "wall_s": 2.0, "cpu": 2.0}],
        "bandwidth": [],
        "traffic": [{"layer": "convs.0", "pass": "forward", "sent_mb": 3.0}],
        "skipped": {"bandwidth": "not measured: needs root"},
    }
    machine = {"cores": 2, "memory_gib": 8, "versions": {"torch": "2"}}
    output.write(tmp_path / "out", machine, {"model": "sage"}, tables)
    written = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert written["memory"] == tables["memory"] and written["request"] == {"model": "sage"}
    page = (tmp_path / "out" / "bench.md").read_text()
    assert "| sar, strict | 4 | 30 | 25 |" in page and "needs root" in page
    plots = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert plots == {"memory.png", "speed.png", "traffic.png"}


def test_memory_has_the_even_share_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [{"contender": "DGL", "ranks": 1, "mb": 100.0}]
    rows += [{"contender": "sar, strict", "ranks": size, "mb": 90.0 / size} for size in (1, 2, 4)]
    output.plot("memory", rows, tmp_path / "m.svg", dark=True)
    text = (tmp_path / "m.svg").read_text()
    for word in ("1", "2", "4", "ranks", "MB", "sar, strict", "DGL / ranks"):
        assert f">{word}</text>" in text, word


def test_bandwidth_has_its_bound_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"rate": "100mbit", "bits": 1e8, "wall_s": 3.0, "compute_s": 1.0, "wire_s": 2.5},
        {"rate": "1gbit", "bits": 1e9, "wall_s": 1.2, "compute_s": 1.0, "wire_s": 0.25},
    ]
    output.plot("bandwidth", rows, tmp_path / "b.svg")
    text = (tmp_path / "b.svg").read_text()
    assert all(f">{word}</text>" in text for word in ("100 Mbit/s", "1 Gbit/s", "epoch", "bound"))
