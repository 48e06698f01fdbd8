"""Writing partitions as a stream: what comes back, what DGL reads, damage and full disks."""

from __future__ import annotations

import errno
import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.covering import by_pairs
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from harness.parts import assign, load_partition, write_partitions
from round_trips import files_of, read_back, same
from written_graphs import GRAPHS, NODES, cut, plain

import sar
from sar import PartitionError
from sar.partition.dgl_format import read_graph, read_tensor_dict
from sar.train import memory

pytestmark = pytest.mark.usefixtures("small_blocks")


@by_pairs(name=GRAPHS, num_parts=[1, 2, 3, 8], format=["dgl", "pyg"])
def test_a_graph_comes_back(name: str, num_parts: int, format: str, tmp_path: Path) -> None:
    graph = GRAPHS[name]()
    parts = cut(graph, num_parts)
    path = write_partitions(
        graph, parts, tmp_path / "out", num_parts=num_parts, format=format, method="mine"
    )
    back = read_back(path, num_parts)
    for columns in graph.node_data.values():
        columns.pop("orig_id")  # by which they are in order
    same(back.graph, graph)
    assert np.array_equal(torch.cat(list(back.owner.values())), parts)
    if format == "dgl":
        check_halo(path, num_parts)


def check_halo(path: str, num_parts: int) -> None:
    """Halo nodes are the remote sources, each once and ascending, with their owner and type."""
    for part in range(num_parts):
        book = load_partition(path, part, verify=True).book
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
            sar.partition_graph(path, tmp_path / "again", 2, method="keep")
        damaged.write_bytes(good)


def test_a_flipped_byte_of_the_json_is_told(tmp_path: Path) -> None:
    path = Path(write_partitions(plain(), np.arange(NODES) % 2, tmp_path / "out"))
    path.write_text(path.read_text().replace('"num_nodes": 40', '"num_nodes": 41'))
    with pytest.raises(PartitionError, match="plain.json: is not as it was written"):
        sar.partition_graph(path, tmp_path / "again", 2, method="keep")


@pytest.mark.parametrize("after", [0, 5, 40, 60])
def test_a_full_disk_leaves_what_was_there(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_partitions(plain(), np.zeros(NODES, int), tmp_path / "kept")
    before = files_of(tmp_path)
    real, writes = os.pwrite, iter(range(10**6))

    def full(number: int, data: memoryview, at: int) -> int:
        if next(writes) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(number, data[: max(1, len(data) // 2)], at)  # less than all was asked for

    monkeypatch.setattr(os, "pwrite", full)
    full_disk = f"could not be written: No space left on the disk of {tmp_path}"
    for name in ("kept", "out"):
        expected = rf"{tmp_path}/{name}/part\d/\w+.dgl: {full_disk}"
        with pytest.raises(OSError, match=expected):
            write_partitions(plain(), np.arange(NODES) % 2, tmp_path / name, overwrite=True)
    assert files_of(tmp_path) == before


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
    before, most = len(os.listdir("/proc/self/fd")), [0]

    def look(*_: object) -> None:
        most.append(len(os.listdir("/proc/self/fd")))

    found = write_partitions(graph, parts, tmp_path / "b", progress=look)
    assert len(os.listdir("/proc/self/fd")) == before < max(most) <= before + 10
    assert Path(found).read_bytes() == Path(expected).read_bytes()


# --------------------------------------------------------------------------------- maps of files


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="counts memory there")
def test_what_lies_in_files_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 MB of edges and features; a few MB of blocks, and 5 bytes for each node."""
    monkeypatch.setattr("sar.partition.progress.BLOCK", 1 << 16)
    write_partitions(plain(), np.arange(NODES) % 3, tmp_path / "compiles")
    nodes, edges, tensors = 1 << 17, 1 << 22, []
    for name, kind, shape in (("s", np.int64, (edges,)), ("f", np.float32, (nodes, 128))):
        rows = np.memmap(tmp_path / name, kind, "w+", shape=shape)
        for low in range(0, edges if name == "s" else 0, 1 << 16):
            rows[low : low + (1 << 16)] = np.arange(low, low + (1 << 16)) * 7919 % nodes
        tensors.append(torch.from_numpy(rows))
    ends, feat = tensors
    graph = GraphArrays("g", {"_N": nodes}, {ETYPE_HOMO: (ends, ends)}, {"_N": {"feat": feat}})
    most, before = [0.0], memory.anonymous_mb()

    def look(*_: object) -> None:
        most[0] = max(most[0], memory.anonymous_mb())

    parts = (np.arange(nodes) % 3).astype(np.int8)
    write_partitions(graph, parts, tmp_path / "out", progress=look)
    assert most[0] - before < 25


def test_either_format_replaces_the_other(tmp_path: Path) -> None:
    for format in ("pyg", "dgl", "pyg"):
        path = write_partitions(
            plain(), np.arange(NODES) % 2, tmp_path / "out", format=format, overwrite=True
        )
        assert load_partition(path, 1).num_nodes(NTYPE_HOMO) == NODES // 2


# ------------------------------------------------------------------------ what cannot be written


def test_what_is_no_partitions_is_never_replaced(tmp_path):
    for name in ("thesis.txt", "package.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("precious")
        with pytest.raises(FileExistsError, match="does not look like partitions"):
            write_partitions(plain(30, 120), np.zeros(30, int), folder, overwrite=True)
        assert (folder / name).read_text() == "precious"
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(NotADirectoryError, match="not a folder"):
            write_partitions(plain(30, 120), np.zeros(30, int), out)


def test_bad_arguments(tmp_path):
    zeros = np.zeros(30, int)
    for parts in (zeros[1:], zeros[:, None], zeros.astype(float), zeros - 1, zeros + 5):
        with pytest.raises(ValueError, match="node_parts"):
            write_partitions(plain(30, 120), parts, tmp_path / "out", num_parts=2)
    for name in ("", "../up", "a/b", ".hidden", "a b"):
        with pytest.raises(ValueError, match="graph_name"):
            write_partitions(plain(30, 120), zeros, tmp_path / "out", name)
    assert not list(tmp_path.iterdir())


PAIR = (torch.arange(2), torch.arange(2))
DAMAGE = {
    r"edges.* src ids span \[0, 30\].*row 3 is 30": lambda g: g.edges[ETYPE_HOMO][0].put_(
        torch.tensor(3), torch.tensor(30)
    ),
    "edges.* is torch.int32": lambda g: g.edges.update(
        {ETYPE_HOMO: tuple(ids.int() for ids in g.edges[ETYPE_HOMO])}
    ),
    "two vectors of equal length": lambda g: g.edges.update(
        {ETYPE_HOMO: (torch.arange(4), torch.arange(5))}
    ),
    "'nobody' is not among": lambda g: g.edges.update({("_N", "e", "nobody"): PAIR}),
    "expected a non-empty name": lambda g: g.edges.update({("_N", "a:b", "_N"): PAIR}),
    "node_data.*expected 30 rows": lambda g: g.node_data["_N"].update(feat=torch.zeros(29, 2)),
    "node_data.*contains '/'": lambda g: g.node_data["_N"].update({"a/b": torch.zeros(30)}),
    "node_data has type 'x'": lambda g: g.node_data.update(x={}),
    "edge_data.*expected 120 rows": lambda g: g.edge_data[ETYPE_HOMO].update(w=torch.zeros(3)),
    **{
        rf"'odd'\] is {kind}, expected one of bool, uint8": lambda g, kind=kind: g.node_data[
            "_N"
        ].update(odd=torch.zeros(30, 2).to(kind))
        for kind in (torch.complex64, torch.uint16, torch.float8_e4m3fn)
    },
}


@pytest.mark.parametrize("words", DAMAGE)
def test_bad_graphs(tmp_path, words):
    graph = plain(30, 120)
    DAMAGE[words](graph)
    with pytest.raises(ValueError, match=words):
        write_partitions(graph, np.zeros(30, int), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_without_dgl(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dgl", None)
    graph = plain(30, 120)
    path = write_partitions(graph, assign(graph, 2, "random"), tmp_path / "out")
    assert load_partition(path, 1).num_nodes(NTYPE_HOMO) == 15
