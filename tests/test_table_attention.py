"""Attention out of a table: the numbers of one process, and the same bits whatever fits into it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import dgl.nn
import harness.pyg
import pytest
import torch
from harness import pyg_hetero, training
from harness.graphs import mixed, mostly_isolated, shop
from harness.parts import Cutter
from harness.rows import Part, join_nodes, results
from harness.rows import whole as whole_rows
from harness.threads import run_threads
from test_pyg_fused import compare as compare_with_pyg
from test_pyg_fused import on
from test_pyg_hetero import MODELS
from test_table_sums import numbers, with_table
from torch import nn

import sar
from sar.errors import SarError
from sar.partition.arrays import GraphArrays

PLENTY = 1 << 26
FEATURES, WIDTH, HEADS = 6, 5, 3
pyg = pytest.importorskip("torch_geometric.nn")


def with_least(size: int, case: Any, *args: Any) -> list[Any]:
    """With the smallest table that runs; each refusal says what one more layer needs."""
    least = 1
    while True:
        try:
            return with_table(size, least, case, *args)
        except SarError as error:
            wanted = re.search(r"table of rows .* at least ([\d,]+),", str(error))
            assert wanted, error
            more = int(wanted[1].replace(",", ""))
            assert more > least
            least = more


DGL = ("GATConv", "GATv2Conv", "DotGatConv", "Shop-GATConv-mean")


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("name", DGL)
def test_training_is_that_of_one_process(name: str, size: int, partitioned: Cutter) -> None:
    """Logits, gradients and five steps of Adam."""
    setting = training.Setting(name, dtype=torch.float64, optimizers=("adam",))
    path = partitioned(setting.sample, size, "adversarial" if size > 1 else "random")
    args = training.case_train, path, setting, training.start_state(setting)
    whole = with_table(size, PLENTY, *args)
    training.check(setting, whole)
    if size != 3:
        return
    for mine, other in zip(numbers(whole), numbers(with_least(size, *args)), strict=True):
        assert torch.equal(mine, other), "heads one by one have other bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_numbers(dtype: torch.dtype, partitioned: Cutter) -> None:
    setting = training.Setting("GATConv", dtype=dtype)
    args = partitioned(setting.sample, 3, "random"), setting, training.start_state(setting)
    training.check(setting, with_table(3, PLENTY, training.case_train, *args))


class Dropped(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        options["allow_zero_in_degree"] = True
        self.layer = kind(FEATURES, WIDTH, HEADS, **options)
        for parameter in self.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(7))

    def forward(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
        return self.layer(graph, x)


def case_dropped(group: Any, path: str, graph: GraphArrays, layer: nn.Module) -> dict:
    part = Part(group, path)
    sar.manual_seed(11)
    total = graph.total_nodes
    x, factor = whole_rows(total, (FEATURES,), 1), whole_rows(total, (HEADS, WIDTH), 2)
    return {
        "nodes": part.nodes,
        **results(part.graph, copy.deepcopy(layer), x[part.nodes], factor[part.nodes]),
    }


def joined(ranks: list[dict], total: int) -> dict[str, torch.Tensor]:
    rows = {name: join_nodes(ranks, name, total) for name in ("out", "x")}
    shares = ranks[0].keys() - rows.keys() - {"nodes"}
    return rows | {name: sum(rank[name] for rank in ranks) for name in shares}


@pytest.mark.parametrize("graph", [mixed, mostly_isolated])
@pytest.mark.parametrize("kind", [dgl.nn.GATConv, dgl.nn.GATv2Conv])
def test_dropped_weights_are_those_of_ranks_side_by_side(
    kind: Any, graph: Callable[[], GraphArrays], partitioned: Cutter
) -> None:
    """With a residual; ranks of another number, one of them, and heads one by one."""
    layer = Dropped(kind, attn_drop=0.4, residual=True).double()
    total = graph().total_nodes

    def found(run: Any, size: int, *most: int) -> dict[str, torch.Tensor]:
        path = partitioned(graph(), size, "random")
        return joined(run(size, *most, case_dropped, path, graph(), layer), total)

    want, bits = found(run_threads, 3), found(with_table, 3, PLENTY)
    for got in (bits, found(with_table, 1, PLENTY), found(with_table, 4, PLENTY)):
        for name, rows in want.items():
            torch.testing.assert_close(got[name], rows, rtol=1e-11, atol=1e-11)
    for name, rows in found(with_least, 3).items():
        assert torch.equal(rows, bits[name]), name


@pytest.mark.parametrize("kind", [dgl.nn.GATConv, dgl.nn.GATv2Conv])
def test_a_result_that_is_written_into_is_computed_again(kind: Any, partitioned: Cutter) -> None:
    layer = Dropped(kind, activation=torch.sigmoid_).double()
    args = case_dropped, partitioned(mixed(), 3, "random"), mixed(), layer
    want, got = run_threads(3, *args), with_table(3, PLENTY, *args)
    for mine, theirs in zip(got, want, strict=True):
        for name, rows in theirs.items():
            torch.testing.assert_close(mine[name], rows, rtol=1e-11, atol=1e-11)


def test_gradients_of_queries_alone(partitioned: Cutter) -> None:
    """Nobody asks for those of the sources."""
    path, layer = partitioned(mixed(), 3, "random"), Dropped(dgl.nn.GATConv).double()
    layer.requires_grad_(False)
    layer.layer.attn_r.requires_grad_()

    def case(group: Any) -> torch.Tensor:
        part, mine = Part(group, path), copy.deepcopy(layer)
        x = whole_rows(mixed().total_nodes, (FEATURES,), 1)[part.nodes]
        mine(part.graph, x).square().sum().backward()
        return mine.layer.attn_r.grad

    for got, want in zip(with_table(3, PLENTY, case), run_threads(3, case), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


OF_PYG: dict[str, Callable[[], nn.Module]] = {
    "one head": lambda: pyg.GATConv(6, 5),
    "heads": lambda: pyg.GATConv(6, 5, heads=3, concat=False, residual=True),
    "a frozen input's width": lambda: pyg.GATConv(6, 2, heads=3, add_self_loops=False),
    "v2": lambda: pyg.GATv2Conv(6, 5, heads=2, residual=True),
    "v2, shared": lambda: pyg.GATv2Conv(6, 5, heads=2, share_weights=True),
    "transformer": lambda: pyg.TransformerConv(6, 5, heads=2, beta=True),
}


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("name", OF_PYG)
def test_layers_of_pyg(
    name: str, size: int, partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(count: int, case: Any) -> list[Any]:
        return with_table(count, PLENTY, case)

    monkeypatch.setattr(harness.pyg, "run_threads", run)
    compare_with_pyg(OF_PYG[name], partitioned, size)


SEVERAL = [one for one in MODELS if one.id in ("gat", "gatv2", "transformer", "sizes", "hgt")]


@pytest.mark.parametrize("make, call, to_all", SEVERAL)
def test_several_types_of_pyg(
    make: Any, call: Any, to_all: bool, partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, path = shop(), partitioned(shop(), 3, "random")
    torch.manual_seed(1)
    model = make((list(arrays.num_nodes), list(arrays.edges))).double()
    call(model, *pyg_hetero.inputs(arrays))  # makes parameters of widths that were not known
    want = pyg_hetero.whole(arrays, model, call)
    monkeypatch.setattr(pyg_hetero, "run_threads", lambda *case: with_table(3, PLENTY, case[1]))
    harness.pyg.compare(want, pyg_hetero.sharded(path, 3, arrays, model, call), 1e-9)


WEIGHTED = {
    "sum": (lambda: pyg.GraphConv(6, 4), "weight"),
    "gcn": (lambda: pyg.GCNConv(6, 9), "weight"),
    "mean": (lambda: pyg.GraphConv(6, 8, aggr="mean"), "weight"),
    "gat with edges": (lambda: pyg.GATConv(6, 5, heads=2, edge_dim=3), "attr"),
}


@pytest.mark.parametrize("most", [PLENTY, None], ids=["plenty", "least"])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_edges(
    name: str, most: int | None, partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, and gradients of the weights."""
    make, column = WEIGHTED[name]

    def run(count: int, case: Any) -> list[Any]:
        return with_least(count, case) if most is None else with_table(count, most, case)

    monkeypatch.setattr(harness.pyg, "run_threads", run)
    compare_with_pyg(make, partitioned, 3, partial(on, column), used=(column,))


def test_explain_says_table(partitioned: Cutter) -> None:
    def case(group: Any, path: str) -> list[str]:
        part = Part(group, path)
        model = dgl.nn.GATConv(FEATURES, WIDTH, HEADS, allow_zero_in_degree=True)
        x = torch.randn(len(part.nodes), FEATURES)
        return [row.implementation for row in sar.explain(model, part.graph, x).rows]

    ways = with_table(2, PLENTY, case, partitioned(mixed(), 2, "random"))
    assert all("table" in rank[0] for rank in ways), ways
