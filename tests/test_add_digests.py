"""Partitions without digests say so, are given some, and all files are compared with them."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from foreign_files import write_pyg
from harness import run_threads
from harness.graphs import mixed, shop, to_dgl
from harness.parts import Cutter, node_parts

import sar
from benchmarks.tasks import mutations
from sar.__main__ import main
from sar.comm import Group
from sar.errors import PartitionError
from sar.partition.load import add_digests, differing, load_partition, read_book


@pytest.fixture
def parts(partitioned: Cutter, tmp_path: Path) -> Path:
    """A copy of partitions, to be changed."""
    path = Path(partitioned(shop(), 2, "random"))
    shutil.copytree(path.parent, tmp_path / "copy")
    return tmp_path / "copy" / path.name


@pytest.fixture
def bare(parts: Path) -> Path:
    """Without digests, as DGL writes them."""
    content = json.loads(parts.read_text())
    del content["sar"]
    parts.write_text(json.dumps(content))
    return parts


def flip_last(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_it_is_said_once_that_there_are_none(bare: Path) -> None:
    """On rank 0, with what adds them."""

    def case(group: Group) -> None:
        sar.load_partition_data(bare)

    with pytest.warns(UserWarning) as told:
        run_threads(2, case)
    (words,) = [str(one.message) for one in told]
    assert words.startswith(f"{bare}: holds no digests, ")
    assert words.endswith(f"sar partition {bare} --add-digests")


def test_folders_of_others_say_what_makes_partitions_with_digests(tmp_path: Path) -> None:
    graph = mixed()
    folder = write_pyg(graph, node_parts(graph, 2, "random"), 2, tmp_path / "pyg")
    with pytest.warns(UserWarning, match="holds no digests, .*--method keep") as told:
        load_partition(folder, 0)
    (words,) = [str(one.message) for one in told]
    command = words[words.index("sar partition") :].replace("DIR", str(tmp_path / "with")).split()
    assert main(command[1:]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_partition(tmp_path / "with" / "pyg.json", 0).book.digests is not None


def test_digests_are_added(bare: Path, capsys: pytest.CaptureFixture) -> None:
    before = json.loads(bare.read_text())
    digest = read_book(bare).digest()
    assert main(["partition", str(bare), "--add-digests"]) == 0
    shown = capsys.readouterr()
    assert "6 files" in shown.out and "holds no digests" not in shown.err
    after = json.loads(bare.read_text())
    assert after.pop("sar") and after == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part in range(2):
            load_partition(bare, part, verify=True)
    assert main(["inspect", str(bare), "--check"]) == 0
    book = read_book(bare)
    assert book.graph_digest is None and book.digest() == digest, "a run goes on with it"
    flip_last(bare.parent / "part1" / "node_feat.dgl")
    with pytest.raises(PartitionError, match="part1/node_feat.dgl: feature .* is damaged"):
        load_partition(bare, 1, verify=True)
    bare.write_text(bare.read_text().replace('"graph_name": "', '"graph_name": "x'))
    with pytest.raises(PartitionError, match="is not as it was written"):
        read_book(bare)


def test_partitions_of_dgl_itself(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    dgl = pytest.importorskip("dgl")
    dgl.distributed.partition_graph(to_dgl(mixed()), "g", 2, str(tmp_path), part_method="random")
    path = str(tmp_path / "g.json")
    with pytest.warns(UserWarning, match="holds no digests"):
        load_partition(path, 0)
    assert main(["partition", path, "--add-digests"]) == 0
    assert main(["inspect", path, "--check"]) == 0
    assert dgl.distributed.load_partition(path, 0)[0].num_nodes() > 0


def test_what_is_damaged_gets_none(bare: Path, capsys: pytest.CaptureFixture) -> None:
    file = bare.parent / "part1" / "graph.dgl"
    file.write_bytes(file.read_bytes()[:5000])
    before = bare.read_bytes()
    assert main(["partition", str(bare), "--add-digests"]) == 2
    assert "part1/graph.dgl" in capsys.readouterr().err and bare.read_bytes() == before


def test_those_that_have_digests_keep_them(parts: Path, capsys: pytest.CaptureFixture) -> None:
    before = parts.read_bytes()
    assert main(["partition", str(parts), "--add-digests"]) == 2
    assert f"sar inspect {parts} --check" in capsys.readouterr().err
    assert parts.read_bytes() == before


def test_folders_of_others_have_no_place(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    graph = mixed()
    folder = write_pyg(graph, node_parts(graph, 2, "random"), 2, tmp_path / "pyg")
    assert main(["partition", str(folder), "--add-digests"]) == 2
    assert "--method keep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--add-digests", "--parts", "2"], "--add-digests: expected INPUT alone"),
        (["--add-digests", "--out", "x"], "--add-digests: expected INPUT alone"),
        ([], "the following arguments are required: --parts, --out"),
        (["--out", "x"], "the following arguments are required: --parts"),
    ],
)
def test_options_beside_it(
    words: list[str], told: str, bare: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["partition", str(bare), *words]) == 2
    assert told in capsys.readouterr().err


def test_a_disk_that_is_read_only(
    bare: Path, small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture
) -> None:
    disk = small_disk(4096)
    shutil.copytree(bare.parent, disk / "parts")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    path = disk / "parts" / bare.name
    assert main(["partition", str(path), "--add-digests"]) == 2
    assert f"{path}: could not be written: Read-only" in capsys.readouterr().err
    assert path.read_bytes() == bare.read_bytes()


# ---------------------------------------------------------------- sar inspect --check


def test_every_file_that_differs_is_named(parts: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(parts), "--check"]) == 0
    assert "all files are as they were written" in capsys.readouterr().out
    for name in ("part0/graph.dgl", "part1/edge_feat.dgl"):
        flip_last(parts.parent / name)
    (parts.parent / "part1" / "node_feat.dgl").unlink()
    assert main(["inspect", str(parts), "--check"]) == 1
    told = capsys.readouterr()
    assert told.out == "" and "3 of 6 files" in told.err
    for name in ("part0/graph.dgl", "part1/edge_feat.dgl", "part1/node_feat.dgl"):
        assert told.err.count(f"{parts.parent}/{name}") == 1


def test_a_json_that_differs(parts: Path, capsys: pytest.CaptureFixture) -> None:
    parts.write_text(parts.read_text().replace('"graph_name": "', '"graph_name": "x'))
    assert main(["inspect", str(parts), "--check"]) == 1
    assert f"{parts}: is not as it was written" in capsys.readouterr().err


def test_nothing_to_check_with(bare: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(bare), "--check"]) == 2
    assert f"sar partition {bare} --add-digests" in capsys.readouterr().err
    assert main(["inspect", str(bare.parent / "none.json"), "--check"]) == 2


def test_no_change_to_a_file_escapes_the_check(bare: Path) -> None:
    """Of partitions that were given digests."""
    add_digests(bare)
    want, draw = mutations._content(bare), random.Random(3)
    files = sorted(one for one in bare.parent.rglob("*") if one.is_file())
    for _ in range(120):
        file = draw.choice(files)
        good = file.read_bytes()
        data = bytearray(good)
        draw.choice(mutations.CHANGES)(data, draw)
        file.write_bytes(data)
        assert differing(bare)[0] or mutations._content(bare) == want, file
        file.write_bytes(good)
