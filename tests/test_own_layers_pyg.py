"""Rows of other ranks for PyG's layers, of several types, of every dtype; and what does not fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.graphs import hetero, mixed
from harness.parts import Cutter
from harness.pyg import compare, sharded, whole
from harness.rows import Part
from harness.rows import whole as rows_of
from harness.threads import run_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric import nn
from torch_geometric.data import Data
from torch_geometric.utils import add_self_loops, scatter

import sar
import sar.pyg
from sar.graph import GraphView

LAYERS: dict[str, Callable[[], Any]] = {
    "SAGE": lambda: nn.SAGEConv(4, 3),
    "SAGE max": lambda: nn.SAGEConv(4, 3, aggr="max"),
    "GAT with loops": lambda: nn.GATConv(4, 3, heads=2),
    "GATv2": lambda: nn.GATv2Conv(4, 3, heads=2, add_self_loops=False),
    "Transformer": lambda: nn.TransformerConv(4, 3, heads=2),
    "GIN": lambda: nn.GINConv(torch.nn.Linear(4, 3)),
    "ResGated": lambda: nn.ResGatedGraphConv(4, 3),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("ranks", "cut"), [(1, "random"), (3, "random"), (4, "adversarial")])
def test_layers_for_two_sides(name: str, ranks: int, cut: str, partitioned: Cutter) -> None:
    torch.manual_seed(0)
    arrays, layer = mixed(), LAYERS[name]().double()

    def on_two_sides(layer: Any, x: Tensor, edges: Any, columns: dict) -> Tensor:
        if not hasattr(edges, "graph"):
            return layer((x, x), edges)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return layer((torch.cat([x, sar.halo(edges, x)]), x), sar.local_edges(edges))

    x = rows_of(arrays.total_nodes, (4,), seed=1)
    want = whole(arrays, layer, on_two_sides, x, {})
    path = partitioned(arrays, ranks, cut)
    compare(want, sharded(path, ranks, layer, on_two_sides, x, {}), 1e-11)


@pytest.mark.parametrize(("ranks", "cut"), [(2, "random"), (4, "adversarial")])
def test_several_types(ranks: int, cut: str, partitioned: Cutter) -> None:
    """Of data, its dict of edge indices, one of them, and DGL's look; rows of each relation."""
    arrays = hetero()
    values = {n: rows_of(count, (3,), seed=2) for n, count in arrays.num_nodes.items()}
    path = partitioned(arrays, ranks, cut)

    def case(group: Any) -> None:
        part = sar.load_partition_data(path)
        data, graph = sar.pyg.construct_full_graph(part), sar.construct_full_graph(part)
        ids = {n: part.node_features[f"{n}/orig_id"].long() for n in values}
        for etype, (src, dst) in arrays.edges.items():
            eids = part.edge_features[":".join(etype) + "/orig_eid"].long()
            x = values[etype[0]][ids[etype[0]]].requires_grad_()
            rows = torch.cat([x, sar.halo(data, x, etype=etype[1])])
            mine = sar.local_edges(data.edge_index_dict, etype=etype)
            assert torch.equal(rows[mine[0]], values[etype[0]][src[eids]])
            assert torch.equal(ids[etype[2]][mine[1]], dst[eids])
            for other in (data[etype].edge_index, graph[etype], GraphView(graph._store, [etype])):
                assert torch.equal(sar.halo(other, x), rows[len(x) :])
                assert torch.equal(sar.local_edges(other), mine)
            out = sar.sum_rounds(
                graph,
                lambda rows, src, dst, _, like: torch.zeros_like(like).index_add(0, dst, rows[src]),
                x,
                values[etype[2]][ids[etype[2]]],
                etype=etype,
            )
            whole = torch.zeros_like(values[etype[2]])
            whole.index_add_(0, dst, values[etype[0]][src])
            torch.testing.assert_close(out, whole[ids[etype[2]]], rtol=1e-12, atol=1e-12)
            (out * (1 + ids[etype[2]]).unsqueeze(1)).sum().backward()
            grads = torch.zeros_like(values[etype[0]])
            grads.index_add_(0, src, (1.0 + dst).unsqueeze(1).expand(-1, 3).double())
            torch.testing.assert_close(x.grad, grads[ids[etype[0]]], rtol=1e-12, atol=1e-12)
        for ntype, count in arrays.num_nodes.items():
            x, wanted = values[ntype][ids[ntype]], torch.arange(count).flip(0)
            assert torch.equal(sar.fetch(data, x, wanted, ntype=ntype), values[ntype][wanted])
            own = graph.nodes[ntype].data["_ID"]
            assert torch.equal(graph.fetch(x, own, ntype=ntype, original=False), x)

    run_threads(ranks, case)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (0,)])
def test_rows_of_every_type(dtype: torch.dtype, shape: tuple, partitioned: Cutter) -> None:
    arrays = mixed()
    values = (rows_of(arrays.total_nodes, shape, seed=1) * 9).to(dtype)
    src, dst = arrays.edges[("_N", "_E", "_N")]
    path = partitioned(arrays, 3, "random")

    def case(group: Any) -> None:
        part = Part(group, path)
        spread = torch.stack([values, values], -1)[part.nodes]
        x = spread.requires_grad_(dtype.is_floating_point)[..., 1]  # not contiguous
        rows = torch.cat([x, sar.halo(part.graph, x)])
        assert rows.dtype == dtype
        assert torch.equal(rows[sar.local_edges(part.graph)[0]], values[src[part.edges]])
        assert torch.equal(
            sar.fetch(part.graph, x, src[:20].view(4, 5)), values[src[:20].view(4, 5)]
        )
        count = sar.sum_rounds(
            part.graph,
            lambda rows, src, dst, _: torch.zeros(len(x)).index_add(0, dst, 1.0 + 0 * src),
            x,
        )
        assert torch.equal(count.long(), part.graph.in_degrees())
        if rows.requires_grad:
            rows.sum().backward()
            one = torch.ones(len(x), dtype=torch.float64).requires_grad_()
            (one.sum() + sar.halo(part.graph, one).sum()).backward()
            times = one.grad.view(-1, *[1] * len(shape)).expand_as(x).to(dtype)
            assert torch.equal(spread.grad[..., 1], times) and not spread.grad[..., 0].any()

    run_threads(3, case)


def test_other_edges_of_the_graph(cut_in_three: str) -> None:
    """Fewer edges, added loops and blocks read their own rows; turned round they are refused."""
    import dgl

    src, dst = mixed().edges[("_N", "_E", "_N")]
    values = rows_of(57, (3,), seed=1)

    def case(group: Any) -> None:
        part = Part(group, cut_in_three)
        index = sar.pyg.construct_full_graph(part.data).edge_index
        x, nodes, eids = part.node_rows(values, grad=False), part.nodes, part.edges
        starts, ends = src[eids], dst[eids]
        no_loops, loops = starts != ends, add_self_loops(index, num_nodes=len(x))[0]
        every = torch.cat([starts, nodes]), torch.cat([ends, nodes])
        edges = [
            (index[:, index[0] != index[1]], (starts[no_loops], ends[no_loops])),
            (loops, every), (dgl.add_self_loop(part.graph), every),
        ]  # fmt: skip
        for some, (begin, end) in edges:
            rows, mine = torch.cat([x, sar.halo(some, x)]), sar.local_edges(some)
            assert torch.equal(rows[mine[0]], values[begin]) and torch.equal(nodes[mine[1]], end)
        seeds = part.graph.ndata["_ID"][::2]
        for block in sar.construct_mfgs(part.data, seeds, 2):
            h = x[block.source_rows("_N")]
            rows, mine = torch.cat([h, sar.halo(block, h)]), sar.local_edges(block)
            sums = (
                torch.zeros(block.num_dst_nodes(), 3).double().index_add(0, mine[1], rows[mine[0]])
            )
            torch.testing.assert_close(sums, block.aggregate(h, "sum"), rtol=1e-12, atol=1e-12)
            with pytest.raises(ValueError, match="graph: got a block"):
                sar.fetch(block, h, torch.arange(1))
        for call in (sar.halo, lambda edges, x: sar.sum_rounds(edges, add, x, x)):
            with pytest.raises(ValueError, match="graph: got edges turned round"):
                call(index.flip(0), x)
        with pytest.raises(ValueError, match="graph: got edges turned round"):
            sar.local_edges(index.flip(0))
        assert torch.equal(sar.fetch(index.flip(0), x, nodes), x)

    run_threads(3, case)


@settings(max_examples=25, deadline=None)
@given(asked=st.lists(st.lists(st.integers(0, 56), max_size=8), min_size=3, max_size=3))
def test_any_ids_on_any_rank(asked: list[list[int]], cut_in_three: str) -> None:
    values = rows_of(57, (2,), seed=1)
    times = torch.bincount(torch.tensor([*asked[0], *asked[1], *asked[2]]).long(), minlength=57)

    def case(group: Any) -> None:
        part = Part(group, cut_in_three)
        x, ids = part.node_rows(values), torch.tensor(asked[group.rank], dtype=torch.int32)
        rows = sar.fetch(part.graph, x, ids)
        assert torch.equal(rows, values[ids])
        rows.sum().backward()
        assert torch.equal(x.grad, times[part.nodes].unsqueeze(1).expand_as(x).double())

    run_threads(3, case)


@pytest.fixture(scope="module")
def cut_in_three(partitioned: Cutter) -> str:
    return partitioned(mixed(), 3, "random")


def add(rows: Tensor, src: Tensor, dst: Tensor, positions: Tensor, x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, dst, rows[src])


def refuse(*_: Any) -> Tensor:
    raise KeyError("a name")


# What rank 1 alone does, or all ranks, to (graph, x): a class of error and words in it.
WRONG: dict[str, tuple[Callable[[Any, Tensor], Any], type[Exception], str]] = {
    "no graph": (lambda g, x: sar.halo(x, x), TypeError, "graph: got Tensor, expected"),
    "plain data": (lambda g, x: sar.halo(Data(x=x), x), TypeError, "graph: got Data"),
    "turned": (lambda g, x: sar.halo(g.reverse(), x), ValueError, "graph: got a reversed"),
    "no tensor": (lambda g, x: sar.halo(g, [1]), TypeError, "x: got list"),
    "lazy": (lambda g, x: sar.halo(g, g.edata["weight"]), TypeError, "x: got EdgeTensor"),
    "complex": (lambda g, x: sar.halo(g, x + 1j), TypeError, "x: got torch.complex128"),
    "sparse": (lambda g, x: sar.halo(g, x.to_sparse()), TypeError, "torch.sparse_coo, expected"),
    "a scalar": (lambda g, x: sar.halo(g, x.sum()), ValueError, "x: got shape (), expected"),
    "a row more": (lambda g, x: sar.halo(g, torch.cat([x, x[:1]])), ValueError, "source rows"),
    "another width": (lambda g, x: sar.halo(g, x[:, 1:]), ValueError, "shape of a row of x"),
    "another type": (lambda g, x: sar.halo(g, x.float()), ValueError, "dtype of x"),
    "a gradient": (
        lambda g, x: sar.halo(g, x.clone().requires_grad_()), ValueError, "x.requires_grad"
    ),
    "etype": (lambda g, x: sar.halo(g, x, etype="buys"), ValueError, "etype: got unknown 'buys'"),
    "no function": (lambda g, x: sar.sum_rounds(g, x, x), TypeError, "part: got Tensor"),
    "others": (lambda g, x: sar.sum_rounds(g, add, x, 3), TypeError, "others[0]: got int"),
    "a part fails": (lambda g, x: sar.sum_rounds(g, refuse, x), KeyError, "a name"),
    "its shape": (
        lambda g, x: sar.sum_rounds(g, lambda *_: x[1:], x), ValueError, "part: returned shape"
    ),
    "its type": (
        lambda g, x: sar.sum_rounds(g, lambda *_: x.long(), x), TypeError, "returned torch.int"
    ),
    "no result": (lambda g, x: sar.sum_rounds(g, lambda *_: None, x), TypeError, "returned None"),
    "it writes": (
        lambda g, x: sar.sum_rounds(g, lambda rows, *_: rows.add_(1)[:1].expand(len(x), -1), x),
        ValueError, "part: wrote into",
    ),
    "it adds itself": (
        lambda g, x: sar.sum_rounds(g, lambda *given: x + add(*given, x), x),
        ValueError, "other numbers than 0 for no edges",
    ),
    "a mean": (
        lambda g, x: sar.sum_rounds(g, lambda r, s, d, _: scatter(r[s], d, 0, len(x), "mean"), x),
        ValueError, "not the sum of its results for halves",
    ),
    "a norm": (
        lambda g, x: sar.sum_rounds(g, lambda r, s, *e: add(r, s, *e, x) / r[s].norm(), x),
        ValueError, "",
    ),
    "ids of numbers": (lambda g, x: sar.fetch(g, x, x[:, 0]), TypeError, "ids: got torch.float64"),
    "lazy ids": (lambda g, x: sar.fetch(g, x, g.edata["weight"]), TypeError, "ids: got"),
    "lazy others": (
        lambda g, x: sar.sum_rounds(g, add, x, g.edata["weight"]), TypeError,
        "others[0]: got EdgeTensor",
    ),
    "a mask": (lambda g, x: sar.fetch(g, x, x[:, 0] > 0), TypeError, "ids: got torch.bool"),
    "below 0": (
        lambda g, x: sar.fetch(g, x, torch.tensor([3, -1])), ValueError, "ids: got -1 to 3"
    ),
    "beyond": (lambda g, x: sar.fetch(g, x, torch.tensor(57)), ValueError, "expected 0 to 56"),
    "no nodes": (
        lambda g, x: sar.fetch(g, x, torch.tensor(57), original=False), ValueError, "expected"
    ),
    "ntype": (
        lambda g, x: sar.fetch(g, x, torch.arange(3), ntype="user"), ValueError, "ntype: got 'user'"
    ),
    "original": (
        lambda g, x: sar.fetch(g, x, torch.arange(3), original=0), TypeError, "original: got int"
    ),
}  # fmt: skip


ONE_ALONE = ("another width", "another type", "a gradient")  # no error where all do it


@pytest.mark.parametrize(
    ("what", "on_all"),
    [(what, on_all) for what in WRONG for on_all in {False, what not in ONE_ALONE}],
)
def test_what_does_not_fit_is_told_on_all_ranks(what: str, on_all: bool, cut_in_three: str) -> None:
    wrong, kind, words = WRONG[what]
    name = "fetch" if "fetch" in str(wrong.__code__.co_names) else "halo"
    name = "sum_rounds" if "sum_rounds" in wrong.__code__.co_names else name

    def case(group: Any) -> None:
        part = Part(group, cut_in_three)
        x = part.node_rows(rows_of(57, (3,), seed=1), grad=False)
        right: dict[str, Callable[[], Any]] = {
            "halo": lambda: sar.halo(part.graph, x),
            "sum_rounds": lambda: sar.sum_rounds(part.graph, add, x, x),
            "fetch": lambda: sar.fetch(part.graph, x, torch.arange(3)),
        }
        with pytest.raises(kind) as caught:
            wrong(part.graph, x) if on_all or group.rank == 1 else right[name]()
        assert words in str(caught.value)
        right[name]()

    run_threads(3, case)


def test_a_part_that_fails_in_backward_is_told_on_all_ranks(cut_in_three: str) -> None:
    def case(group: Any) -> None:
        part, calls = Part(group, cut_in_three), list[int]()
        x = part.node_rows(rows_of(57, (4,), seed=3))

        def fails(*given: Any) -> Tensor:
            calls.append(1)  # 4 to try it, 3 forward
            if group.rank == 1 and len(calls) > 7:
                raise KeyError("second time")
            return add(*given)

        out = sar.sum_rounds(part.graph, fails, x, x)
        with pytest.raises(KeyError, match="rank 1: sum_rounds: .*second time"):
            out.sum().backward()
        assert len(sar.sum_rounds(part.graph, add, x, x)) == len(x)

    run_threads(3, case)
