"""What a run of `sar partition` tells of its progress, and where it is shown."""

import fcntl
import os
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import yaml
from harness.parts import load_all

from sar import PartitionOptions
from sar.__main__ import main
from sar.partition.run import partition
from sar.partition.transform import Transforms

SMALL = "synthetic:nodes=200,edges=1000,features=3"
WRITTEN = ["checking ids", "counting edges", "writing nodes", "writing edges", "writing graphs"]
CUT = [
    "counting in-edges", "comparing directions", "counting edges", "spreading edges",
    "sorting edges", "sampling clusters", "joining clusters", "cutting clusters",
]  # fmt: skip


class Told:
    """What was told, one stage after another: its name, total, and how much was done."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def __call__(self, what: str, done: int, total: int) -> None:
        self.calls.append((what, done, total))

    def stages(self) -> list[tuple[str, int, list[int]]]:
        """Each begins at 0."""
        begins = [at for at, (_, done, _) in enumerate(self.calls) if done == 0]
        found = []
        for low, high in pairwise([*begins, len(self.calls)]):
            own = self.calls[low:high]
            assert len({(what, total) for what, _, total in own}) == 1
            found.append((own[0][0], own[0][2], [done for _, done, _ in own]))
        return found

    def names(self) -> list[str]:
        """Without those that do nothing, and repetitions."""
        names = [what for what, _, done in self.stages() if done[-1]]
        return [name for name, _ in groupby(names)]

    def check(self) -> None:
        for what, total, done in self.stages():
            assert done == sorted(done), what
            assert done[-1] == total or not total, what
        assert self.names()


def options(**changes: object) -> PartitionOptions:
    return PartitionOptions(**({"num_parts": 2} | changes))  # type: ignore[arg-type]


def test_a_run_from_tables_tells_of_all_stages(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = [f"n{number}" for number in range(90)]
    pa.parquet.write_table(pa.table({"id": ids}), tmp_path / "nodes.parquet")
    ends = {end: [ids[at] for at in rng.integers(0, 90, 400)] for end in ("s", "d")}
    pa.parquet.write_table(pa.table({**ends, "w": np.ones(400)}), tmp_path / "edges.parquet")
    np.save(tmp_path / "feat.npy", np.ones((90, 3), np.float32))
    (tmp_path / "label.csv").write_text("label\n" + "1\n" * 90)
    content = {
        "nodes": {
            "a": {
                "ids": {"files": "nodes.parquet", "column": "id"},
                "columns": {
                    "feat": {"files": "feat.npy"},
                    "label": {"files": "label.csv", "column": "label"},
                },
            }
        },
        "edges": [
            {"type": ["a", "to", "a"], "files": ["edges.parquet"], "src": "s", "dst": "d",
             "columns": {"w": "w"}}
        ],
    }  # fmt: skip
    (tmp_path / "g.yaml").write_text(yaml.safe_dump(content))
    told = Told()
    wanted = options(transforms=Transforms(symmetrise=True))
    partition(tmp_path / "g.yaml", tmp_path / "out", wanted, told)
    told.check()
    sizes = {(what, total): done[-1] for what, total, done in told.stages()}
    assert sizes["reading node ids", 90] == 90 and sizes["reading edges", 400] == 400
    assert sizes["reading node data", 90] == 90  # the matrix
    assert sizes["reading node data", 0] == 90  # CSV: nobody knows before
    names = told.names()
    assert names[:4] == ["reading node ids", "reading edges", "reading node data", "checking ids"]
    transformed = names.index("finding edges")
    assert names[4:transformed] == ["counting edges", "spreading edges", "sorting edges",
                                    "copying edges"]  # fmt: skip
    cut = names.index("counting in-edges")
    assert names[transformed + 1 : cut] == [
        "copying edge data", "checking ids", "digesting the graph"
    ]  # fmt: skip
    assert names[cut : cut + len(CUT)] == CUT
    assert names[-7:] == ["measuring the cut", *WRITTEN, "digesting the graph"]


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"balance": frozenset({"edges", "halo"})}, "counting halo rows"),
        ({"method": "hotness"}, "following draws"),
        ({"method": "metis"}, "cutting the graph"),
        ({"format": "pyg"}, "writing parts"),
        ({"transforms": Transforms(self_loops="add")}, "copying edges"),
    ],
)
def test_methods_and_formats_tell(changes: dict, name: str, tmp_path: Path) -> None:
    if changes.get("method") == "metis":
        pytest.importorskip("dgl")
    told = Told()
    partition(SMALL, tmp_path / "out", options(**changes), told)
    told.check()
    assert name in told.names()


def test_reading_partitions_tells(tmp_path: Path) -> None:
    path = partition(SMALL, tmp_path / "one", options()).path
    told = Told()
    partition(path, tmp_path / "two", options(method="keep"), told)
    told.check()
    assert told.names()[:4] == [
        "reading node ids", "reading node data", "reading edges", "checking ids"
    ]  # fmt: skip


def test_runs_of_nodes_change_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sar.partition.methods.coarsen._SMALL", 0)
    graph, found = "rmat:scale=10,samples=8000,features=2", []
    wanted = options(num_parts=4, balance=frozenset({"edges", "halo"}))
    for run in (1 << 22, 500):
        monkeypatch.setattr("sar.partition.buckets._RUN", run)
        told = Told()
        path = partition(graph, tmp_path / str(run), wanted, told).path
        found.append([part.node_features["_N/orig_id"] for part in load_all(path, 4)])
        told.check()
        steps = {what: len(done) for what, _, done in told.stages()}
        assert (steps["finding clusters"] > 10) == (steps["refining the cut, sweep 1"] > 10)
        assert (steps["refining the cut, sweep 1"] > 10) == (run == 500)
    assert all(map(torch.equal, *found))


def shown(monkeypatch: pytest.MonkeyPatch, body: Callable[[], object]) -> str:
    """What ``body`` writes to a terminal as its standard error."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    read: list[bytes] = []

    def collect() -> None:
        while (some := _read(ours)) != b"":
            read.append(some)

    thread = threading.Thread(target=collect)
    thread.start()
    with open(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        body()
    thread.join()
    os.close(ours)
    return b"".join(read).decode()


def _read(file: int) -> bytes:
    try:
        return os.read(file, 1 << 16)
    except OSError:  # as Linux tells that the other end is closed
        return b""


def test_a_terminal_shows_a_bar_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["partition", SMALL, "--parts", "2", "--out", str(tmp_path / "p")]
    text = shown(monkeypatch, lambda: main(arguments))
    assert (tmp_path / "p" / "synthetic.json").exists(), text
    for name in ("checking ids", *CUT, *WRITTEN):
        assert f"\r{name}: " in text
    assert re.search(r"\r[a-z ]+: +\d+%\|[^|]*\| [\d.]+k?/[\d.]+k? \[\d\d:\d\d<", text)
    assert "\n" not in text  # each bar is written over by the next one
    assert text.rsplit("\r", 2)[1].strip() == ""  # the last one is gone


def test_no_terminal_shows_none(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert main(["partition", SMALL, "--parts", "2", "--out", str(tmp_path / "p")]) == 0
    assert capsys.readouterr().err == ""
