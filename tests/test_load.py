"""Loading one part: against DGL's own loader, on odd files, and within its memory bound."""

import contextlib
import io
import json
import subprocess
import sys
import textwrap

import partition_files as files
import pytest
import torch
from harness.graphs import NUM_FEATURES, homogeneous, shop, to_dgl
from harness.parts import load_partition
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sar import PartitionError
from sar.partition import shards

dgl = pytest.importorskip("dgl")
pytest.importorskip("dgl.distributed")

FUZZ = settings(
    deadline=None,
    derandomize=True,
    max_examples=250,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def homogeneous_graph():
    torch.manual_seed(0)
    graph = to_dgl(homogeneous("g", 120, *torch.randint(0, 120, (2, 900))))
    graph.ndata["small"] = torch.randint(0, 200, (120, 2), dtype=torch.uint8)
    return graph


def simple(graph):
    # DGL's METIS corrupts the heap on graphs with multi-edges.
    return dgl.to_simple(graph, copy_ndata=True, copy_edata=False)


CASES = {
    "metis": lambda: (simple(homogeneous_graph()), 3, "metis", {}),
    "random": lambda: (homogeneous_graph(), 3, "random", {}),
    "two-hops": lambda: (homogeneous_graph(), 4, "random", {"num_hops": 2}),
    "one": lambda: (homogeneous_graph(), 1, "random", {}),
    "csc": lambda: (homogeneous_graph(), 3, "random", {"graph_formats": "csc"}),
    "csr": lambda: (homogeneous_graph(), 2, "random", {"graph_formats": "csr"}),
    "csr,csc": lambda: (homogeneous_graph(), 2, "random", {"graph_formats": ["csr", "csc"]}),
    "hetero": lambda: (to_dgl(shop()), 2, "random", {}),
    "hetero metis": lambda: (simple(to_dgl(shop())), 2, "metis", {}),
    "hetero csc": lambda: (to_dgl(shop()), 2, "random", {"graph_formats": "csc"}),
}


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """``cut(case)``: path of the JSON of a partitioned graph, made once."""
    made = {}

    def make(name):
        if name not in made:
            graph, parts, method, options = CASES[name]()
            out = tmp_path_factory.mktemp("parts")
            dgl.seed(0)  # with some draws a part lacks a type, which DGL cannot write
            with contextlib.redirect_stdout(io.StringIO()):
                dgl.distributed.partition_graph(
                    graph, "g", parts, str(out), part_method=method, **options
                )
            made[name] = out / "g.json"
        return made[name]

    return make


def edge_list(data):
    """``(type, eid, src nid, dst nid)`` of a part's edges, and checks of their order."""
    rows = []
    for type_id, etype in enumerate(data.book.canonical_etypes):
        shard = data.edges[etype]
        first = int(data.book.edge_ranges[etype][data.part_id, 0])
        dst_first = int(data.book.node_ranges[etype[2]][data.part_id, 0])
        assert len(shard.offsets) == data.book.num_parts + 1
        assert shard.offsets[0] == 0 and shard.offsets[-1] == len(shard.src)
        assert {one.dtype for one in (shard.src, shard.dst, shard.eid)} == {torch.int32}
        for part in range(data.book.num_parts):
            group = slice(shard.offsets[part], shard.offsets[part + 1])
            assert (shard.eid[group].diff() > 0).all()
            src_first = int(data.book.node_ranges[etype[0]][part, 0])
            rows += zip(
                [type_id] * (group.stop - group.start),
                (shard.eid[group] + first).tolist(),
                (shard.src[group] + src_first).tolist(),
                (shard.dst[group] + dst_first).tolist(),
            )
    return rows


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk", [37, 1 << 16])
def test_equals_dgls_loader(cut, case, chunk, monkeypatch):
    monkeypatch.setattr(shards, "CHUNK_EDGES", chunk)
    path = cut(case)
    for part in range(json.loads(path.read_text())["num_parts"]):
        graph, nodes, edges, book, name, ntypes, etypes = dgl.distributed.load_partition(
            str(path), part
        )
        data = load_partition(path, part)
        assert data.node_type_names == ntypes and data.edge_type_names == etypes
        assert data.book.graph_name == name and data.part_id == part
        inner = graph.edata["inner_edge"].bool()
        src, dst = graph.edges(order="eid")
        types = graph.edata.get("_TYPE", torch.zeros_like(graph.edata["_ID"]))
        columns = (types, graph.edata["_ID"], graph.ndata["_ID"][src], graph.ndata["_ID"][dst])
        expected = sorted(zip(*[one[inner].tolist() for one in columns]))
        assert sorted(edge_list(data)) == expected
        assert set(data.node_features) == {*nodes, "_TYPE"}
        for key, tensor in nodes.items():
            wanted = tensor.bool() if key.endswith("_mask") else tensor
            assert data.node_features[key].dtype == wanted.dtype
            assert torch.equal(data.node_features[key], wanted)
        assert set(data.edge_features) == set(edges)
        for key, tensor in edges.items():
            assert torch.equal(data.edge_features[key], tensor)
        inner = graph.ndata["inner_node"].bool()
        types = graph.ndata.get("_TYPE", torch.zeros(graph.num_nodes(), dtype=torch.int32))
        assert torch.equal(data.node_features["_TYPE"], types[inner])


@pytest.mark.parametrize("case", ["random", "hetero"])
def test_names_of_the_original(cut, case):
    data = load_partition(cut(case), 1)
    assert data.partition_book is data.book and data.node_ranges == data.book.part_ranges
    low, high = data.node_ranges[1]
    listed = []
    for (start, end), found in zip(data.node_ranges, data.all_shard_edges, strict=True):
        (src, dst), types = found.edges, found.edge_features["_TYPE"]
        assert src.dtype == dst.dtype == torch.int64 and types.dtype == torch.int32
        assert (types.diff() >= 0).all()
        assert ((src >= start) & (src < end)).all() and ((dst >= low) & (dst < high)).all()
        listed += zip(types.tolist(), src.tolist(), dst.tolist())
    assert sorted(listed) == sorted((t, s, d) for t, _, s, d in edge_list(data))
    assert sum(data.num_nodes(ntype) for ntype in data.node_type_names) == high - low
    assert sum(data.num_edges(etype) for etype in data.edge_type_names) == len(listed)


def test_feature_mapping(cut):
    store = load_partition(cut("random"), 0).node_features
    whole = store["_N/feat"]
    whole.fill_(7)
    assert not torch.equal(store["_N/feat"], whole)  # read again, not kept
    assert torch.equal(store.rows("_N/feat", 3, 9), store["_N/feat"][3:9])
    for name, dtype, shape in (
        ("feat", torch.float32, (NUM_FEATURES,)),
        ("train_mask", torch.bool, ()),
        ("small", torch.uint8, (2,)),
    ):
        assert store.info(f"_N/{name}") == (dtype, (len(whole), *shape))
        assert store.rows(f"_N/{name}", 0, 4).dtype == dtype
        given = store[f"_N/{name}"].double()
        assert torch.equal(store.get_as(f"_N/{name}", torch.float64), given)
    assert store.rows("_TYPE", 0, 4).tolist() == [0] * 4
    store["_N/feat"] = whole
    assert store["_N/feat"] is whole
    assert store.get_as("_N/feat", torch.bfloat16).dtype == torch.bfloat16
    store["mine"] = torch.ones(2)
    assert "mine" in store and store.pop("mine").sum() == 2 and "mine" not in store
    assert store.get("none") is None
    for name, nearest in (("_M/feat", "feat"), ("_N/fest", "feat"), ("lable", "label")):
        with pytest.raises(KeyError) as caught:
            store.info(name)
        words = str(caught.value)
        assert words.startswith(f"no feature {name!r}; did you mean '_N/{nearest}'? there are: ")
        assert all(repr(known) in words for known in store)
    with pytest.raises(TypeError, match="expected a Tensor"):
        store["x"] = [1]


class Part:
    """Part 0 of a cut graph as tensors that a test can spoil, and written back in a folder."""

    def __init__(self, path, folder):
        self.folder, self.config = folder, json.loads(path.read_text())
        self.source = path.parent
        loaded = dgl.load_graphs(str(path.parent / "part0/graph.dgl"))[0][0]
        self.nodes, self.src, self.dst, self.node_data, self.edge_data = files.part_of(loaded)
        load = dgl.data.utils.load_tensors
        self.node_feats = load(str(path.parent / "part0/node_feat.dgl"))
        self.edge_feats = load(str(path.parent / "part0/edge_feat.dgl"))
        self.num_inner_nodes = int(self.node_data["inner_node"].sum())
        self.num_inner_edges = int(self.edge_data["inner_edge"].sum())

    def load(self, raw=None, **options):
        if raw is None:
            raw = self.graph(**options)
        (self.folder / "part0").mkdir(exist_ok=True)
        (self.folder / "part0/graph.dgl").write_bytes(raw)
        for name, tensors in (("node", self.node_feats), ("edge", self.edge_feats)):
            raw = files.tensor_dict(tensors)
            (self.folder / f"part0/{name}_feat.dgl").write_bytes(raw)
        (self.folder / "g.json").write_text(json.dumps(self.config))
        return load_partition(self.folder / "g.json", 0)

    def graph(self, **options):
        return files.graph(
            self.nodes, self.src, self.dst, self.node_data, self.edge_data, **options
        )

    def reorder_edges(self):
        order = torch.randperm(len(self.src), generator=torch.Generator().manual_seed(5))
        self.src, self.dst = self.src[order], self.dst[order]
        self.edge_data = {name: one[order] for name, one in self.edge_data.items()}


@pytest.fixture
def part(cut, tmp_path):
    return lambda case: Part(cut(case), tmp_path)


def same_edges(one, other):
    for etype, shard in one.edges.items():
        found = other.edges[etype]
        assert shard.offsets == found.offsets
        for name in ("src", "dst", "eid"):
            assert torch.equal(getattr(shard, name), getattr(found, name))


@pytest.mark.parametrize("case", ["random", "hetero"])
@pytest.mark.parametrize("layouts", [("coo",), ("csr",), ("csc",), ("csr", "csc")])
def test_any_layout_and_any_order_give_the_same_shards(cut, part, case, layouts):
    expected = load_partition(cut(case), 0)
    same_edges(expected, part(case).load(layouts=layouts))
    mixed = part(case)
    mixed.reorder_edges()
    same_edges(expected, mixed.load(layouts=layouts))
    if len(layouts) == 1:
        same_edges(expected, mixed.load(layouts=layouts, old=True))


def test_features_of_other_dtypes_and_old_names(part):
    changed = part("random")
    rows = changed.num_inner_nodes
    half = torch.randn(rows, 3).half()
    changed.node_feats = {"feat": half, "_N/b": half.bfloat16()}
    changed.edge_feats = {"w": torch.arange(changed.num_inner_edges)}
    data = changed.load()
    assert set(data.node_features) == {"_N/feat", "_N/b", "_TYPE"}
    assert data.node_features["_N/feat"].dtype == torch.float16
    assert torch.equal(data.node_features.get_as("_N/feat", torch.float32), half.float())
    assert torch.equal(data.node_features["_N/b"], half.bfloat16())
    assert len(data.edge_features["_N:_E:_N/w"]) == changed.num_inner_edges
    del changed.config["part-0"]["node_feats"], changed.config["part-0"]["edge_feats"]
    data = changed.load()
    assert set(data.node_features) == {"_TYPE"} and not data.edge_features


def put(name, key, value):
    """A change of one column at one place; negative and "inner" rows are found in the part."""

    def change(part):
        data = part.node_data if name == "node" else part.edge_data
        column = data[key[0]]
        column[key[1] if key[1] != "halo" else part.num_inner_nodes] = value

    return change


def change(**fields):
    def apply(part):
        for name, make in fields.items():
            setattr(part, name, make(part))

    return apply


def without(name, key):
    return lambda part: getattr(part, name).pop(key)


def halo_source_dropped(part):
    keep = (part.src < part.num_inner_nodes) | (part.edge_data["inner_edge"] == 0)
    part.src, part.dst = part.src[keep], part.dst[keep]
    part.edge_data = {name: one[keep] for name, one in part.edge_data.items()}


def end_in_halo(part):
    part.dst[0] = part.num_inner_nodes


def other_type(data, row):
    def change(part):
        column = getattr(part, data)["_TYPE"]
        column[row] = (column[row] + 1) % 3

    return change


def start_elsewhere(part):
    """An edge begins where it ends: nodes of another type."""
    types = part.node_data["_TYPE"]
    edge = int(torch.nonzero(types[part.src] != types[part.dst])[0])
    part.src[edge] = part.dst[edge]


BAD = {
    "no ids": (without("node_data", "_ID"), "no '_ID'"),
    "no edge ids": (without("edge_data", "_ID"), "no '_ID'"),
    "no inner nodes": (without("node_data", "inner_node"), "no 'inner_node'"),
    "no inner edges": (without("edge_data", "inner_edge"), "no 'inner_edge'"),
    "float ids": (
        change(node_data=lambda p: {**p.node_data, "_ID": p.node_data["_ID"].float()}),
        "one integer",
    ),
    "inner node not marked": (put("node", ("inner_node", 3), 0), "inner_node"),
    "halo node marked": (put("node", ("inner_node", "halo"), 1), "inner_node"),
    "inner id swapped": (put("node", ("_ID", 3), 4), "ids of the inner nodes"),
    "halo id too large": (put("node", ("_ID", "halo"), 10**6), "node ids run"),
    "halo id negative": (put("node", ("_ID", "halo"), -5), "node ids run"),
    "halo id of this part": (put("node", ("_ID", "halo"), 0), "halo node"),
    "wrong part of a node": (put("node", ("part_id", "halo"), 0), "part_id of node"),
    "edge id doubled": (put("edge", ("_ID", 3), 4), "different ids"),
    "edge id of another part": (put("edge", ("_ID", 3), 899), "ids of inner edges"),
    "edge id negative": (put("edge", ("_ID", 3), -(2**63)), "ids of inner edges"),
    "edge not marked": (put("edge", ("inner_edge", 3), 0), "inner edges with"),
    "edge ends in the halo": (end_in_halo, "ends in local node"),
    "edges from the halo are gone": (halo_source_dropped, "without its halo"),
    "feature rows": (
        change(node_feats=lambda p: {"_N/feat": torch.zeros(p.num_inner_nodes + 1, 2)}),
        "expected .* rows",
    ),
    "feature without rows": (change(node_feats=lambda p: {"feat": torch.tensor(1.0)}), "rows"),
    "feature twice": (
        change(node_feats=lambda p: {n: torch.zeros(p.num_inner_nodes) for n in ("x", "_N/x")}),
        "twice",
    ),
    "feature of no type": (
        change(node_feats=lambda p: {"user/x": torch.zeros(p.num_inner_nodes)}),
        "of no type",
    ),
    "edge feature rows": (
        change(edge_feats=lambda p: {"w": torch.zeros(p.num_inner_edges - 1)}),
        "expected .* rows",
    ),
}
BAD_TYPES = {
    "type of an inner node": (other_type("node_data", 0), "_TYPE of node"),
    "type of a halo node": (other_type("node_data", -1), "_TYPE of node"),
    "type of an edge": (other_type("edge_data", 0), "_TYPE of an inner edge"),
    "source of another type": (start_elsewhere, "source of an edge of type"),
}


@pytest.mark.parametrize("name", [*BAD, *BAD_TYPES])
def test_files_that_contradict_the_json(part, name):
    spoiled = part("random" if name in BAD else "hetero")
    assert spoiled.load()
    spoil, words = (BAD | BAD_TYPES)[name]
    spoil(spoiled)
    with pytest.raises(PartitionError, match=words) as error:
        spoiled.load()
    assert "part0" in str(error.value)


def test_another_graphs_file_and_missing_files(part, cut):
    for number, kind in ((3, ValueError), (-1, ValueError), ("0", TypeError), (True, TypeError)):
        with pytest.raises(kind, match="part_id: got"):
            load_partition(cut("random"), number)
    foreign = part("random")
    other = (cut("metis").parent / "part0/graph.dgl").read_bytes()
    with pytest.raises(PartitionError, match="part0/graph.dgl"):
        foreign.load(raw=other)
    with pytest.raises(PartitionError, match="magic"):
        foreign.load(raw=files.tensor_dict({"a": torch.zeros(3)}))
    gone = part("random")
    gone.load()
    for name in ("graph", "node_feat", "edge_feat"):
        path = gone.folder / f"part0/{name}.dgl"
        raw = path.read_bytes()
        path.unlink()
        with pytest.raises(PartitionError, match=f"{name}.dgl: no such file"):
            load_partition(gone.folder / "g.json", 0)
        path.write_bytes(raw)


def test_parts_beyond_int32_are_refused(part):
    large = part("random")
    ranges = large.config["node_map"]["_N"]
    ranges[-1][1] = large.config["num_nodes"] = ranges[-1][0] + 2**31
    with pytest.raises(PartitionError, match="2147483648 nodes.*more parts"):
        large.load()
    large = part("random")
    large.config["edge_map"]["_N:_E:_N"] = [[0, 2**31], [2**31] * 2, [2**31] * 2]
    large.config["num_edges"] = 2**31
    large.edge_feats = {}
    with pytest.raises(PartitionError, match="2147483648 edges.*more parts"):
        large.load()


@FUZZ
@given(
    layout=st.sampled_from(["coo", "csr", "csc"]),
    edits=st.lists(st.tuples(st.integers(0, 1 << 24), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_a_damaged_graph_gives_an_error_or_valid_shards(cut, tmp_path, layout, edits):
    part = Part(cut("random"), tmp_path)
    raw = part.graph(layouts=(layout,))
    try:
        data = part.load(raw=raw[:4096] + files.mutate(raw[4096:], edits))
    except PartitionError:
        return
    for shard in data.edges.values():
        assert len(shard.src) == part.num_inner_edges
        assert 0 <= shard.dst.min() and shard.dst.max() < part.num_inner_nodes
        for p in range(3):
            group = shard.src[shard.offsets[p] : shard.offsets[p + 1]]
            assert 0 <= group.min() and group.max() < data.book.part_nodes("_N", p)


MEMORY_PROBE = """
    import sys, threading
    from sar.partition.load import load_partition

    def anonymous():
        with open("/proc/self/status") as stream:
            return int(stream.read().split("RssAnon:")[1].split()[0]) * 1024

    load_partition(sys.argv[1], 0)  # imports and buffers of the first call
    base, found, ended = anonymous(), [], threading.Event()

    def watch():
        while not ended.wait(0.0002):
            found.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    data = load_partition(sys.argv[2], 0)
    ended.set()
    watcher.join()
    stays = 12 * sum(shard.offsets[-1] for shard in data.edges.values())
    print(stays, max(*found, anonymous()) - base)
"""


@pytest.mark.parametrize("layout", ["coo", "csc"])
def test_memory_while_loading_is_bounded(cut, tmp_path, layout):
    nodes, edges = 50_000, 2_000_000
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(0, nodes, (edges,), generator=generator)
    dst = torch.randint(0, nodes // 2, (edges,), generator=generator)
    ids = torch.arange(nodes)
    node_data = {"_ID": ids, "inner_node": (ids < nodes // 2).to(torch.uint8)}
    edge_data = {"_ID": torch.arange(edges), "inner_edge": torch.ones(edges, dtype=torch.uint8)}
    raw = files.graph(nodes, src, dst, node_data, edge_data, layouts=(layout,))
    (tmp_path / "graph.dgl").write_bytes(raw)
    config = json.loads(cut("random").read_text())
    config.update(
        num_parts=2,
        num_nodes=nodes,
        num_edges=edges,
        node_map={"_N": [[0, nodes // 2], [nodes // 2, nodes]]},
        edge_map={"_N:_E:_N": [[0, edges], [edges, edges]]},
    )
    for i in range(2):
        config[f"part-{i}"] = {"part_graph": "graph.dgl"}
    (tmp_path / "g.json").write_text(json.dumps(config))
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY_PROBE), cut("random"), tmp_path / "g.json"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    stays, peak = map(int, ran.stdout.split())
    assert stays == 12 * edges
    assert stays <= peak <= 2.5 * stays
