"""Blocks of a loader beside those that DGL makes of the same edges: messages, layers, queries."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache, partial
from itertools import cycle, islice, permutations, product
from typing import Any, NamedTuple

import pytest
import torch
from harness import models, run_threads
from harness.graphs import sample, to_dgl
from harness.parts import Cutter
from torch import Tensor

import sar
from sar.comm import Group
from sar.sampling import NeighborLoader, SubgraphLoader

dgl = pytest.importorskip("dgl")
import dgl.function as fn  # noqa: E402

OPS = ("add", "sub", "mul", "div", "dot")
BINARY = [f"{a}_{op}_{b}" for a, b in permutations("uev", 2) for op in OPS]
MESSAGES = ["copy_u", "copy_e", *BINARY]
REDUCERS = ["sum", "mean", "max", "min"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


class Pair(NamedTuple):
    """Blocks of one batch, the input layer's first, and DGL's of the same edges."""

    ours: list[Any]
    theirs: list[Any]


def by_owners(name: str, kind: str, path: str) -> Pair:
    """One batch of rank 1; each of its edges is that of the whole graph that it says it is."""
    whole = to_dgl(sample(name))

    def case(group: Group) -> list[Any]:
        data = sar.load_partition_data(path)
        ntype = data.book.ntypes[0]
        mask = torch.arange(data.num_nodes(ntype)) < (0 if group.rank and kind == "empty" else 9)
        made = SubgraphLoader if kind == "subgraph" else NeighborLoader
        options = {"filter": lambda drawn: drawn} if kind == "filtered" else {}
        with made(data, [6, 4], (ntype, mask), as_="dgl", batch_size=9, **options) as loader:
            ((_, _, blocks),) = list(loader)
        return blocks if isinstance(blocks, list) else [blocks]

    ours = run_threads(2, case)[1]
    return Pair(ours, [remade(block, whole) for block in ours])


def remade(block: Any, whole: Any) -> Any:
    edges = {}
    for etype in block.canonical_etypes:
        src, dst, eid = block.edges(form="all", order="eid", etype=etype)
        assert torch.equal(eid, torch.arange(len(src)))
        known = block.srcnodes[etype[0]].data, block.dstnodes[etype[2]].data
        ids = [column[dgl.NID][end] for column, end in zip(known, (src, dst))]
        real = whole.find_edges(block.edges[etype].data[dgl.EID], etype=etype)
        assert torch.equal(torch.stack(ids), torch.stack(real))
        if block.is_block:  # rows of nodes and edges are those of the graph
            eids, weight = block.edges[etype].data[dgl.EID], whole.edges[etype].data["weight"]
            assert torch.equal(block.edges[etype].data["weight"], weight[eids])
            for ntype, nodes, name in ((etype[0], known[0], "feat"), (etype[2], known[1], "label")):
                if name in nodes:
                    assert torch.equal(nodes[name], whole.nodes[ntype].data[name][nodes[dgl.NID]])
        edges[etype] = src.clone(), dst.clone()
    if not block.is_block:
        return dgl.heterograph(edges, {n: block.num_nodes(n) for n in block.ntypes})
    counts = {n: block.num_src_nodes(n) for n in block.srctypes}
    return dgl.create_block(edges, counts, {n: block.num_dst_nodes(n) for n in block.dsttypes})


KINDS = [
    ("mixed", "sorted"), ("mixed", "filtered"), ("mixed", "subgraph"), ("mixed", "empty"),
    ("shop", "sorted"), ("shop", "subgraph"),
]  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Pair]:
    cutter = Cutter(tmp_path_factory.mktemp("parts"))
    return cache(lambda name, kind: by_owners(name, kind, cutter(sample(name), 2)))


def results(block: Any, etype: Any, dtype: torch.dtype, run: Callable) -> Any:
    """What a run gives and the gradients of its inputs; the error of what DGL cannot compute."""
    torch.manual_seed(0)
    sizes = block.num_src_nodes(etype[0]), block.num_dst_nodes(etype[2]), block.num_edges(etype)
    rows = [torch.randn(n, 3).abs().add(0.5).to(dtype).requires_grad_() for n in sizes]
    with block.local_scope():
        block.srcnodes[etype[0]].data["u"] = rows[0]
        block.dstnodes[etype[2]].data["v"] = rows[1]
        block.edges[etype].data["e"] = rows[2]
        try:
            out = run(block, etype)
            out.backward(torch.linspace(1, 2, out.numel()).view(out.shape).to(out))
        except (dgl.DGLError, RuntimeError) as error:
            return type(error).__name__
    return [out.detach(), *(row.grad for row in rows)]


def compare(
    pair: Callable[[str, str], Pair], run: Callable[[Any, Any], Tensor], first: int = 0
) -> int:
    """A run on every relation of every block, each with another dtype; how many DGL can do."""
    count = 0
    for kind, dtype in zip(KINDS, islice(cycle(DTYPES), first, None)):
        for ours, theirs in zip(*pair(*kind), strict=True):
            for etype in ours.canonical_etypes:
                got, want = (results(one, etype, dtype, run) for one in (ours, theirs))
                if isinstance(want, str):
                    assert got == want
                else:
                    torch.testing.assert_close(got, want)
                    count += 1
    return count


def message(name: str) -> Any:
    words = (name[-1],) if name.startswith("copy") else (name[0], name[-1])
    return getattr(fn, name)(*words, "m")


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_and_reducer(name: str, pair: Callable[[str, str], Pair]) -> None:
    """Each message with every other reducer."""

    def aggregated(reducer: str, block: Any, etype: Any) -> Tensor:
        block.update_all(message(name), getattr(fn, reducer)("m", "out"), etype=etype)
        return block.dstnodes[etype[2]].data["out"]

    first = MESSAGES.index(name)
    for number, reducer in enumerate(REDUCERS[first % 2 :: 2], first):
        assert compare(pair, partial(aggregated, reducer), number) > 6


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_left_on_edges(name: str, pair: Callable[[str, str], Pair]) -> None:
    def applied(block: Any, etype: Any) -> Tensor:
        block.apply_edges(message(name), etype=etype)
        return block.edges[etype].data["m"]

    assert compare(pair, applied) > 6


@pytest.mark.parametrize("norm_by", ["src", "dst"])
def test_softmax_of_edges(norm_by: str, pair: Callable[[str, str], Pair]) -> None:
    def normalized(block: Any, etype: Any) -> Tensor:
        rows = block.edges[etype].data["e"]
        return dgl.nn.functional.edge_softmax(block[etype], rows, norm_by=norm_by)

    assert compare(pair, normalized) > 6


def test_functions_of_edges_and_mailboxes(pair: Callable[[str, str], Pair]) -> None:
    def aggregated(block: Any, etype: Any) -> Tensor:
        block.update_all(
            lambda edges: {"m": edges.src["u"] * edges.data["e"] - edges.dst["v"]},
            lambda nodes: {"out": nodes.mailbox["m"].cumsum(1).sum(1)},
            etype=etype,
        )
        out = block.dstnodes[etype[2]].data.get("out")  # none of no edges
        return block.edges[etype].data["e"] if out is None else out

    assert compare(pair, aggregated) > 6


def test_several_relations_at_once(pair: Callable[[str, str], Pair]) -> None:
    """Sums over relations and, on a graph, a softmax over all of them: of a block DGL crashes."""
    for kind in ("sorted", "filtered", "subgraph"):
        got, want = [], []
        for out, block in zip((got, want), [one[0] for one in pair("shop", kind)]):
            torch.manual_seed(0)
            for etype in block.canonical_etypes:
                block.edges[etype].data["e"] = torch.rand(block.num_edges(etype), 2)
            passed = fn.copy_e("e", "m"), fn.sum("m", "out")
            block.multi_update_all(dict.fromkeys(block.canonical_etypes, passed), "sum")
            out += [block.dstnodes[n].data["out"] for n in block.dsttypes]
            if not block.is_block:
                logits = {e: block.edges[e].data["e"] for e in block.canonical_etypes}
                soft = dgl.nn.functional.edge_softmax(block, logits)
                out += [soft[etype] for etype in block.canonical_etypes]
        torch.testing.assert_close(got, want)


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("name", [*models.layers(), *models.HETERO])
def test_every_layer(name: str, pair: Callable[[str, str], Pair]) -> None:
    """The models of the matrix: on blocks where DGL lets them run there, else on a subgraph."""
    is_on_blocks = models.runs_on_blocks(name)
    sides = pair(models.sample_graph(name), "sorted" if is_on_blocks else "subgraph")
    got, want = (trained(name, side if is_on_blocks else side * 2) for side in sides)
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-5)


def trained(name: str, graphs: list[Any]) -> dict[str, Tensor]:
    """Rows, and gradients of the inputs and of all parameters."""
    model, rng = models.build(name), torch.Generator().manual_seed(1)
    first = graphs[0]
    rows = {
        ntype: torch.randn(first.num_src_nodes(ntype), 6, generator=rng).requires_grad_()
        for ntype in sorted(first.srctypes)
    }
    edges = [
        {
            etype: {
                "weight": (torch.rand(g.num_edges(etype), generator=rng) + 0.5).requires_grad_(),
                "type": torch.randint(3, (g.num_edges(etype),), generator=rng).sort().values,
            }
            for etype in sorted(g.canonical_etypes)
        }
        for g in graphs
    ]
    out = model(graphs, rows, edges)
    sum((one * torch.linspace(0, 1, one.shape[-1])).sum() for one in out.values()).backward()
    found = {f"out {key}": value.detach() for key, value in out.items()}
    found |= {f"rows {key}": value.grad for key, value in rows.items()}
    for hop, of in enumerate(edges):
        found |= {f"edges {hop} {key}": value["weight"].grad for key, value in of.items()}
    return found | {key: value.grad for key, value in model.named_parameters()}


# ---------------------------------------------------------------- queries

QUERIES: dict[str, Callable[[Any, Any], Any]] = {
    "edges": lambda g, e: g.edges(form="all", order="eid", etype=e),
    "edges by source": lambda g, e: g.edges(form="uv", order="srcdst", etype=e),
    "degrees": lambda g, e: [g.in_degrees(etype=e), g.out_degrees(etype=e)],
    "edge_ids": lambda g, e: torch.cat(g.edge_ids(*g.edges(etype=e), return_uv=True, etype=e)),
    "find_edges": lambda g, e: g.find_edges(torch.arange(g.num_edges(e)), etype=e),
    "in_edges": lambda g, e: g.in_edges(torch.arange(g.num_dst_nodes(e[2])), "all", etype=e),
    "out_edges": lambda g, e: g.out_edges(torch.arange(g.num_src_nodes(e[0])), "all", etype=e),
    "has_edges_between": lambda g, e: g.has_edges_between(*g.edges(etype=e), etype=e),
    "laid out by source": lambda g, e: g.adj_tensors("csr", etype=e),
}
SHAPES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda g: g,
    "int32 and back": lambda g: g.to("cpu").int().long(),
    "coo": lambda g: g.formats("coo"),
    "csr": lambda g: g.formats("csr"),
    "csc": lambda g: g.formats(["csc"]),
    "reversed": lambda g: dgl.reverse(dgl.block_to_graph(g), copy_edata=True),
    "some edges": lambda g: dgl.edge_subgraph(
        g, {e: torch.arange(0, g.num_edges(e), 2) for e in g.canonical_etypes},
        relabel_nodes=False,
    ),
    "pickled": lambda g: pickle.loads(pickle.dumps(g)),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_tells_the_same(shape: str, pair: Callable[[str, str], Pair]) -> None:
    for kind in [one for one in KINDS if one[1] != "subgraph"]:
        for two in zip(*pair(*kind), strict=True):
            got, want = (SHAPES[shape](one) for one in two)
            assert got.canonical_etypes == want.canonical_etypes
            for (name, ask), etype in product(QUERIES.items(), got.canonical_etypes):
                mine, theirs = (answer(ask, one, etype) for one in (got, want))
                torch.testing.assert_close(mine, theirs, msg=partial("{}: {}".format, name))


def answer(ask: Callable, graph: Any, etype: Any) -> Any:
    """What is answered, or with which error."""
    try:
        return ask(graph, etype)
    except (dgl.DGLError, IndexError) as error:
        return [torch.tensor(list(type(error).__name__.encode()))]
