"""Writing partitions as a stream: the same graph in every format, read by every reader."""

from __future__ import annotations

import copy
import errno
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_files import write_glt
from harness.graphs import hetero, mixed
from hypothesis import given, settings
from hypothesis import strategies as st

import sar
from sar.__main__ import main
from sar.errors import PartitionError
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from sar.partition.book import read_book
from sar.partition.dgl_format import read_graph, read_tensor_dict
from sar.partition.digest import graph_digest
from sar.partition.formats import layout, out_files
from sar.partition.load import load_partition
from sar.partition.sources import parts as parts_module
from sar.partition.sources.parts import read_partitions
from sar.partition.write import write_partitions

ROOT = Path(__file__).resolve().parent.parent
NODES, EDGES = 40, 90


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several, and most have no edge of some part."""
    monkeypatch.setattr(layout, "BLOCK", 7)
    monkeypatch.setattr(parts_module, "_BLOCK", 16)


def plain(nodes: int = NODES, edges: int = EDGES, seed: int = 0) -> GraphArrays:
    """One type; columns of all kinds; the last quarter of the nodes has no edge."""
    rng = torch.Generator().manual_seed(seed)
    ends = [torch.randint(max(1, 3 * nodes // 4), (edges,), generator=rng) for _ in range(2)]
    node = {
        "feat": torch.rand(nodes, 3, generator=rng),
        "label": torch.arange(nodes) % 5,
        "train_mask": torch.arange(nodes) % 3 == 0,
        "none": torch.zeros(nodes, 0),
        "cube": torch.rand(2, 3, nodes, generator=rng).permute(2, 0, 1),  # not contiguous
        "brief": torch.rand(nodes, 2, generator=rng).bfloat16(),
        "small": torch.arange(nodes).to(torch.int8),
    }
    edge = {
        "weight": torch.rand(edges, generator=rng),
        "feat": torch.rand(edges, 2, generator=rng).double(),
        "on_mask": torch.arange(edges) % 2 == 0,
    }
    graph = GraphArrays(
        "plain", {NTYPE_HOMO: nodes}, {ETYPE_HOMO: (ends[0], ends[1])}, {NTYPE_HOMO: node},
        {ETYPE_HOMO: edge},
    )  # fmt: skip
    return graph.with_orig_ids()


def typed(edges: int = 50, seed: int = 0) -> GraphArrays:
    """Several types, sorted by name, one without nodes and one without columns."""
    rng = torch.Generator().manual_seed(seed)
    sizes = {"author": 9, "empty": 0, "paper": 30}
    etypes = [("author", "wrote", "paper"), ("paper", "by", "author"), ("paper", "cites", "paper")]
    ends = {
        (a, r, b): (
            torch.randint(sizes[a], (edges,), generator=rng),
            torch.randint(sizes[b], (edges,), generator=rng),
        )
        for a, r, b in etypes
    }
    ends["paper", "none", "empty"] = (torch.arange(0), torch.arange(0))
    ends = dict(sorted(ends.items()))
    node: dict = {ntype: {} for ntype in sizes}
    node["paper"] = {"feat": torch.rand(30, 2), "label": torch.arange(30) % 4}
    edge = {etypes[2]: {"weight": torch.rand(edges), "time": torch.arange(edges).flip(0)}}
    return GraphArrays("typed", sizes, ends, node, edge).with_orig_ids()


def bare() -> GraphArrays:
    """Isolated nodes alone."""
    none = torch.arange(0)
    return GraphArrays("bare", {NTYPE_HOMO: 6}, {ETYPE_HOMO: (none, none)}).with_orig_ids()


GRAPHS: dict[str, Callable[[], GraphArrays]] = {"plain": plain, "typed": typed, "bare": bare}


def cut(graph: GraphArrays, num_parts: int) -> np.ndarray:
    """Without order; where there are more than two parts, part 1 is empty."""
    parts = np.arange(graph.total_nodes) * 7 % num_parts
    return np.where(parts == 1, 0, parts) if num_parts > 2 else parts


def assert_same(found: GraphArrays, graph: GraphArrays) -> None:
    """Types, edges and columns, in the same order of ids; bool may have become uint8."""
    assert found.num_nodes == graph.num_nodes and list(found.num_nodes) == list(graph.num_nodes)
    assert list(found.edges) == list(graph.edges)
    for etype, ends in graph.edges.items():
        assert all(map(torch.equal, found.edges[etype], ends))
    for got, expected in ((found.node_data, graph.node_data), (found.edge_data, graph.edge_data)):
        for kind, columns in expected.items():
            assert set(got[kind]) == set(columns)
            for name, rows in columns.items():
                assert got[kind][name].dtype == rows.dtype, (kind, name)
                assert torch.equal(got[kind][name], rows), (kind, name)


@pytest.mark.parametrize("format", ["dgl", "pyg"])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_comes_back(name: str, num_parts: int, format: str, tmp_path: Path) -> None:
    graph = GRAPHS[name]()
    parts = cut(graph, num_parts)
    path = write_partitions(
        graph, parts, tmp_path / "out", num_parts=num_parts, format=format, method="mine"
    )
    found, own = read_partitions(path, tmp_path)
    assert_same(found, graph)
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


@given(
    seed=st.integers(0, 999),
    nodes=st.integers(1, 150),
    edges=st.integers(0, 60),
    num_parts=st.integers(1, 5),
    format=st.sampled_from(["dgl", "pyg"]),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_each_node_and_each_edge_once(
    tmp_path_factory: pytest.TempPathFactory, seed: int, nodes: int, edges: int, num_parts: int,
    format: str,
) -> None:  # fmt: skip
    graph, folder = plain(nodes, edges, seed), tmp_path_factory.mktemp("any")
    parts = np.random.default_rng(seed).integers(0, num_parts, nodes).astype(np.int16)
    path = write_partitions(graph, parts, folder / "out", num_parts=num_parts, format=format)
    loaded = [load_partition(path, part) for part in range(num_parts)]
    assert sum(one.num_nodes(NTYPE_HOMO) for one in loaded) == nodes
    assert sum(one.num_edges("_E") for one in loaded) == edges
    found, own = read_partitions(path, folder)
    assert_same(found, graph)
    assert np.array_equal(own, parts)
    if format == "dgl":
        check_halo(path, num_parts)


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


@pytest.fixture
def pyg_reads_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its partitioner writes holds a ``defaultdict``, which its reader refuses today."""
    monkeypatch.setattr(
        "torch_geometric.io.fs.torch_load", lambda path: torch.load(path, weights_only=False)
    )


@pytest.mark.usefixtures("pyg_reads_its_own")
@pytest.mark.parametrize("make", [mixed, hetero])
def test_pyg_reads_the_same_as_of_its_own_partitioner(
    make: Callable[[], GraphArrays], tmp_path: Path
) -> None:
    from foreign_files import edge_rows, write_pyg
    from torch_geometric.distributed import LocalFeatureStore, LocalGraphStore

    graph = copy.deepcopy(make())
    parts = np.arange(graph.total_nodes) * 7 % 3
    theirs = write_pyg(graph, parts, 3, tmp_path / "theirs")
    for columns in graph.edge_data.values():  # as that one has them
        columns["feat"] = edge_rows(columns)
        for name in ("weight", "type"):
            del columns[name]
    ours = write_partitions(graph, parts, tmp_path / "ours", format="pyg")
    for part in range(3):
        one, two = (LocalGraphStore.from_partition(str(at), part) for at in (ours, theirs))
        assert one.meta == two.meta and one.is_sorted
        for attr in two.get_all_edge_attrs():
            assert edges_of(one, attr) == edges_of(two, attr)
        stores = [LocalFeatureStore.from_partition(str(at), part) for at in (ours, theirs)]
        tables = [
            {(a.group_name, a.attr_name): rows_of(store, a) for a in store.get_all_tensor_attrs()}
            for store in stores
        ]
        assert tables[0] == tables[1] != {}


def edges_of(store: object, attr: object) -> list[tuple[int, ...]]:
    ends, eids = store.get_edge_index(attr), store.get_edge_id(attr)  # type: ignore[attr-defined]
    assert (ends[1].diff() >= 0).all()
    return sorted(zip(ends[0].tolist(), ends[1].tolist(), eids.tolist(), strict=True))


def rows_of(store: object, attr: object) -> list[tuple[int, list[float]]]:
    """By id, since neither is bound to an order."""
    ids = store.get_global_id(attr.group_name)  # type: ignore[attr-defined]
    rows = store.get_tensor(attr.group_name, attr.attr_name)  # type: ignore[attr-defined]
    return sorted(zip(ids.tolist(), rows.tolist(), strict=True))


def test_pyg_reads_what_is_written(tmp_path: Path) -> None:
    """With its reader as it is."""
    from torch_geometric.distributed import LocalFeatureStore, LocalGraphStore

    graph = plain()
    whole = write_partitions(graph, [0] * NODES, tmp_path / "whole", format="pyg")
    assert sar.load_partition_data(whole, 0).num_edges("_E") == EDGES
    path = write_partitions(graph, np.arange(NODES) % 2, tmp_path / "out", format="pyg")
    for part in range(2):
        store = LocalGraphStore.from_partition(path, part)
        (attr,) = store.get_all_edge_attrs()
        assert attr.size == (NODES, NODES)
        src, dst, eids = torch.tensor(edges_of(store, attr)).T
        assert all(map(torch.equal, (src, dst), (one[eids] for one in graph.edges[ETYPE_HOMO])))
        features = LocalFeatureStore.from_partition(path, part)
        ids = features.get_global_id(None)
        assert torch.equal(ids, torch.arange(part, NODES, 2))
        expected = graph.node_data[NTYPE_HOMO]["feat"][ids]
        assert torch.equal(features.get_tensor(None, "x"), expected)


@pytest.mark.usefixtures("pyg_reads_its_own")
@pytest.mark.parametrize("time", ["nodes", "edges"])
def test_edges_of_pyg_are_ordered_by_time(time: str, tmp_path: Path) -> None:
    from foreign_files import write_pyg
    from torch_geometric.distributed import LocalGraphStore

    graph = copy.deepcopy(mixed())
    theirs = write_pyg(graph, np.arange(graph.total_nodes) % 2, 2, tmp_path / "theirs", time)
    if time == "nodes":
        graph.node_data[NTYPE_HOMO]["time"] = torch.arange(graph.total_nodes) * 3 % 17
    else:
        graph.edge_data[ETYPE_HOMO]["time"] = torch.arange(graph.total_edges) * 5 % 13
    ours = write_partitions(graph, torch.arange(57) % 2, tmp_path / "ours", format="pyg")
    times = [
        [by_time(time, LocalGraphStore.from_partition(str(at), part)) for part in range(2)]
        for at in (ours, theirs)
    ]
    assert times[0] == times[1]
    for part in range(2):
        name = f"_N{'' if time == 'nodes' else ':_E:_N'}/time"
        stores = [load_partition(at, part) for at in (ours, theirs)]
        rows = [
            one.node_features[name] if time == "nodes" else one.edge_features[name]
            for one in stores
        ]
        assert torch.equal(rows[0], rows[1])


def by_time(time: str, store: object) -> list[tuple[int, int]]:
    """Destination and time of each edge as they are stored."""
    (attr,) = store.get_all_edge_attrs()  # type: ignore[attr-defined]
    ends, eids = store.get_edge_index(attr), store.get_edge_id(attr)  # type: ignore[attr-defined]
    found = ends[0] * 3 % 17 if time == "nodes" else eids * 5 % 13
    return list(zip(ends[1].tolist(), found.tolist(), strict=True))


def test_types_that_pyg_cannot_name_are_told(tmp_path: Path) -> None:
    none = (torch.arange(0), torch.arange(0))
    clash = {("a", "b__c", "a"): none, ("a__b", "c", "a"): none}
    for sizes, edges in (({"a": 1, "a__b": 1}, clash), ({"..": 1}, {("..", "r", ".."): none})):
        graph = GraphArrays("g", sizes, edges)
        with pytest.raises(ValueError, match="PyG's partitions need"):
            write_partitions(graph, [0] * graph.total_nodes, tmp_path / "out", format="pyg")
    with pytest.raises(ValueError, match="format is 'glt', expected one of"):
        write_partitions(plain(), [0] * NODES, tmp_path / "out", format="glt")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------- cut again


@pytest.mark.parametrize("name", ["plain", "typed"])
def test_from_one_format_to_the_other_and_back(name: str, tmp_path: Path) -> None:
    graph = GRAPHS[name]()
    parts = cut(graph, 3)
    first = again = write_partitions(graph, parts, tmp_path / "a", num_parts=3)
    for number, format in enumerate(("pyg", "dgl")):
        (scratch := tmp_path / f"scratch{number}").mkdir()
        found, own = read_partitions(again, scratch)
        again = write_partitions(
            found, own, tmp_path / f"b{number}", "g", num_parts=3, format=format
        )
    for part in range(3):
        for file in ("graph.dgl", "node_feat.dgl", "edge_feat.dgl"):
            one, two = (Path(at).parent / f"part{part}" / file for at in (first, again))
            if file == "graph.dgl":
                assert one.read_bytes() == two.read_bytes()
            else:
                arrays = [read_tensor_dict(at) for at in (one, two)]
                assert set(arrays[0]) == set(arrays[1])
                for key, rows in arrays[0].items():
                    assert torch.equal(rows.read(), arrays[1][key].read())


def test_graphlearns_partitions_are_cut_again(tmp_path: Path) -> None:
    graph = mixed()
    parts = np.arange(graph.total_nodes) % 3
    found, own = read_partitions(write_glt(graph, parts, 3, tmp_path / "glt"), tmp_path)
    assert np.array_equal(own, parts)
    assert all(map(torch.equal, found.edges[ETYPE_HOMO], graph.edges[ETYPE_HOMO]))
    expected = graph.edge_data[ETYPE_HOMO]["weight"]
    assert torch.equal(found.edge_data[ETYPE_HOMO]["weight"], expected)
    path = write_partitions(found, own % 2, tmp_path / "out")
    assert main(["inspect", path]) == 0


@pytest.mark.parametrize("damage", ["twice", "far", "float"])
def test_ids_that_are_no_numbering_stay_a_column(damage: str, tmp_path: Path) -> None:
    graph = plain()
    ids = torch.arange(NODES)
    ids[3] = {"twice": 4, "far": 1000}.get(damage, 3)
    graph.node_data[NTYPE_HOMO]["orig_id"] = ids.double() if damage == "float" else ids
    graph.edge_data[ETYPE_HOMO]["orig_eid"] = torch.arange(EDGES) + 5
    path = write_partitions(graph, cut(graph, 3), tmp_path / "out")
    found, own = read_partitions(path, tmp_path)
    assert np.array_equal(own, np.sort(cut(graph, 3)))
    order = np.argsort(cut(graph, 3), kind="stable")
    assert torch.equal(
        found.node_data[NTYPE_HOMO]["feat"], graph.node_data[NTYPE_HOMO]["feat"][order]
    )
    assert found.node_data[NTYPE_HOMO]["orig_id"].tolist() == ids[order].tolist()
    eids = found.edge_data[ETYPE_HOMO]["orig_eid"] - 5
    for got, expected in zip(found.edges[ETYPE_HOMO], graph.edges[ETYPE_HOMO], strict=True):
        assert torch.equal(torch.from_numpy(order)[got], expected[eids])


def test_dgls_own_partitions_are_cut_again(tmp_path: Path) -> None:
    """Which keep no original ids."""
    dgl = pytest.importorskip("dgl")
    graph = plain()
    whole = dgl.graph(graph.edges[ETYPE_HOMO], num_nodes=NODES)
    whole.ndata["feat"] = graph.node_data[NTYPE_HOMO]["feat"]
    dgl.distributed.partition_graph(whole, "g", 2, str(tmp_path / "dgl"), part_method="random")
    (scratch := tmp_path / "scratch").mkdir()
    found, own = read_partitions(tmp_path / "dgl" / "g.json", scratch)
    assert found.total_edges == EDGES and np.array_equal(own, np.sort(own))
    rows = {tuple(row): at for at, row in enumerate(found.node_data[NTYPE_HOMO]["feat"].tolist())}
    places = torch.tensor([rows[tuple(row)] for row in whole.ndata["feat"].tolist()])
    expected = sorted(zip(*(places[ids].tolist() for ids in graph.edges[ETYPE_HOMO]), strict=True))
    assert sorted(zip(*(ids.tolist() for ids in found.edges[ETYPE_HOMO]), strict=True)) == expected


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
    expected = rf"{tmp_path}/out/part\d/\w+.dgl: could not be written: No space left on device"
    with pytest.raises(OSError, match=expected):
        write_partitions(plain(), np.arange(NODES) % 2, tmp_path / "out")
    assert not list(tmp_path.iterdir())


LIMITED = """
    import resource, signal, sys
    import numpy as np
    from sar.partition.sources.generate import community_graph
    from sar.partition.write import write_partitions
    graph = community_graph(2000, 9000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        write_partitions(graph, np.arange(2000) % 2, sys.argv[1] + "/out", format=sys.argv[2])
    except OSError as error:
        print(error, "dgl" in sys.modules)
"""


@pytest.mark.parametrize("format", ["dgl", "pyg"])
def test_a_limit_of_the_system_is_told(format: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path), format],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    where = f"{tmp_path}/out/" if format == "dgl" else f"{tmp_path}/"
    assert f"] {where}" in done.stdout and "could not be written: " in done.stdout, done
    assert done.stdout.endswith("False\n"), "writing imports DGL"
    assert not list(tmp_path.iterdir())


def test_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, parts = plain(), np.arange(NODES)
    expected = write_partitions(graph, parts, tmp_path / "a")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, 10))
    before = len(os.listdir("/proc/self/fd"))
    found = write_partitions(graph, parts, tmp_path / "b")
    assert len(os.listdir("/proc/self/fd")) == before
    assert Path(found).read_bytes() == Path(expected).read_bytes()
    assert out_files.OutFiles(tmp_path, tmp_path)._room == 5


# --------------------------------------------------------------------------------- maps of files

MAPPED = """
    import sys
    from pathlib import Path
    import numpy as np
    from sar.partition import npy
    from sar.partition.arrays import GraphArrays
    from sar.partition.formats import layout
    from sar.partition.write import write_partitions
    layout.BLOCK, folder, nodes, edges = 1 << 16, Path(sys.argv[1]), 1 << 17, 1 << 22
    shapes = {"src": (edges,), "dst": (edges,), "feat": (nodes, 128)}
    for name, shape in shapes.items():
        rows = npy.create(folder / name, np.float32 if name == "feat" else np.int64, shape)
        if name != "feat":
            for low in range(0, edges, 1 << 16):
                rows[low : low + (1 << 16)] = np.arange(low, low + (1 << 16)) * 7919 % nodes
        del rows
    src, dst, feat = (npy.tensor(folder / name) for name in shapes)
    etype = ("_N", "_E", "_N")
    graph = GraphArrays("g", {"_N": nodes}, {etype: (src, dst)}, {"_N": {"feat": feat}})
    parts = (np.arange(nodes) % 3).astype(np.int8)
    small = GraphArrays("s", {"_N": 9}, {etype: (src[:9] % 9, dst[:9] % 9)})
    write_partitions(small, parts[:9], folder / "small")  # compiles
    def kilobytes(word):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(word)))
    most, before = [0], kilobytes("RssAnon")
    def look(*_):
        most[0] = max(most[0], kilobytes("RssAnon"))
    write_partitions(graph, parts, folder / "out", progress=look)
    print((most[0] - before) / 1024)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="counts memory there")
def test_what_lies_in_files_stays_there(tmp_path: Path) -> None:
    """128 MB of edges and features; a few MB of blocks, and 5 bytes for each node."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MAPPED), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 25, done.stdout


@pytest.mark.parametrize("format", ["dgl", "pyg"])
def test_progress_is_told(format: str, tmp_path: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {}

    def progress(what: str, done: int, total: int) -> None:
        told.setdefault(what, []).append((done, total))

    write_partitions(
        plain(), np.arange(NODES) % 3, tmp_path / "out", format=format, progress=progress
    )
    assert told["writing _E edges"][0] == (7, EDGES)
    for steps in told.values():
        assert steps == sorted(steps) and steps[-1][0] == steps[-1][1]


def test_either_format_replaces_the_other(tmp_path: Path) -> None:
    for format in ("pyg", "dgl", "pyg"):
        path = write_partitions(
            plain(), np.arange(NODES) % 2, tmp_path / "out", format=format, overwrite=True
        )
        assert load_partition(path, 1).num_nodes(NTYPE_HOMO) == NODES // 2
