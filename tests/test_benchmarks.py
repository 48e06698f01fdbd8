"""The benchmarks and `sar bench`: command lines, bounds, measured processes, at tiny sizes."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import measure, registry
from benchmarks.cases import exact, learns
from benchmarks.cluster import Cluster, WorkerError
from benchmarks.registry import Benchmark, Figure, Options, Report
from benchmarks.tables import measured, output
from sar.__main__ import main
from sar.cli.bench import package_root

pytest.importorskip("dgl")  # writes partitions; imported here, it sets an environment variable

CORE = {"exact", "layers", "loading", "memory", "real", "speed"}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Callable[[Report], None]:
    """``known(report)`` makes a benchmark "fake" of group "group" that reports it the only one."""

    def know(report: Report) -> None:
        fake = Benchmark("fake", "group", "summary", lambda options: report)
        monkeypatch.setattr(registry, "load_all", lambda: {"fake": fake})

    return know


def test_list_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert {row[0] for row in rows if row[1] == "core"} == CORE
    assert {row[0] for row in rows} == {*registry.load_all()}


@pytest.mark.parametrize(
    "figure",
    [
        Figure("share", 2.0, at_most=1.5),
        Figure("accuracy", 0.7, at_least=0.8),
        Figure("share", math.nan, at_most=1.5),
    ],
)
def test_a_missed_bound_exits_1(figure: Figure, known: Any, capsys: Any) -> None:
    known(Report([Figure("other", 1.0, at_most=1.0), figure]))
    assert command.main(["run", "fake"]) == 1
    out = capsys.readouterr().out
    assert "MISSED" in out and figure.bound in out and figure.name in out


@pytest.mark.parametrize("wanted", ["fake", "group"])
def test_kept_bounds_exit_0_and_are_written(wanted: str, known: Any, tmp_path: Path) -> None:
    known(Report([Figure("share", 1.0, at_most=1.5), Figure("seconds", 3.0, "s")]))
    out = tmp_path / "out.json"
    assert command.main(["run", wanted, "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["benchmarks"]["fake"]["ok"]
    assert written["benchmarks"]["fake"]["figures"][0]["at_most"] == 1.5
    assert {"cores", "memory_gib", "system", "versions"} == set(written["machine"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing"], "'nothing', expected one of fake"),
        (["fake", "--sar-path", "."], "--sar-path: got '.', expected a checkout, which has"),
        (["fake", "--sar-path-gat", "."], "--sar-path-gat: got '.', expected a checkout"),
        (["fake", "--json", "missing/f.json"], "--json: got missing/f.json, expected a file in a"),
        (["fake", "--repeats", "0"], "--repeats: got '0', expected an integer of 1 or more"),
        (["fake", "--ranks", "two"], "--ranks: got 'two', expected an integer of 1 or more"),
    ],
)
def test_wrong_arguments_exit_2(
    words: list[str], told: str, known: Any, capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    known(Report())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        raise SystemExit(command.main(["run", *words]))
    assert told in capsys.readouterr().err
    (tmp_path / "sar").mkdir()
    assert command.main(["run", "fake", "--sar-path", "."]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scale", "3"], "--scale: got '3', expected an integer of 8 or more"),
        (["--ranks", "0", "2"], "--ranks: got '0'"),
        (["--bandwidth", "fast"], "--bandwidth: got 'fast'"),
        (["--sar-path", "nowhere"], "--sar-path: nowhere holds no folder 'sar'"),
        (["--model", "gta"], "did you mean gat?"),
        (["--out", "taken"], "is a file, expected a folder"),
    ],
)
def test_typos_of_sar_bench(
    words: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("")
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_measuring_package_is_found() -> None:
    assert (package_root() / "benchmarks" / "multihost.sh").is_file()


def test_data_sets_are_asked_for(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.delenv("SAR_DATA", raising=False)
    assert command.main(["run", "real"]) == 0
    assert "skipped: pass --data" in capsys.readouterr().out
    assert "coauthor_cs.npz, cora.npz, wn18rr.npz" in str(learns.learns(Options()).skipped)
    assert learns.learns(Options(data=tmp_path)).skipped


def test_peak_memory_sees_what_was_let_go() -> None:
    measure.settle()
    before = measure.anonymous_bytes()
    with measure.PeakMemory() as watch, measure.PeakOfAll() as all_of_it:
        torch.ones(64 << 20, dtype=torch.uint8).sum()
    measure.settle()
    assert watch.peak.best - before > 60 << 20 and all_of_it.peak >= before
    assert measure.anonymous_bytes() - before < 32 << 20


def test_a_failing_process_is_named_with_its_traceback() -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 0 of 1: .*no/such\.json"):
        with Cluster("benchmarks.cases.loading:Loading", parts="no/such.json") as cluster:
            cluster.call("run", part_id=0)


# ---------------------------------------------------------------- tiny sizes


@pytest.mark.system
def test_exact_runs_at_a_tiny_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"NODES": 200, "EDGES": 800, "RANKS": 2, "MODELS": ("SAGE",)}.items():
        monkeypatch.setattr(exact, name, value)
    monkeypatch.setattr(exact, "CUTS", (("random", 2),))
    report = exact.exact(Options(cache=tmp_path))
    assert report.ok, report.figures
    assert [row[:3] for row in report.tables[0].rows] == [
        ["SAGE", "float32", "random"],
        ["SAGE", "float64", "random"],
    ]


def test_held_out_edges_are_not_trained_on(tmp_path: Path) -> None:
    """Nor the other way round; what is labeled 0 is no edge at all."""
    keys = np.unique(np.random.default_rng(0).integers(0, 1600, 400))
    src, dst = (part[keys // 40 < keys % 40] for part in (keys // 40, keys % 40))
    both = {"src": np.concatenate([src, dst]), "dst": np.concatenate([dst, src])}
    np.savez(tmp_path / "cora.npz", num_nodes=40, feat=np.eye(40, dtype=np.float32), **both)
    content = learns.CONTENTS["cora"](tmp_path / "cora.npz")
    parts = [content[name][:, :2].tolist() for name in ("valid_pairs", "test_pairs")]
    labels = [content[name][:, 3].tolist() for name in ("valid_pairs", "test_pairs")]
    pairs = [(*sorted(pair), label) for one in zip(parts, labels) for pair, label in zip(*one)]
    edges, none = ({(a, b) for a, b, label in pairs if label == want} for want in (1, 0))
    train = {(min(pair), max(pair)) for pair in zip(*(content[e].tolist() for e in ("src", "dst")))}
    whole = set(zip(src.tolist(), dst.tolist()))
    assert edges and not edges & train and edges | train == whole
    assert none and not none & whole


@pytest.mark.system
def test_rows_of_sar_bench(tmp_path: Path) -> None:
    asked = {"scale": 8, "method": "random", "model": "gat", "ranks": [2], "epochs": 1}
    args = Namespace(**asked, bandwidth=[], sar_path=None, cache=Options(cache=tmp_path).cache)
    found = measured.compare(args)
    memory = found["memory"]
    assert [(row["contender"], row["ranks"]) for row in memory] == [("DGL", 1), ("sar, strict", 2)]
    assert memory[1]["even_share"] == pytest.approx(memory[0]["mb"] / 2)
    speed = {(row["contender"], row["ranks"]): row for row in found["speed"]}
    assert speed["DGL", 1]["sent_mb"] == 0 < speed["sar, strict", 2]["sent_mb"]
    assert speed["DGL", 1]["cpu_over_dgl"] == 1
    assert {row["pass"] for row in found["traffic"]} >= {"forward", "backward"}
    total = sum(row["sent_mb"] for row in found["traffic"])
    assert total == pytest.approx(speed["sar, strict", 2]["sent_mb"])
    assert measured.bandwidth(args) == ([], "no rate was asked for")


# ---------------------------------------------------------------- what is written


def test_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tables_: dict[str, Any] = {
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
    output.write(tmp_path / "out", machine, {"model": "sage"}, tables_)
    written = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert written["memory"] == tables_["memory"] and written["request"] == {"model": "sage"}
    page = (tmp_path / "out" / "bench.md").read_text()
    assert "| sar, strict | 4 | 30 | 25 |" in page and "needs root" in page
    plots = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert plots == {"memory.png", "speed.png", "traffic.png"}
