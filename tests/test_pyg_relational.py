"""Edges of several types: masks, streams that relations share, offsets, dropout."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from harness import run_threads
from harness.graphs import ETYPE_HOMO, mixed, mostly_isolated, shop, typed
from harness.graphs import NUM_FEATURES as WIDTH
from harness.parts import Cutter, load_all
from harness.pyg import compare, sharded, whole
from torch import Tensor
from torch_geometric import nn as pyg

import sar
import sar.pyg
from sar.errors import NotSupportedError

ONCE, STRICT = sar.Policy(rounds=1), sar.Policy(block_bytes=256)
FOLLOWS, BUYS = ("user", "follows", "user"), ("user", "buys", "item")
SHOP = list(shop().num_nodes), list(shop().edges)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Cutter:
    return Cutter(tmp_path_factory.mktemp("parts"))


def on_ranks(path: str, parts: int, case: Callable, policy: Any = None) -> list:
    """``case(data, group)`` of each rank."""

    def run(group: Any) -> Any:
        part = sar.load_partition_data(path)
        return case(sar.pyg.construct_full_graph(part, policy), group)

    return run_threads(parts, run)


# -- layers --------------------------------------------------------------------------------------


def by_type(layer: Any, x: Tensor, edge_index: Tensor, columns: dict) -> Tensor:
    return layer(x, edge_index, columns["type"])


def by_all(layer: Any, x: Tensor, edge_index: Tensor, columns: dict) -> Tensor:
    return layer(
        x, edge_index, (x[:, 0] > 0).long(), columns["type"], columns["weight"].view(-1, 1)
    )


def with_attributes(layer: Any, x: Tensor, edge_index: Tensor, columns: dict) -> Tensor:
    return layer(x, edge_index, columns["type"], columns["weight"].view(-1, 1))


WITHIN = {"attention_mechanism": "within-relation"}
LAYERS = {
    "rgcn": (lambda: pyg.RGCNConv(WIDTH, 5, 11), by_type),  # no edge is of the last types
    "rgcn-sum": (lambda: pyg.RGCNConv(WIDTH, 5, 3, aggr="sum", is_sorted=True), by_type),
    "rgcn-max": (lambda: pyg.RGCNConv(WIDTH, 5, 3, aggr="max"), by_type),
    "rgcn-bases": (lambda: pyg.RGCNConv(WIDTH, 5, 3, num_bases=2), by_type),
    "rgcn-blocks": (lambda: pyg.RGCNConv(WIDTH, 6, 3, num_blocks=2), by_type),
    "fast-rgcn": (lambda: pyg.FastRGCNConv(WIDTH, 5, 4), by_type),
    "fast-rgcn-bases": (lambda: pyg.FastRGCNConv(WIDTH, 5, 3, num_bases=2), by_type),
    "rgat": (lambda: pyg.RGATConv(WIDTH, 5, 3, heads=2), by_type),
    "rgat-within": (lambda: pyg.RGATConv(WIDTH, 5, 3, heads=2, **WITHIN), by_type),
    "rgat-edges": (lambda: pyg.RGATConv(WIDTH, 4, 3, num_blocks=2, edge_dim=1), with_attributes),
    "heat": (lambda: pyg.HEATConv(WIDTH, 5, 2, 3, 4, 1, 4, heads=2), by_all),
    "film": (lambda: pyg.FiLMConv(WIDTH, 5, 3), by_type),
}
SETTINGS = [
    (mixed, 3, "random", STRICT),
    (typed, 4, "adversarial", ONCE),
    (mostly_isolated, 4, "random", STRICT),
    (mixed, 2, "coarsen", ONCE),
]


@pytest.mark.filterwarnings("ignore:.*cannot be streamed")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_typed_edges_are_exact(cut: Cutter, name: str) -> None:
    make, call = LAYERS[name]
    place = list(LAYERS).index(name)
    for dtype, tolerance, shift in ((torch.float64, 1e-9, 0), (torch.float32, 1e-5, 1)):
        graph, parts, method, policy = SETTINGS[(place + shift) % len(SETTINGS)]
        arrays = graph()
        torch.manual_seed(1)
        layer = make().to(dtype)
        x = arrays.node_data["_N"]["feat"].to(dtype)
        columns = {key: arrays.edge_data[ETYPE_HOMO][key] for key in ("type", "weight")}
        columns["weight"] = columns["weight"].to(dtype)
        expected = whole(arrays, layer, call, x, columns)
        got = sharded(cut(arrays, parts, method), parts, layer, call, x, columns, policy)
        compare(expected, got, tolerance)


def relation(index: Tensor) -> Any:
    return index.sharded_graph.sole_relation


def test_masks_are_known_again(cut: Cutter) -> None:
    def case(data: Any, group: Any) -> None:
        index, kinds = data.edge_index, data.type
        first = [relation(index[:, kinds == i]) for i in range(4)]
        before = group.counters.collectives
        with torch.no_grad():
            again = [relation(index[:, kinds == i]) for i in range(4)]
        assert all(a is b for a, b in zip(first, again))
        assert sum(one.num_edges for one in first) == data.num_edges
        asked = group.counters.collectives - before
        assert relation(index[:, kinds == 2]) is first[2]
        assert group.counters.collectives - before == asked, "a known program asks nobody"
        values = (kinds == 1).materialize()
        assert relation(index[:, values]) is first[1]
        values[:] = False
        assert relation(index[:, values]) is not first[1]
        column = torch.arange(data.num_edges) % 2
        for _ in range(2):  # written in place between
            lazy = index.sharded_graph.edge_columns(column)
            assert relation(index[:, lazy == 1]).num_edges == int(column.sum())
            column[1::4] = 0
        kinds[kinds == 1] = 0  # on ranks that have none of this type, too
        assert relation(index[:, kinds == 1]).num_edges_global == 0
        assert relation(index[:, kinds == 2]).num_edges == first[2].num_edges

    on_ranks(cut(typed(), 4, "adversarial"), 4, case)


def test_filtered_edges_go_with_their_column(cut: Cutter) -> None:
    def case(data: Any, group: Any) -> weakref.ref:
        found = relation(data.edge_index[:, data.type.clone() == 1])
        return weakref.ref(found)

    gc.collect()
    gc.disable()  # nothing refers to itself
    try:
        assert all(one() is None for one in on_ranks(cut(typed(), 2), 2, case))
    finally:
        gc.enable()


# -- one stream ----------------------------------------------------------------------------------


def rows_needed(path: str, parts: int, etypes: list) -> int:
    """Rows that all ranks need of others for relations, each once a type."""
    total = 0
    for data in load_all(path, parts):
        for ntype in {etype[0] for etype in etypes}:
            shards = [data.edges[etype] for etype in etypes if etype[0] == ntype]
            for peer in set(range(parts)) - {data.part_id}:
                needed = [s.src[s.offsets[peer] : s.offsets[peer + 1]] for s in shards]
                total += len(torch.cat(needed).unique())
    return total


def sent(data: Any, group: Any, call: Callable) -> int:
    """Bytes of a forward pass whose plans are made."""
    call(data)
    before = group.counters.sent_bytes
    call(data)
    return group.counters.sent_bytes - before  # type: ignore[no-any-return]


PULL = sar.Policy(rounds=1, exchange="pull", constant_inputs="off")


def test_relations_share_a_stream(cut: Cutter) -> None:
    torch.manual_seed(0)
    layer = pyg.RGCNConv(WIDTH, 4, 3)

    def case(data: Any, group: Any) -> int:
        return sent(data, group, lambda d: layer(d.x, d.edge_index, d.type))

    path = cut(mixed(), 3)
    found = on_ranks(path, 3, case, PULL)
    assert sum(found) == rows_needed(path, 3, [ETYPE_HOMO]) * WIDTH * 4


@pytest.mark.parametrize("aggr", ["mean", "sum", "max"])
def test_modules_share_a_stream(cut: Cutter, aggr: str) -> None:
    torch.manual_seed(0)
    kinds = {"mean": ("mean", "sum"), "sum": ("sum", "sum"), "max": ("max", "max")}[aggr]
    layer = pyg.HeteroConv(
        {e: pyg.SAGEConv((WIDTH, WIDTH), 4, aggr=kinds[i % 2]) for i, e in enumerate(SHOP[1])}
    )

    def case(data: Any, group: Any) -> int:
        return sent(data, group, lambda d: layer(d.x_dict, d.edge_index_dict))

    path = cut(shop(), 3)
    found = on_ranks(path, 3, case, PULL)
    assert sum(found) == rows_needed(path, 3, SHOP[1]) * WIDTH * 4


def test_modules_that_share_are_recomputed(cut: Cutter) -> None:
    torch.manual_seed(0)
    inner = pyg.HeteroConv({e: pyg.SAGEConv((WIDTH, WIDTH), WIDTH) for e in SHOP[1]})
    layers = torch.nn.ModuleList([inner, pyg.HANConv(WIDTH, 4, SHOP)]).double()

    def case(data: Any, group: Any) -> None:
        found = []
        for activations in ("keep", "recompute"):
            model = deepcopy(layers)
            sar.set_activations(model, activations)
            x = {t: rows.double().requires_grad_() for t, rows in data.x_dict.items()}
            out = model[1](model[0](x, data.edge_index_dict), data.edge_index_dict)
            sum(rows.square().sum() for rows in out.values()).backward()
            given = [*x.values(), *model.parameters()]
            found.append([one.grad for one in given if one.grad is not None])
        torch.testing.assert_close(*found, rtol=0, atol=0)

    on_ranks(cut(shop(), 3), 3, case)


# -- relations behind each other -----------------------------------------------------------------


def test_offsets_of_edge_indices(cut: Cutter) -> None:
    """As a user writes them: by adding to rows, to both at once, and stacked again."""

    def case(data: Any, group: Any) -> None:
        users = data["user"].num_nodes
        x = torch.cat([data["user"].x, data["item"].x])
        buys, back = data[BUYS].edge_index, data["item", "bought_by", "user"].edge_index
        first = buys.clone()
        first[1] += users
        second = back + torch.tensor([[users], [0]])
        row, col = data[FOLLOWS].edge_index
        layer, found = pyg.SimpleConv("sum"), []
        for third in (torch.stack([row + 0, col + 0]), data[FOLLOWS].edge_index):
            whole_index = torch.cat([first, second, third], dim=1)
            found.append(layer(x, whole_index))
        assert buys.shifts is None and data[BUYS].edge_index is buys
        in_turn = [pyg.SimpleConv("sum")((data[e[0]].x, data[e[2]].x), data[e].edge_index)
                   for e in (BUYS, back_of(BUYS), FOLLOWS)]  # fmt: skip
        expected = torch.cat([in_turn[1] + in_turn[2], in_turn[0]])
        edges = [int(data[e].num_edges) for e in (BUYS, back_of(BUYS), FOLLOWS)]
        assert int(whole_index.size(1)) == sum(edges)
        for out in found:
            torch.testing.assert_close(out, expected)

    def back_of(etype: tuple) -> tuple:
        return "item", "bought_by", "user"

    on_ranks(cut(shop(), 4, "adversarial"), 4, case)


WRONG = {
    "alone": (lambda a, b: pyg.SimpleConv()(torch.zeros(3, 2), a + torch.tensor([[1], [2]])),
              "torch.cat"),
    "types": (lambda a, b: torch.cat([a, b], 1), "rows of 'item' are .* those of 'user'"),
    "flipped": (lambda a, b: torch.cat([a, a.flip(0)], 1), "some of them flipped"),
    "float": (lambda a, b: a + 0.5, "addition of a float"),
    "ends": (lambda a, b: a[0] + a[1], "addition of a EdgeEnd"),
    "mask": (lambda a, b: a[0] + torch.tensor(True), "addition of a Tensor"),
    "other": (lambda a, b: a.__setitem__(0, b[0]), r"expected index\[i\] \+= n"),
    "plain": (lambda a, b: torch.cat([a, torch.zeros(2, 3, dtype=torch.long)], 1), "cat of"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_offsets_are_refused(cut: Cutter, name: str) -> None:
    def case(data: Any, group: Any) -> None:
        call, message = WRONG[name]
        indices = [data[e].edge_index.clone() for e in (BUYS, ("item", "bought_by", "user"))]
        with pytest.raises(NotSupportedError, match=message):
            call(*indices)

    on_ranks(cut(shop(), 3), 3, case)


# -- dropout -------------------------------------------------------------------------------------


class Drop(pyg.MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x_j, 0.5)


class Dropping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = Drop()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


@pytest.mark.parametrize("kind", ["han", "bases"])
def test_dropout_does_not_depend_on_the_cut(cut: Cutter, kind: str) -> None:
    torch.manual_seed(1)
    if kind == "han":
        model: Any = pyg.HANConv(WIDTH, 4, SHOP, heads=2, dropout=0.5)
    else:
        model = pyg.to_hetero_with_bases(Dropping(), SHOP, num_bases=1)
        for parameter in model.parameters():  # bases are memory that nobody has filled
            torch.nn.init.uniform_(parameter)

    def case(data: Any, group: Any) -> list:
        sar.manual_seed(5)
        x = {ntype: rows.double() for ntype, rows in data.x_dict.items()}
        out = deepcopy(model).double()(x, data.edge_index_dict)
        return [(out[t].detach(), data[t].n_id) for t in sorted(out)]

    graph, results = shop(), []
    for parts in (1, 3):
        ranks = on_ranks(cut(graph, parts), parts, case)
        results.append([
            torch.cat([rows for rows, _ in one])[torch.cat([ids for _, ids in one]).argsort()]
            for one in zip(*ranks)
        ])  # fmt: skip
    for one, three in zip(*results):
        torch.testing.assert_close(one, three, rtol=0, atol=1e-12)
