"""`sar partition` on bad input and options: one line that says where, and nothing stays behind."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.tasks.cuts import files_of, write_plain, write_typed
from sar.__main__ import main
from sar.partition import run
from sar.partition.run import partition_graph

NODES, EDGES = 60, 400
RNG = np.random.default_rng(11)
CONTENT = {
    "num_nodes": np.array(NODES),
    "src": RNG.integers(0, NODES, EDGES),
    "dst": RNG.integers(0, NODES, EDGES),
    "feat": RNG.random((NODES, 4), dtype=np.float32),
}
Fails = Callable[..., str]


@pytest.fixture
def graph(tmp_path: Path) -> str:
    np.savez(tmp_path / "g.npz", **CONTENT)
    return str(tmp_path / "g.npz")


@pytest.fixture
def fails(tmp_path: Path, capsys: pytest.CaptureFixture) -> Fails:
    """The line that a wrong call prints; it writes below ``tmp_path/into``."""

    def call(*arguments: str, out: str = "above/out") -> str:
        before = files_of(tmp_path)
        words = ["--parts", "3", "--out", str(tmp_path / "into" / out), *arguments]
        try:
            status = main(["partition", *words])
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr()
        assert status == 2 and said.out == ""
        assert said.err.splitlines()[0].startswith("sar") and "Traceback" not in said.err
        assert files_of(tmp_path) == before
        assert not list(tmp_path.rglob("sar-*")) and not list(tmp_path.rglob("*.cut"))
        assert not (tmp_path / "into" / "above").exists(), "it made this folder"
        return said.err

    return call


@pytest.mark.parametrize(
    ("key", "row", "value", "words"),
    [
        ("src", 7, NODES, "g.npz: .*src ids span .*row 7 is 60"),
        ("dst", 5, -3, "g.npz: .*dst ids span .*row 5 is -3"),
        ("feat", (9, 1), np.nan, "g.npz: 'feat' of '_N': row 9 holds nan"),
        ("feat", slice(50, None), None, "g.npz: .*'feat'.*expected 60 rows"),
        ("num_nodes", None, None, "g.npz: .*it has no key 'num_nodes'"),
    ],
)
def test_bad_values_name_file_row_and_value(
    key: str, row: object, value: float | None, words: str, tmp_path: Path, fails: Fails
) -> None:
    content = {name: array.copy() for name, array in CONTENT.items()}
    if row is None:
        del content[key]
    elif value is None:
        content[key] = content[key][:50]
    else:
        content[key][row] = value
    np.savez(tmp_path / "g.npz", **content)
    assert re.search(words, fails(str(tmp_path / "g.npz")))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--assignment", "gone.txt"], "gone.txt': there is no such file"),
        (["--assignment", "a.txt"], "a.txt: row 1 is 'x', expected a part from 0 to 2"),
        (["--assignment", "g.npz", "--method", "metis"], "expected one of them"),
        (["--method", "keep"], "the input has none"),
        (["--balance", "edges,hallo"], "got 'hallo', expected some of"),
        (["--method", "random", "--balance", "halo"], "balances nothing but nodes"),
        (["--balance", "train"], "has a 'train_mask'"),
        (["--memory", "10MB"], "memory is 10,000,000 bytes (0.01 GiB)"),
        (["--memory", "some"], "expected a size"),
        (["--symmetrize"], "did you mean --symmetrise?"),
        (["--overwrit"], "did you mean --overwrite?"),
        (["--self-loops", "ad"], "did you mean add?"),
        (["--format", "pgy"], "did you mean pyg?"),
        (["--parts", "61"], "has 60 nodes"),
        (["--parts", "65537"], "expected at most 65536"),
    ],
)
def test_options(
    options: list[str], words: str, graph: str, tmp_path: Path, fails: Fails,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("0\nx\n")
    if words[:3] not in ("the", "mem", "has", "num", "a.t"):
        late = lambda *_, **__: pytest.fail("told too late")  # noqa: E731
        monkeypatch.setattr("sar.partition.run.open_input", late)
    assert words in fails(graph, *options)


def test_inputs_with_typos(graph: str, tmp_path: Path, fails: Fails) -> None:
    for name in ("gg.npz", "g.npy", "g.nzp"):
        assert "did you mean 'g.npz'" in fails(str(tmp_path / name))


def test_outputs(graph: str, tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    into = tmp_path / "into"
    (into / "full").mkdir(parents=True)
    (into / "full" / "mine").write_text("mine")
    assert "is not empty" in fails(graph, out="full")
    assert "holds 'mine'" in fails(graph, "--overwrite", out="full")
    assert "is not a folder" in fails(graph, out="full/mine")
    assert "is not a folder" in fails(graph, out="full/mine/out")
    (into / "empty").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_mount", lambda path: path.name == "empty")
        assert "mount point" in fails(graph, out="empty")
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: False)
        assert "is not writable" in fails(graph, out="empty/out")


def test_links_stay_links(graph: str, tmp_path: Path) -> None:
    for name in ("empty", "missing"):
        (tmp_path / f"to-{name}").symlink_to(tmp_path / name)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        for more in ([], ["--overwrite"]):
            out = str(tmp_path / f"to-{name}")
            assert main(["partition", graph, "--parts", "2", "--out", out, *more]) == 0
            assert (tmp_path / name / "g.json").is_file() and Path(out).is_symlink()
    assert len(os.listdir(tmp_path)) == 5


def test_two_runs_into_one_folder(graph: str, tmp_path: Path, fails: Fails) -> None:
    into = tmp_path / "into"
    kept = into / "out.cut"
    kept.mkdir(parents=True)
    number = os.open(kept, os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)  # as the other run has it
    try:
        arguments = ["partition", graph, "--parts", "3", "--out", str(into / "out")]
        assert main(arguments) == 2
    finally:
        os.close(number)
    assert os.listdir(into) == ["out.cut"]
    assert main(arguments) == 0 and os.listdir(into) == ["out"]


def test_what_appears_meanwhile_is_not_replaced(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, measure = tmp_path / "out", run.measure

    def and_another_program(*arguments: object, **keywords: object) -> object:
        out.mkdir()
        (out / "mine").write_text("mine")
        return measure(*arguments, **keywords)

    monkeypatch.setattr(run, "measure", and_another_program)
    assert main(["partition", graph, "--parts", "3", "--out", str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert os.listdir(out) == ["mine"] and not list(tmp_path.glob("sar-*"))


@pytest.mark.parametrize("format", ["dgl", "pyg"])
def test_partitions_are_cut_again_in_place(
    format: str, graph: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The input is the output: all of it, or as it was."""

    def call(source: str, out: str, *arguments: str) -> int:
        words = ["--out", str(tmp_path / out), "--name", "g", "--format", format, *arguments]
        return main(["partition", source, *words])

    assert call(graph, "there", "--parts", "3") == 0
    shutil.copytree(tmp_path / "there", tmp_path / "here")
    before, source = files_of(tmp_path / "here"), str(tmp_path / "here")
    for wrong in (["--parts", "2"], ["--parts", "61", "--overwrite"]):
        assert call(source, "here", *wrong) == 2 and files_of(tmp_path / "here") == before
    assert call(source, "here", "--parts", "2", "--overwrite") == 0
    assert call(str(tmp_path / "there"), "elsewhere", "--parts", "2") == 0
    assert files_of(tmp_path / "here") == files_of(tmp_path / "elsewhere") != before
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "g.npz", "here", "there"]


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("plain", ["--symmetrise", "--balance", "edges,halo"]),
        ("plain", ["--self-loops", "add", "--format", "pyg", "--method", "random"]),
        ("typed", []),
    ],
)
def test_a_full_disk_at_every_stage(
    source: str,
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    small_disk: Callable[[int], Path],
) -> None:
    """Is told with the name of a file; what stays is the cut, and the next run goes on from it."""
    if source == "plain":
        path = write_plain(tmp_path / "g", 8_000, 40_000, features=4)
    else:
        path = write_typed(tmp_path / "g", 800)
    words, stages = ["partition", str(path), "--parts", "3", *options], set()
    size, status = 16.0, 2
    while status == 2 and size < 1 << 17:
        disk = small_disk(int(size))
        status = main([*words, "--out", str(disk / "out")])
        told = capsys.readouterr().err
        if status:
            assert told.count("\n") == 1 and f"{disk}/" in told, told
            assert "could not be written" in told and "No space left" in told, told
            assert os.listdir(disk) in ([], ["out.cut"])
            stages.add(told.split(f"{disk}/")[1].partition("/")[2].split("/")[0].split("-")[0])
        size *= 1.35
    assert status == 0 and os.listdir(disk) == ["out"]
    assert len(stages) >= 2, stages


@pytest.mark.parametrize("wanted", [2, 4])
def test_keep_takes_as_many_parts_as_there_are(wanted: int, graph: str, tmp_path: Path) -> None:
    made = partition_graph(graph, tmp_path / "made", 3)
    with pytest.raises(ValueError, match=f"'keep': the input has 3 parts, got num_parts {wanted}"):
        partition_graph(made, tmp_path / "out", wanted, method="keep")
    assert not (tmp_path / "out").exists()
