"""Any small graph, any transform and any method; and what DGL itself reads of the partitions."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from graph_forms import SOURCES, one_type, several_types
from harness.graphs import GraphArrays
from harness.parts import write_partitions
from hypothesis import given, settings
from hypothesis import strategies as st
from round_trips import Back, files_of, read_back
from torch import Tensor
from written_graphs import cut, typed

from sar import PartitionOptions
from sar.partition.run import partition
from sar.partition.transform import Transforms

dgl = pytest.importorskip("dgl")
BALANCES: dict[str, list[str]] = {
    "coarsen": ["edges", "halo", "train"], "hotness": ["train"], "metis": ["edges"],
    "random": [], "contiguous": [], "keep": [],
}  # fmt: skip
Run = tuple[tuple[int, int] | None, str, PartitionOptions, str]
LOOPS = st.sampled_from(["keep", "add", "remove"])
Pairs = dict[tuple[str, str, str], list[tuple[int, int]]]
ROOT = Path(__file__).resolve().parent.parent


def transformed(graph: GraphArrays, wanted: Transforms) -> Pairs:
    """Source and destination of each edge, as a user would write it."""
    found: Pairs = {}
    for etype, (src, dst) in graph.edges.items():
        pairs, alike = list(zip(src.tolist(), dst.tolist(), strict=True)), etype[0] == etype[2]
        if alike:
            if wanted.symmetrise:
                pairs += [(v, u) for u, v in pairs]
            if wanted.self_loops != "keep":
                pairs = [one for one in pairs if one[0] != one[1]]
            if wanted.self_loops == "add":
                pairs += [(u, u) for u in range(graph.num_nodes[etype[0]])]
        if wanted.symmetrise or wanted.drop_duplicates:
            pairs = sorted(set(pairs), key=lambda one: one[::-1])
        found[etype] = pairs
        if wanted.symmetrise and not alike:
            found[etype[2], f"rev_{etype[1]}", etype[0]] = [one[::-1] for one in pairs]
    return found


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Sizes of a graph (or none: one of several types), its form, how it is cut, and the format
    that it is kept in before."""
    method = draw(st.sampled_from(list(BALANCES)))
    sizes = draw(st.none() | st.tuples(st.integers(1, 40), st.integers(0, 60)))
    balances = BALANCES[method]
    balance = draw(st.none() | st.frozensets(st.sampled_from(balances))) if balances else None
    options = PartitionOptions(
        draw(st.integers(1, min(5, sizes[0] if sizes else 5))),
        method,
        balance,
        seed=draw(st.integers(0, 99)),
        transforms=Transforms(draw(st.booleans()), draw(st.booleans()), draw(LOOPS)),
        format=draw(st.sampled_from(["dgl", "pyg"])),
    )
    form = draw(st.sampled_from(["DGL", "npz", "YAML, npy"]))
    return sizes, form, options, draw(st.sampled_from(["dgl", "pyg"]))


@given(runs())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_each_node_and_edge_once(tmp_path_factory: pytest.TempPathFactory, run: Run) -> None:
    sizes, form, options, before = run
    graph = one_type(*sizes, options.seed) if sizes else several_types(options.seed)
    folder = tmp_path_factory.mktemp("any")
    source = SOURCES[form](graph, folder)
    given, graph = source.given, source.graph
    if options.method == "keep":
        cut = PartitionOptions(options.num_parts, "random", seed=1, format=before)
        given = partition(given, folder / "before", cut).path
        owner = read_back(given, options.num_parts).owner
    done = [partition(given, folder / name, options) for name in ("a", "b")]
    assert files_of(folder / "a") == files_of(folder / "b"), "the same seed gave other bytes"
    back = read_back(done[0].path, options.num_parts)
    pairs = transformed(graph, options.transforms)
    assert set(back.graph.edges) == set(pairs)
    for etype, (src, dst) in back.graph.edges.items():
        assert list(zip(src.tolist(), dst.tolist(), strict=True)) == pairs[etype]
    assert back.graph.num_nodes == graph.num_nodes
    for ntype, columns in graph.node_data.items():
        assert torch.equal(back.graph.node_data[ntype]["feat"], columns["feat"])
    if options.method == "keep":
        assert all(torch.equal(back.owner[ntype], parts) for ntype, parts in owner.items())
    assert int(done[0].quality.nodes.sum()) == graph.total_nodes
    if options.format == "dgl":
        dgl_agrees(done[0].path, options.num_parts, back)


# --------------------------------------------------------------------------------- DGL's readers


def dgl_agrees(path: str, num_parts: int, back: Back) -> None:
    """Its books, graphs with halo nodes, and features say what ours do."""
    from dgl.distributed import load_partition, load_partition_book

    parts = [load_partition(path, part) for part in range(num_parts)]
    ids = {  # what its ids inside a type are in the graph that was cut
        ntype: torch.cat([one[1][f"{ntype}/orig_id"] for one in parts])
        for ntype in back.graph.num_nodes
    }
    for part, (local, _, edge_feats, book, _, ntypes, etypes) in enumerate(parts):
        assert book.metadata() == load_partition_book(path, part)[0].metadata()
        nodes, kinds = list(ntypes), list(etypes)
        number, owner = local.ndata[dgl.NID], local.ndata["part_id"].long()
        assert torch.equal(book.nid2partid(number), owner)
        assert torch.equal(owner == part, local.ndata["inner_node"].bool())
        kind, inside = book.map_to_per_ntype(number)
        orig = torch.zeros(len(number), dtype=torch.int64)
        for at, ntype in enumerate(nodes):
            rows = kind == at
            orig[rows] = ids[ntype][inside[rows]]
            assert torch.equal(back.owner[ntype][orig[rows]], owner[rows])
        src, dst = local.edges(order="eid")
        assert local.edata["inner_edge"].bool().all() and (owner[dst] == part).all()
        edge_kind, edge_inside = book.map_to_per_etype(local.edata[dgl.EID])
        for at, etype in enumerate(kinds):
            rows = edge_kind == at
            own = etype if isinstance(etype, tuple) else tuple(etype.split(":"))
            eids = edge_feats[f"{':'.join(own)}/orig_eid"]
            eids = eids[edge_inside[rows] - edge_inside[rows].min()] if rows.any() else eids
            expected = back.graph.edges[own]
            assert torch.equal(orig[src[rows]], expected[0][eids])
            assert torch.equal(orig[dst[rows]], expected[1][eids])


def test_dgl_reads_empty_parts_and_types(tmp_path: Path) -> None:
    graph = typed()
    path = write_partitions(graph, cut(graph, 4), tmp_path / "out", num_parts=4)
    dgl_agrees(path, 4, read_back(path, 4))


STANDALONE = """
    import os, sys
    os.environ["DGL_DIST_MODE"] = "standalone"
    import dgl, torch
    dgl.distributed.initialize("unused")
    graph = dgl.distributed.DistGraph("one", part_config=sys.argv[1])
    nodes = torch.arange(graph.num_nodes())
    columns = {name: graph.ndata[name][nodes] for name in ("feat", "orig_id")}
    drawn = dgl.distributed.sample_neighbors(graph, nodes, -1).edges()
    torch.save(columns | {"drawn": torch.stack(drawn)}, sys.argv[2])
"""


def test_distgraph_reads_what_is_written(tmp_path: Path) -> None:
    """Its standalone mode, which takes one part."""
    graph = one_type()
    done = partition(graph, tmp_path / "out", PartitionOptions(1, name="one"))
    words = [sys.executable, "-c", textwrap.dedent(STANDALONE), done.path, str(tmp_path / "told")]
    subprocess.run(words, cwd=ROOT, timeout=100, check=True)
    told: dict[str, Tensor] = torch.load(tmp_path / "told", weights_only=True)
    (data,), (ends,) = graph.node_data.values(), graph.edges.values()
    order = told["orig_id"]
    assert torch.equal(told["feat"], data["feat"][order])
    assert torch.equal(order.sort().values, torch.arange(graph.total_nodes))
    drawn = zip(*order[told["drawn"]].tolist(), strict=True)
    assert sorted(drawn) == sorted(zip(*(one.tolist() for one in ends), strict=True))
