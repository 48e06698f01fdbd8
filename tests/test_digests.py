"""Damaged, foreign and changing files of partitions are told, and never trained on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness.graphs import mixed
from harness.parts import Cutter

from benchmarks.tasks import mutations
from sar.__main__ import main
from sar.errors import PartitionError
from sar.partition import shards
from sar.partition.book import read_book
from sar.partition.generate import community_graph
from sar.partition.load import load_partition
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


def test_a_json_that_was_edited_says_how_to_go_on(parts: Path) -> None:
    content = json.loads(parts.read_text())
    content["graph_name"] = "other"
    parts.write_text(json.dumps(content))
    with pytest.raises(PartitionError, match="is not as it was written.*remove its key 'sar'"):
        read_book(parts)
    del content["sar"]
    parts.write_text(json.dumps(content))
    book = load_partition(parts, 0).book
    assert book.graph_name == "other" and book.seals is None and book.graph_digest is None


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
    """Between the two passes over its edges, in place."""
    if not sealed:
        content = json.loads(parts.read_text())
        del content["sar"]
        parts.write_text(json.dumps(content))
    file = parts.parent / "part0" / "graph.dgl"
    count = shards._ShardBuilder.count

    def then_change(self) -> None:
        count(self)
        data = file.read_bytes()
        os.utime(file, ns=(1, 1))
        with open(file, "r+b") as same:  # not another file of that name
            same.write(data)

    monkeypatch.setattr(shards._ShardBuilder, "count", then_change)
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
    assert main(["inspect", str(parts), "--verify"]) == 2
    assert "feature '_N/label' is damaged" in capsys.readouterr().err
