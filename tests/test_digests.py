"""Digests: damaged, foreign and changing files are told and never trained on; partitions without
digests say so and are given some."""

from __future__ import annotations

import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from foreign_files import write_pyg
from harness import run_threads
from harness.graphs import mixed, shop
from harness.parts import Cutter, load_partition, node_parts, write_partitions
from written_graphs import NODES, plain

import sar
from benchmarks.tasks import mutations
from sar import PartitionError
from sar.__main__ import main
from sar.partition import book
from sar.partition.dgl_format import GraphFile, read_tensor_dict


def copy(path: str, folder: Path) -> Path:
    """Of partitions, to be changed."""
    shutil.copytree(Path(path).parent, folder / "copy")
    return folder / "copy" / Path(path).name


@pytest.fixture
def parts(partitioned: Cutter, tmp_path: Path) -> Path:
    return copy(partitioned(mixed(), 2, "random"), tmp_path)


@pytest.fixture
def bare(partitioned: Cutter, tmp_path: Path) -> Path:
    """Without digests, as DGL writes them."""
    return unseal(copy(partitioned(shop(), 2, "random"), tmp_path))


def unseal(path: Path) -> Path:
    content = json.loads(path.read_text())
    del content["sar"]
    path.write_text(json.dumps(content))
    return path


def flip(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_no_damage_is_used(tmp_path: Path) -> None:
    found = mutations.partitions(160, 0, tmp_path)
    assert set(found) <= {mutations.REJECTED, mutations.SAME}, found
    assert found[mutations.REJECTED] > 150


def last_byte_of(parts: Path, name: str) -> tuple[Path, int]:
    """Where the feature's bytes end in part 0's file."""
    file = parts.parent / "part0" / "node_feat.dgl"
    found = read_tensor_dict(file)[name]
    return file, found.offset + len(found) * found.row_bytes - 1


@pytest.mark.parametrize(
    "read",
    [
        lambda store: store["_N/feat"],
        lambda store: store.get_as("_N/feat", torch.float64),
        lambda store: store.to_file("_N/feat"),
        lambda store: [store.rows("_N/feat", low, min(low + 7, 40)) for low in range(0, 40, 7)],
    ],
    ids=["whole", "converted", "to a file", "in runs"],
)
def test_a_feature_is_verified_when_it_is_first_read(tmp_path: Path, read: Callable) -> None:
    parts = Path(write_partitions(plain(), torch.zeros(NODES).long(), tmp_path / "parts"))
    read(load_partition(parts, 0).node_features)
    flip(*last_byte_of(parts, "_N/feat"))
    store = load_partition(parts, 0).node_features
    store["_N/label"]
    with pytest.raises(PartitionError, match="node_feat.dgl: feature '_N/feat' is damaged"):
        read(store)
    with pytest.raises(PartitionError, match="feature '_N/feat' is damaged"):
        load_partition(parts, 0, verify=True)


def test_headers_and_sizes_are_compared(parts: Path) -> None:
    """A changed type code or name would read the same bytes as other numbers."""
    file = parts.parent / "part0" / "node_feat.dgl"
    good = file.read_bytes()
    header = read_tensor_dict(file)["_N/feat"].offset - 8 - 2 * 8 - 4
    assert good[header] == 2, "the type code of floats"
    for data, words in (
        (good.replace(b"_N/feat", b"_N/fast"), "_N/fast.*expected .*_N/feat"),
        (good[:header] + b"\0" + good[header + 1 :], "'_N/feat' is int32 of .*, expected float32"),
        (good + b"more", rf"has {len(good) + 4} bytes, expected {len(good)}"),
    ):
        file.write_bytes(data)
        with pytest.raises(PartitionError, match=words):
            load_partition(parts, 0)


def test_a_json_that_was_edited_says_how_to_go_on(parts: Path) -> None:
    content = json.loads(parts.read_text())
    content["graph_name"] = "other"
    parts.write_text(json.dumps(content))
    with pytest.raises(PartitionError, match="is not as it was written.*remove its key 'sar'"):
        load_partition(parts, 0)
    book = load_partition(unseal(parts), 0).book
    assert book.graph_name == "other" and book.digests is None and book.graph_digest is None
    with pytest.raises(PartitionError, match="holds no digests"):
        load_partition(parts, 0, verify=True)


def test_a_feature_is_verified_while_threads_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose rows go into the digest does not depend on who comes between."""
    parts = write_partitions(plain(), torch.zeros(NODES).long(), tmp_path / "parts")
    store = load_partition(parts, 0).node_features
    other = threading.Thread(target=store.rows, args=("_N/feat", 0, 7))
    real = xxhash.xxh3_128

    class Slow:
        """Another thread begins to read while the second run goes into the digest."""

        def __init__(self) -> None:
            self.real, self.runs = real(), 0

        def update(self, rows: memoryview) -> None:
            self.runs += 1
            if self.runs == 2 and not other.ident:
                other.start()
                other.join(0.2)
            self.real.update(rows)

        def hexdigest(self) -> str:
            return self.real.hexdigest()

    monkeypatch.setattr("sar.partition.column.xxhash.xxh3_128", Slow)
    for low in range(0, 40, 7):
        store.rows("_N/feat", low, min(low + 7, 40))
    other.join()
    monkeypatch.undo()
    assert len(store["_N/feat"]) == 40


@pytest.mark.parametrize("value", [None, -1, [1], "x", {"a": 1}, {"a": {}}])
def test_odd_digests(parts: Path, value: object) -> None:
    """Also with a digest of the JSON that is right, as another program may write them."""
    content = json.loads(parts.read_text())
    odd: list = [value, {"files": value}, {"files": {"part0/graph.dgl": value}, "json": ""}]
    for key in ("arrays", "size", "digest"):
        files = {name: told | {key: value} for name, told in content["sar"]["files"].items()}
        told = {"graph": None, "files": files}
        odd.append(told | {"json": book._json_digest({**content, "sar": told})})
    for one in odd:
        parts.write_text(json.dumps(content | {"sar": one}))
        with pytest.raises(PartitionError):
            load_partition(parts, 0)


def test_the_graphs_digest_does_not_depend_on_the_cut(partitioned: Cutter) -> None:
    one, two = (load_partition(partitioned(mixed(), num, "random"), 0).book for num in (1, 3))
    assert one.graph_digest == two.graph_digest and one.digest() != two.digest()
    other = load_partition(partitioned(mixed(seed=7), 3, "random"), 0).book
    assert other.graph_digest != one.graph_digest and other.digest() != two.digest()


def test_a_file_that_changes_while_it_is_read(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its edges are read, in place."""
    file = unseal(parts).parent / "part0" / "graph.dgl"
    check = GraphFile.check_pointers

    def then_change(self: GraphFile, size: int) -> None:
        check(self, size)
        os.utime(file, ns=(1, 1))

    monkeypatch.setattr(GraphFile, "check_pointers", then_change)
    with pytest.raises(PartitionError, match="graph.dgl: was changed while it was read"):
        load_partition(parts, 0)


# ---------------------------------------------------------------- partitions without digests


def test_it_is_said_once_that_there_are_none(bare: Path) -> None:
    """On rank 0, with what adds them."""

    def case(group: sar.comm.Group) -> None:
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
    assert main(["partition", str(folder), "--add-digests"]) == 2, "they have no place for them"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_partition(tmp_path / "with" / "pyg.json", 0).book.digests is not None


def test_digests_are_added(bare: Path, capsys: pytest.CaptureFixture) -> None:
    before = json.loads(bare.read_text())
    with pytest.warns(UserWarning, match="holds no digests"):
        digest = load_partition(bare, 0).book.digest()
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
    book = load_partition(bare, 0).book
    assert book.graph_digest is None and book.digest() == digest, "a run goes on with it"
    flip(bare.parent / "part1" / "node_feat.dgl")
    with pytest.raises(PartitionError, match="part1/node_feat.dgl: feature .* is damaged"):
        load_partition(bare, 1, verify=True)
    bare.write_text(bare.read_text().replace('"graph_name": "', '"graph_name": "x'))
    with pytest.raises(PartitionError, match="is not as it was written"):
        load_partition(bare, 0)


def test_what_is_damaged_gets_none_and_those_that_have_some_keep_them(
    bare: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["partition", str(bare), "--add-digests"]
    assert main([*words, "--parts", "2"]) == 2
    assert "--add-digests: expected INPUT alone" in capsys.readouterr().err
    file = bare.parent / "part1" / "graph.dgl"
    good, before = file.read_bytes(), bare.read_bytes()
    file.write_bytes(good[:5000])
    assert main(words) == 2
    assert "part1/graph.dgl" in capsys.readouterr().err and bare.read_bytes() == before
    file.write_bytes(good)
    assert main(words) == 0
    before = bare.read_bytes()
    assert main(words) == 2
    assert f"sar inspect {bare} --check" in capsys.readouterr().err
    assert bare.read_bytes() == before


# ---------------------------------------------------------------- sar inspect --check


def test_every_file_that_differs_is_named(bare: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(bare), "--check"]) == 2
    assert f"sar partition {bare} --add-digests" in capsys.readouterr().err
    assert main(["partition", str(bare), "--add-digests"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(bare), "--verify"]) == 0
    assert "all files are as they were written" in capsys.readouterr().out
    for name in ("part0/graph.dgl", "part1/edge_feat.dgl"):
        flip(bare.parent / name)
    (bare.parent / "part1" / "node_feat.dgl").unlink()
    assert main(["inspect", str(bare), "--check"]) == 1
    told = capsys.readouterr()
    assert told.out == "" and "3 of 6 files" in told.err
    for name in ("part0/graph.dgl", "part1/edge_feat.dgl", "part1/node_feat.dgl"):
        assert told.err.count(f"{bare.parent}/{name}") == 1
    bare.write_text(bare.read_text().replace('"graph_name": "', '"graph_name": "x'))
    assert main(["inspect", str(bare), "--check"]) == 1
    assert f"{bare}: is not as it was written" in capsys.readouterr().err
    assert main(["inspect", str(bare.parent / "none.json"), "--check"]) == 2
