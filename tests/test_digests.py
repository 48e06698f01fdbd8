"""Damaged, foreign and changing files of partitions are told, and never trained on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import xxhash
from harness.graphs import mixed
from harness.parts import Cutter

from benchmarks.tasks import mutations
from sar.__main__ import main
from sar.errors import PartitionError
from sar.partition import book, column
from sar.partition.dgl_format import GraphFile
from sar.partition.load import load_partition, read_book
from sar.partition.sources.generate import community_graph
from sar.partition.write import write_partitions


@pytest.fixture
def parts(partitioned: Cutter, tmp_path: Path) -> Path:
    """A copy of partitions, to be damaged."""
    path = Path(partitioned(mixed(), 2, "random"))
    shutil.copytree(path.parent, tmp_path / "copy")
    return tmp_path / "copy" / path.name


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_no_damage_is_used(tmp_path: Path) -> None:
    found = mutations.partitions(160, 0, tmp_path)
    assert set(found) <= {mutations.REJECTED, mutations.SAME}, found
    assert found[mutations.REJECTED] > 150


def test_a_damaged_graph_is_not_loaded(parts: Path) -> None:
    file = parts.parent / "part1" / "graph.dgl"
    flip(file, file.stat().st_size - 40)  # of the last column
    load_partition(parts, 0)
    with pytest.raises(PartitionError, match="part1/graph.dgl: is damaged, or of another graph"):
        load_partition(parts, 1)


def last_byte_of(parts: Path, name: str) -> tuple[Path, int]:
    """Where the feature's bytes end in part 0's file."""
    from sar.partition.dgl_format import read_tensor_dict

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
    graph = community_graph(40, 200, 2, classes=3, features=5)
    parts = Path(write_partitions(graph, torch.zeros(40).long(), tmp_path / "parts"))
    read(load_partition(parts, 0).node_features)
    flip(*last_byte_of(parts, "_N/feat"))
    store = load_partition(parts, 0).node_features
    store["_N/label"]
    with pytest.raises(PartitionError, match="node_feat.dgl: feature '_N/feat' is damaged"):
        read(store)
    with pytest.raises(PartitionError, match="feature '_N/feat' is damaged"):
        load_partition(parts, 0, verify=True)


def test_headers_are_compared(parts: Path) -> None:
    """A changed type code or name would read the same bytes as other numbers."""
    file = parts.parent / "part0" / "node_feat.dgl"
    good = file.read_bytes()
    file.write_bytes(good.replace(b"_N/feat", b"_N/fast"))
    with pytest.raises(PartitionError, match="_N/fast.*expected .*_N/feat"):
        load_partition(parts, 0)
    from sar.partition.dgl_format import read_tensor_dict

    file.write_bytes(good)
    header = read_tensor_dict(file)["_N/feat"].offset - 8 - 2 * 8 - 4
    assert good[header] == 2, "the type code of floats"
    data = bytearray(good)
    data[header] = 0
    file.write_bytes(data)
    with pytest.raises(PartitionError, match="'_N/feat' is int32 of shape .*, expected float32"):
        load_partition(parts, 0)


def test_bytes_behind_the_features_are_told(parts: Path) -> None:
    file = parts.parent / "part0" / "node_feat.dgl"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(PartitionError, match=rf"has {size + 4} bytes, expected {size}"):
        load_partition(parts, 0)


def test_a_json_that_was_edited_says_how_to_go_on(parts: Path) -> None:
    content = json.loads(parts.read_text())
    content["graph_name"] = "other"
    parts.write_text(json.dumps(content))
    with pytest.raises(PartitionError, match="is not as it was written.*remove its key 'sar'"):
        read_book(parts)
    del content["sar"]
    parts.write_text(json.dumps(content))
    book = load_partition(parts, 0).book
    assert book.graph_name == "other" and book.digests is None and book.graph_digest is None


def test_a_feature_is_verified_while_threads_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose rows go into the digest does not depend on who comes between."""
    graph = community_graph(40, 200, 2, classes=3, features=5)
    parts = write_partitions(graph, torch.zeros(40).long(), tmp_path / "parts")
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

    monkeypatch.setattr(column.xxhash, "xxh3_128", Slow)
    for low in range(0, 40, 7):
        store.rows("_N/feat", low, min(low + 7, 40))
    other.join()
    monkeypatch.undo()
    assert len(store["_N/feat"]) == 40


def test_partitions_without_digests_cannot_be_verified(parts: Path) -> None:
    content = json.loads(parts.read_text())
    del content["sar"]
    parts.write_text(json.dumps(content))
    load_partition(parts, 0)
    with pytest.raises(PartitionError, match="holds no digests"):
        load_partition(parts, 0, verify=True)


def nested(depth: int) -> str:
    """JSON of a partitioning with odd digests; what reads it may be deeper than what writes it."""
    plain = '{"graph_name": "g", "num_parts": 1, "num_nodes": 1, "num_edges": 0, '
    plain += '"node_map": [[0, 1]], "edge_map": [[0, 0]], "part-0": {"part_graph": "g"}, '
    return plain + '"sar": {"files": {}, "graph": ' + "[" * depth + "]" * depth + "}}"


def test_digests_that_are_nested_deep(tmp_path: Path) -> None:
    path, told = tmp_path / "g.json", set()
    for depth in range(sys.getrecursionlimit() - 120, sys.getrecursionlimit() + 1):
        path.write_text(nested(depth))
        with pytest.raises(PartitionError) as error:
            read_book(path)
        told.add(str(error.value).removeprefix(str(path))[:12])
    assert len(told) > 1, "some are too deep for the one, some for the other"


@pytest.mark.parametrize("key", ["arrays", "size", "digest"])
@pytest.mark.parametrize("value", [None, -1, [1], "x", {"a": 1}, {"a": {}}])
def test_odd_digests_of_files(parts: Path, key: str, value: object) -> None:
    """With a digest of the JSON that is right, as another program may write them."""
    content = json.loads(parts.read_text())
    for told in content["sar"]["files"].values():
        told[key] = value
    told = {key: one for key, one in content["sar"].items() if key != "json"}
    content["sar"] = told | {"json": book._json_digest({**content, "sar": told})}
    parts.write_text(json.dumps(content))
    with pytest.raises(PartitionError):
        load_partition(parts, 0)


def _dies(numbers: range, seed: int, folder: Path) -> Iterator[str]:
    for number in numbers:
        if number == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        yield mutations.SAME


def _die(sender: Connection, numbers: range, seed: int, folder: Path) -> None:
    mutations._of_partitions = _dies
    mutations._tell(sender, numbers, seed, folder)


def test_a_change_that_ends_the_process_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutations, "_tell", _die)
    assert mutations.campaign(6, 0, tmp_path) == {mutations.SAME: 5, mutations.CRASH: 1}


@pytest.mark.parametrize(
    "value", [None, 3, {}, {"files": 3}, {"files": {"part0/graph.dgl": 3}, "json": ""}]
)
def test_odd_digests(parts: Path, value: object) -> None:
    content = json.loads(parts.read_text()) | {"sar": value}
    parts.write_text(json.dumps(content))
    with pytest.raises(PartitionError):
        read_book(parts)


def test_the_graphs_digest_does_not_depend_on_the_cut(partitioned: Cutter) -> None:
    one, two = (read_book(partitioned(mixed(), num, "random")) for num in (1, 3))
    assert one.graph_digest == two.graph_digest and one.digest() != two.digest()
    other = read_book(partitioned(mixed(seed=7), 3, "random"))
    assert other.graph_digest != one.graph_digest and other.digest() != two.digest()


@pytest.mark.parametrize("sealed", [True, False], ids=["with digests", "without"])
def test_a_file_that_changes_while_it_is_read(
    parts: Path, sealed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its edges are read, in place."""
    if not sealed:
        content = json.loads(parts.read_text())
        del content["sar"]
        parts.write_text(json.dumps(content))
    file = parts.parent / "part0" / "graph.dgl"
    check = GraphFile.check_pointers

    def then_change(self: GraphFile, size: int) -> None:
        check(self, size)
        data = file.read_bytes()
        os.utime(file, ns=(1, 1))
        with open(file, "r+b") as same:  # not another file of that name
            same.write(data)

    monkeypatch.setattr(GraphFile, "check_pointers", then_change)
    with pytest.raises(PartitionError, match="graph.dgl: was changed while it was read"):
        load_partition(parts, 0)


def test_a_million_parts(tmp_path: Path) -> None:
    path = tmp_path / "many.json"
    path.write_text('{"graph_name": "g", "num_parts": 1000000, "node_map": ' + "[" * 10_000_000)
    with pytest.raises(PartitionError, match="num_parts is 1000000, expected 1 to 65536"):
        read_book(path)


def test_inspect_verifies(parts: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(parts), "--verify"]) == 0
    assert "all files are as they were written" in capsys.readouterr().out
    flip(*last_byte_of(parts, "_N/label"))
    assert main(["inspect", str(parts)]) == 0
    assert main(["inspect", str(parts), "--verify"]) == 1
    assert "feature '_N/label' is damaged" in capsys.readouterr().err
