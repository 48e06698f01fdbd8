"""The benchmarks' command line, bounds and measured processes, at tiny sizes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import measure, registry
from benchmarks.cases import cut, exact, learns, relations, tables
from benchmarks.cluster import Cluster, WorkerError
from benchmarks.registry import Benchmark, Figure, Options, Report

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
    assert {name for name, item in registry.load_all().items() if item.group == "core"} == CORE


@pytest.mark.parametrize(
    "figure",
    [
        Figure("share", 2.0, at_most=1.5),
        Figure("accuracy", 0.7, at_least=0.8),
        Figure("share", math.nan, at_most=1.5),
    ],
)
def test_a_missed_bound_exits_1(
    figure: Figure, known: Callable[[Report], None], capsys: pytest.CaptureFixture[str]
) -> None:
    known(Report([Figure("other", 1.0, at_most=1.0), figure]))
    assert command.main(["run", "fake"]) == 1
    out = capsys.readouterr().out
    assert "MISSED" in out and figure.bound in out and figure.name in out


@pytest.mark.parametrize("wanted", ["fake", "group"])
def test_kept_bounds_exit_0_and_are_written(
    wanted: str, known: Callable[[Report], None], tmp_path: Path
) -> None:
    known(Report([Figure("share", 1.0, at_most=1.5), Figure("seconds", 3.0, "s")]))
    out = tmp_path / "out.json"
    assert command.main(["run", wanted, "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["benchmarks"]["fake"]["ok"]
    assert written["benchmarks"]["fake"]["figures"][0]["at_most"] == 1.5
    assert {"cores", "memory_gib", "system", "versions"} == set(written["machine"])


def test_an_unknown_name_exits_2(
    known: Callable[[Report], None], capsys: pytest.CaptureFixture[str]
) -> None:
    known(Report())
    assert command.main(["run", "nothing"]) == 2
    assert "'nothing', expected one of fake" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--sar-path", "--sar-path-gat"])
def test_a_folder_that_is_no_checkout_exits_2(
    option: str,
    known: Callable[[Report], None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    known(Report())
    assert command.main(["run", "fake", option, str(tmp_path)]) == 2
    assert f"{option}: {tmp_path} holds no folder 'sar'" in capsys.readouterr().err
    (tmp_path / "sar").mkdir()
    assert command.main(["run", "fake", option, str(tmp_path)]) == 0


@pytest.mark.parametrize("option", ["--repeats", "--ranks"])
@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_less_than_one_rank_or_turn_exits_2(
    option: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["run", "memory", option, number])
    assert f"{option}: got '{number}', expected an integer of 1 or more" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    known: Callable[[Report], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    known(Report())
    out = tmp_path / "missing" / "figures.json"
    assert command.main(["run", "fake", "--json", str(out)]) == 2
    assert f"--json: got {out}, expected a file in a folder" in capsys.readouterr().err


def test_busy_processors_are_counted() -> None:
    before, watch = measure.busy_seconds(), measure.Stopwatch()
    while watch.read().cpu < 0.3:
        pass
    cores = os.sysconf("SC_NPROCESSORS_ONLN")
    assert measure.busy_seconds() - before > 0.2 / cores


def test_real_graphs_are_skipped_without_their_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SAR_DATA", raising=False)
    assert command.main(["run", "real"]) == 0
    assert "skipped: pass --data" in capsys.readouterr().out


def test_peak_memory_sees_what_was_let_go() -> None:
    measure.settle()
    before = measure.anonymous_bytes()
    with measure.PeakMemory() as watch:
        torch.ones(64 << 20, dtype=torch.uint8).sum()
    measure.settle()
    assert watch.peak.best - before > 60 << 20
    assert measure.anonymous_bytes() - before < 32 << 20


def test_a_failing_process_is_named_with_its_traceback() -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 0 of 1: .*no/such\.json"):
        with Cluster("benchmarks.tasks.loading:Loading", parts="no/such.json") as cluster:
            cluster.call("run", part_id=0)


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


@pytest.mark.system
def test_relations_share_rows_at_a_tiny_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(relations, "PAPERS", 100)
    monkeypatch.setattr(relations, "RANKS", 2)
    report = relations.relations(Options(cache=tmp_path))
    assert report.ok and all(0 < figure.value < 1 for figure in report.figures), report.figures


@pytest.mark.system
def test_tables_are_cut_at_a_tiny_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "EDGES", (20_000, 40_000))
    report = tables.out_of_core(Options(cache=tmp_path))
    assert [row[:2] for row in report.tables[0].rows] == [[20_000, 2_000], [40_000, 4_000]]
    for *_, cpu, wall, memory, scratch, written in report.tables[0].rows:
        assert min(cpu, wall, memory, written) > 0
        assert scratch >= 0  # looked at once a second, so a short run may have ended before
    assert not list(tmp_path.iterdir())


@pytest.mark.system
def test_cuts_are_compared_at_a_tiny_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cut, "SCALE", 8)
    report = cut.cut(Options(cache=tmp_path, nodes=1000))
    assert [row[:2] for row in report.tables[0].rows] == [
        [name, shown] for name in ("community-1000", "rmat-8") for shown in cut.METHODS
    ]
    assert all(math.isfinite(f.value) for f in report.figures)  # beyond a small graph's: about 0
    assert all(f.value > 0 for f in report.figures if "cut," in f.name or "max / mean" in f.name)


@pytest.mark.system
def test_balance_is_trained_with_at_a_tiny_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"SCALE": 8, "PARTS": 2}.items():
        monkeypatch.setattr(cut, name, value)
    report = cut.balance_training(Options(cache=tmp_path, repeats=1))
    assert report.figures[0].value > 0
    assert [row[0] for row in report.tables[0].rows] == [cut.DGLS, cut.BALANCED]


def test_learning_is_skipped_without_its_folder(tmp_path: Path) -> None:
    assert "coauthor_cs.npz, cora.npz, wn18rr.npz" in str(learns.learns(Options()).skipped)
    assert learns.learns(Options(data=tmp_path)).skipped


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
def test_learning_is_measured_at_a_tiny_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    triples = np.stack([rng.integers(0, n, 200) for n in (40, 3, 40)], 1)
    parts = {"train": triples[:150], "valid": triples[150:170], "test": triples[170:]}
    np.savez(tmp_path / "wn18rr.npz", num_entities=40, num_relations=3, **parts)
    monkeypatch.setattr(learns, "RANKS", 2)
    monkeypatch.setitem(learns.SEEDS, "wn18rr", range(1))
    monkeypatch.setitem(learns.STEPS, "wn18rr", {"epochs": 5, "batch": 64})
    report = learns._links(Options(cache=tmp_path), "wn18rr", tmp_path / "wn18rr.npz")
    assert all(math.isfinite(one.value) for one in report.figures)
    assert [row[0] for row in report.tables[0].rows] == [
        "DGL, seed 0", "1 rank, seed 0", "2 ranks, seed 0",
    ]  # fmt: skip
