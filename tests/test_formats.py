"""Writing partitions as a stream: what comes back, what DGL reads, damage and full disks."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.covering import by_pairs
from round_trips import same
from written_graphs import EDGES, GRAPHS, NODES, cut, plain

from sar.errors import PartitionError
from sar.files import OutFiles
from sar.partition import progress
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from sar.partition.book import graph_digest
from sar.partition.column import create_array, map_tensor
from sar.partition.dgl_format import read_graph, read_tensor_dict
from sar.partition.load import load_partition, read_book
from sar.partition.sources.parts import read_partitions
from sar.partition.write import write_partitions
from sar.train import memory


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several, and most have no edge of some part."""
    monkeypatch.setattr(progress, "BLOCK", 7)


@by_pairs(name=GRAPHS, num_parts=[1, 2, 3, 8], format=["dgl", "pyg"])
def test_a_graph_comes_back(name: str, num_parts: int, format: str, tmp_path: Path) -> None:
    graph = GRAPHS[name]()
    parts = cut(graph, num_parts)
    path = write_partitions(
        graph, parts, tmp_path / "out", num_parts=num_parts, format=format, method="mine"
    )
    found, own = read_partitions(path, tmp_path)
    same(found, graph)
    assert list(found.edges) == list(graph.edges)
    assert np.array_equal(own, parts)
    if format == "dgl":
        assert graph_digest(found) == graph_digest(graph) == read_book(path).graph_digest
        check_halo(path, num_parts)


def check_halo(path: str, num_parts: int) -> None:
    """Halo nodes are the remote sources, each once and ascending, with their owner and type."""
    book = read_book(path)
    for part in range(num_parts):
        load_partition(path, part, verify=True)
        graph = read_graph(book.files[part]["part_graph"])
        start, stop = book.part_ranges[part]
        data = {name: rows.read() for name, rows in graph.node_data.items()}
        src, dst, _ = (np.concatenate(one) for one in zip(*graph.edge_chunks(99), strict=True)) \
            if graph.num_edges else (np.empty(0, int),) * 3  # fmt: skip
        inner = stop - start
        assert dst.max(initial=-1) < inner
        assert data["_ID"][:inner].tolist() == list(range(start, stop))
        halo = data["_ID"][inner:]
        assert set(range(inner, graph.num_nodes)) == set(src[src >= inner].tolist())
        assert halo.tolist() == sorted(set(halo.tolist()) - set(range(start, stop)))
        kinds, owners, _ = book.locate(data["_ID"])
        assert torch.equal(owners, data["part_id"])
        assert data["inner_node"].tolist() == [1] * inner + [0] * len(halo)
        if not book.is_homogeneous:
            assert torch.equal(kinds.int(), data["_TYPE"])


# --------------------------------------------------------------------------- against others' code


@pytest.mark.parametrize("num_parts", [1, 3, 8])
@pytest.mark.parametrize("name", GRAPHS)
def test_dgl_would_write_the_same_bytes(name: str, num_parts: int, tmp_path: Path) -> None:
    dgl = pytest.importorskip("dgl")
    graph = GRAPHS[name]()
    for columns in graph.node_data.values():
        columns.pop("brief", None)  # it cannot read bfloat16 itself
    path = write_partitions(graph, cut(graph, num_parts), tmp_path / "out", num_parts=num_parts)
    for part in range(num_parts):
        folder = Path(path).parent / f"part{part}"
        own = (folder / "graph.dgl").read_bytes()
        (loaded,), _ = dgl.load_graphs(str(folder / "graph.dgl"))
        again = dgl.graph(loaded.edges(order="eid"), num_nodes=loaded.num_nodes())
        for name in ("_ID", "inner_node", "part_id", "_TYPE"):
            if name in loaded.ndata:
                again.ndata[name] = loaded.ndata[name]
        for name in ("_ID", "inner_edge", "_TYPE"):
            if name in loaded.edata:
                again.edata[name] = loaded.edata[name]
        dgl.save_graphs(str(tmp_path / "again"), [again], formats=["coo"])
        theirs = bytearray((tmp_path / "again").read_bytes())
        theirs[32:4096] = bytes(4096 - 32)  # what memory held
        assert own == bytes(theirs)
        for file in ("node_feat.dgl", "edge_feat.dgl"):
            arrays = dgl.data.utils.load_tensors(str(folder / file))
            mapped = read_tensor_dict(folder / file)
            assert set(arrays) == set(mapped)
            for key, rows in arrays.items():
                assert torch.equal(rows, mapped[key].read().view(rows.shape))


# ---------------------------------------------------------------------------- damage, full disks


@pytest.mark.parametrize("file", ["part1/graph.dgl", "part1/node_feat.dgl", "part1/edge_feat.dgl"])
def test_a_flipped_byte_is_told_by_the_files_name(file: str, tmp_path: Path) -> None:
    path = write_partitions(plain(), np.arange(NODES) % 2, tmp_path / "out")
    damaged = Path(path).parent / file
    for at in range(40, damaged.stat().st_size, damaged.stat().st_size // 9):
        good = damaged.read_bytes()
        damaged.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(PartitionError, match=file):
            load_partition(path, 1, verify=True)
        with pytest.raises(PartitionError, match=file):
            read_partitions(path, tmp_path)
        damaged.write_bytes(good)


def test_a_flipped_byte_of_the_json_is_told(tmp_path: Path) -> None:
    path = Path(write_partitions(plain(), np.arange(NODES) % 2, tmp_path / "out"))
    path.write_text(path.read_text().replace('"num_nodes": 40', '"num_nodes": 41'))
    with pytest.raises(PartitionError, match="plain.json: is not as it was written"):
        read_partitions(path, tmp_path)


@pytest.mark.parametrize("after", [0, 5, 40, 60])
def test_a_full_disk_leaves_nothing(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, writes = os.pwrite, iter(range(10**6))

    def full(number: int, data: memoryview, at: int) -> int:
        if next(writes) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(number, data[: max(1, len(data) // 2)], at)  # less than all was asked for

    monkeypatch.setattr(os, "pwrite", full)
    full_disk = f"could not be written: No space left on the disk of {tmp_path}"
    expected = rf"{tmp_path}/out/part\d/\w+.dgl: {full_disk}"
    with pytest.raises(OSError, match=expected):
        write_partitions(plain(), np.arange(NODES) % 2, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["dgl", "pyg"])
def test_a_limit_of_the_system_is_told(format: str, tmp_path: Path) -> None:
    graph, before = plain(2000), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match=f"{tmp_path}/.*could not be written: File too large"):
            write_partitions(graph, np.arange(2000) % 2, tmp_path / "out", format=format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, parts = plain(), np.arange(NODES)
    expected = write_partitions(graph, parts, tmp_path / "a")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, 10))
    before = len(os.listdir("/proc/self/fd"))
    found = write_partitions(graph, parts, tmp_path / "b")
    assert len(os.listdir("/proc/self/fd")) == before
    assert Path(found).read_bytes() == Path(expected).read_bytes()
    assert OutFiles(tmp_path, tmp_path)._room == 5


# --------------------------------------------------------------------------------- maps of files


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="counts memory there")
def test_what_lies_in_files_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 MB of edges and features; a few MB of blocks, and 5 bytes for each node."""
    monkeypatch.setattr(progress, "BLOCK", 1 << 16)
    write_partitions(plain(), np.arange(NODES) % 3, tmp_path / "compiles")
    nodes, edges, tensors = 1 << 17, 1 << 22, []
    for name, kind, shape in (("s", np.int64, (edges,)), ("f", np.float32, (nodes, 128))):
        rows = create_array(tmp_path / name, kind, shape)
        for low in range(0, edges if name == "s" else 0, 1 << 16):
            rows[low : low + (1 << 16)] = np.arange(low, low + (1 << 16)) * 7919 % nodes
        del rows
        tensors.append(map_tensor(tmp_path / name))
    ends, feat = tensors
    graph = GraphArrays("g", {"_N": nodes}, {ETYPE_HOMO: (ends, ends)}, {"_N": {"feat": feat}})
    most, before = [0.0], memory.anonymous_mb()

    def look(*_: object) -> None:
        most[0] = max(most[0], memory.anonymous_mb())

    parts = (np.arange(nodes) % 3).astype(np.int8)
    write_partitions(graph, parts, tmp_path / "out", progress=look)
    assert most[0] - before < 25


@pytest.mark.parametrize("format", ["dgl", "pyg"])
def test_progress_is_told(format: str, tmp_path: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {}

    def progress(what: str, done: int, total: int) -> None:
        told.setdefault(what, []).append((done, total))

    write_partitions(
        plain(), np.arange(NODES) % 3, tmp_path / "out", format=format, progress=progress
    )
    assert told["writing edges"][:2] == [(0, EDGES), (7, EDGES)]
    for steps in told.values():
        assert steps == sorted(steps) and steps[-1][0] == steps[-1][1]


def test_either_format_replaces_the_other(tmp_path: Path) -> None:
    for format in ("pyg", "dgl", "pyg"):
        path = write_partitions(
            plain(), np.arange(NODES) % 2, tmp_path / "out", format=format, overwrite=True
        )
        assert load_partition(path, 1).num_nodes(NTYPE_HOMO) == NODES // 2
