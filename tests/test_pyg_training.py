"""PyG's models trained on ranks: the losses and parameters of one process, and dropout masks that
do not know of the cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from harness import run_threads
from harness.graphs import (
    ETYPE_HOMO,
    NTYPE_HOMO,
    NUM_CLASSES,
    NUM_FEATURES,
    GraphArrays,
    hetero,
    mixed,
)
from harness.parts import Cutter, joined
from harness.rows import made
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric import nn as of_pyg
from torch_geometric.utils import dropout_adj, dropout_edge, dropout_node

import sar
import sar.pyg
from sar.comm import Group

WIDTH, HIDDEN = NUM_FEATURES, 8
Model = Callable[[], nn.Module]


class Own(nn.Module):
    """A user's forward with functions between layers, as PyG's examples are written."""

    def __init__(self) -> None:
        super().__init__()
        self.first = of_pyg.GCNConv(WIDTH, HIDDEN)
        self.second = of_pyg.GATConv(HIDDEN, 4, heads=2, dropout=0.4)
        self.last = of_pyg.MLP([8, 8, NUM_CLASSES], dropout=0.3, norm=None)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        x = F.dropout(x, p=0.3, training=self.training)
        x = F.dropout(self.first(x, edge_index).tanh(), training=self.training)
        return self.last(self.second(x, edge_index))


class Pooled(nn.Module):
    """Dropout of rows that stand for the whole graph, and of rows in another order of axes."""

    def forward(self, x: Tensor, edge_index: Any, batch: Any) -> Tensor:
        mean = F.dropout(of_pyg.global_mean_pool(x, batch), training=self.training)
        return x + mean + F.dropout(x.t(), training=self.training).t()


DROPPED: dict[str, Model] = {
    "own": Own,
    "GCN": lambda: of_pyg.GCN(WIDTH, HIDDEN, 3, NUM_CLASSES, dropout=0.5, norm="batch_norm"),
    "GAT": lambda: of_pyg.GAT(WIDTH, HIDDEN, 2, NUM_CLASSES, heads=2, dropout=0.5, jk="cat"),
    "GATv2": lambda: of_pyg.GAT(WIDTH, HIDDEN, 2, NUM_CLASSES, v2=True, dropout=0.5),
    "TransformerConv": lambda: of_pyg.TransformerConv(WIDTH, 4, heads=2, dropout=0.5),
    "EdgeConv": lambda: of_pyg.EdgeConv(of_pyg.MLP([2 * WIDTH, 8, 4], dropout=0.5, norm=None)),
}


def of_ranks(path: str, size: int, model: nn.Module, call: Any) -> tuple[Tensor, Tensor]:
    """A training call with the seed of three: rows by original id, and the input's gradient."""

    def case(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        mine = sar.prepare(copy.deepcopy(model), data.edge_index).train()
        x = data.x.double().requires_grad_()
        sar.manual_seed(3)
        out = call(mine, x, data)
        out.square().sum().backward()
        return out.detach(), x.grad, data.orig_id.long()

    rows, grads, ids = zip(*run_threads(size, case))
    total = sum(map(len, ids))
    return joined(rows, ids, total), joined(grads, ids, total)


@pytest.mark.parametrize("name", DROPPED)
def test_dropout_does_not_know_of_the_cut(name: str, partitioned: Cutter) -> None:
    """Functions and modules between layers, of attention with loops, and in messages."""
    model = made(DROPPED[name])

    def call(mine: Any, x: Tensor, data: Any) -> Tensor:
        return mine(x, data.edge_index)

    want = of_ranks(partitioned(mixed(), 1), 1, model, call)
    assert (want[0] != made(DROPPED[name]).eval()(*whole_inputs())).any(), "nothing was dropped"
    for size, method in ((2, "adversarial"), (4, "random")):
        got = of_ranks(partitioned(mixed(), size, method), size, model, call)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


class Typed(nn.Module):
    """Nodes of several types: functions, norms and attention of each."""

    def __init__(self) -> None:
        super().__init__()
        kinds = list(hetero().edges)
        first = {kind: of_pyg.SAGEConv((WIDTH, WIDTH), 8) for kind in kinds}
        self.kinds = [kind for kind in kinds if kind[0] != "tag"]
        last = {
            kind: of_pyg.GATConv((8, 8), 4, dropout=0.3, add_self_loops=False)
            for kind in self.kinds
        }
        self.first, self.last = of_pyg.HeteroConv(first), of_pyg.HeteroConv(last)
        norms = {name: of_pyg.GraphNorm(8) for name in hetero().num_nodes}
        self.norms = nn.ModuleDict(norms)

    def forward(self, x: dict, edges: dict) -> dict:
        x = {name: F.dropout(rows, 0.3, self.training) for name, rows in x.items()}
        x = {name: self.norms[name](rows).relu() for name, rows in self.first(x, edges).items()}
        x = {name: F.dropout(rows, training=self.training) for name, rows in x.items()}
        return self.last(x, {kind: edges[kind] for kind in self.kinds})


@pytest.mark.filterwarnings("ignore:There exist node types")
def test_dropout_of_several_types(partitioned: Cutter) -> None:
    model = made(Typed)

    def of_types(size: int, method: str) -> dict[str, Tensor]:
        def case(group: Group, path: str) -> tuple[dict, dict]:
            data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
            mine = sar.prepare(copy.deepcopy(model), data)
            sar.manual_seed(4)
            rows = {name: rows.double() for name, rows in data.x_dict.items()}
            out = mine(rows, data.edge_index_dict)
            return {n: r.detach() for n, r in out.items()}, {n: data[n].orig_id for n in out}

        ranks = run_threads(size, case, partitioned(hetero(), size, method))
        ids = {name: [own[name].long() for _, own in ranks] for name in ranks[0][0]}
        return {n: joined([r[n] for r, _ in ranks], i, sum(map(len, i))) for n, i in ids.items()}

    want = of_types(1, "random")
    for size, method in ((2, "random"), (3, "adversarial")):
        torch.testing.assert_close(of_types(size, method), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("way", ["recompute", "offload"])
def test_masks_are_the_same_where_activations_are_not_kept(way: str, partitioned: Cutter) -> None:
    model = made(Own)

    def call(mine: Any, x: Tensor, data: Any) -> Tensor:
        return mine(x, data.edge_index)

    def without(mine: Any, x: Tensor, data: Any) -> Tensor:
        sar.set_activations(mine, way)
        return call(mine, x, data)

    want = of_ranks(partitioned(mixed(), 1), 1, model, call)
    got = of_ranks(partitioned(mixed(), 2), 2, model, without)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def whole_inputs() -> tuple[Tensor, Tensor]:
    graph = mixed()
    return graph.node_data[NTYPE_HOMO]["feat"].double(), torch.stack(graph.edges[ETYPE_HOMO])


def test_dropout_of_graphs_and_of_turned_rows(partitioned: Cutter) -> None:
    def call(mine: Any, x: Tensor, data: Any) -> Tensor:
        return mine(x, data.edge_index, data.batch)

    want, _ = of_ranks(partitioned(mixed(), 1), 1, Pooled(), call)
    got, _ = of_ranks(partitioned(mixed(), 3), 3, Pooled(), call)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_masks_are_the_same_bits(partitioned: Cutter) -> None:
    """Of nodes and of attention: the zeros are where they were."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = of_pyg.GATConv(WIDTH, 3, dropout=0.5)

        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            ones = F.dropout(torch.ones_like(x), training=self.training)
            rows, (_, weights) = self.conv(x, edge_index, return_attention_weights=True)
            return ones

    def call(mine: Any, x: Tensor, data: Any) -> Tensor:
        return mine(x, data.edge_index) + 0 * x

    found = [
        of_ranks(partitioned(mixed(), size), size, made(Bare), call)[0] for size in (1, 2, 3, 4)
    ]
    assert 0.2 < (found[0] == 0).double().mean() < 0.8
    assert all(torch.equal(found[0], one) for one in found)


class Fewer(nn.Module):
    """Layers over the edges that one of PyG's functions keeps, with their columns."""

    def __init__(self, drop: Any) -> None:
        super().__init__()
        self.drop, self.conv = drop, of_pyg.GCNConv(WIDTH, 3)

    def forward(self, x: Tensor, edge_index: Any, weight: Any) -> Tensor:
        return self.conv(x, *self.drop(self, edge_index, weight))


def some_edges(self: Any, index: Any, weight: Any) -> Any:
    index, mask = dropout_edge(index, p=0.4, training=self.training)
    return index, weight[mask]


def some_nodes(self: Any, index: Any, weight: Any) -> Any:
    index, mask, nodes = dropout_node(index, p=0.3, training=self.training)
    assert self.training or nodes.all()
    return index, weight[mask]


FEWER = {
    "dropout_edge": some_edges,
    "dropout_node": some_nodes,
    "dropout_adj": lambda self, i, w: dropout_adj(i, w, p=0.4, training=self.training),
}


@pytest.mark.parametrize("name", FEWER)
def test_dropped_edges_do_not_know_of_the_cut(name: str, partitioned: Cutter) -> None:
    """Nor in evaluation, where all are kept; each call drops others."""
    model = made(lambda: Fewer(FEWER[name]))

    def call(mine: Any, x: Tensor, data: Any) -> Tensor:
        weight = data.weight.double()
        first, second = mine(x, data.edge_index, weight), mine(x, data.edge_index, weight)
        evaluated = mine.eval()(x, data.edge_index, weight)
        return torch.cat([first, second, evaluated], 1)

    want = of_ranks(partitioned(mixed(), 1), 1, model, call)
    assert (want[0][:, :3] != want[0][:, 3:6]).any(), "both calls drop the same"
    x, index = whole_inputs()
    weight = mixed().edge_data[ETYPE_HOMO]["weight"].double()
    torch.testing.assert_close(want[0][:, 6:], model.conv(x, index, weight).detach())
    for size in (2, 3):
        got = of_ranks(partitioned(mixed(), size, "adversarial"), size, model, call)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_both_directions_of_edges_are_not_dropped_together(partitioned: Cutter) -> None:
    def case(group: Group, path: str) -> None:
        index = sar.pyg.construct_full_graph(sar.load_partition_data(path)).edge_index
        with pytest.raises(sar.NotSupportedError, match="dropout_edge: got force_undirected"):
            dropout_edge(index, force_undirected=True)
        with pytest.raises(sar.NotSupportedError, match="relabel_nodes"):
            dropout_node(index, relabel_nodes=True)
        with pytest.raises(ValueError, match="p=2"):
            dropout_edge(index, 2)

    run_threads(2, case, partitioned(mixed(), 2))


def test_rows_that_ranks_have_not_alike_are_refused(partitioned: Cutter) -> None:
    class Some(nn.Module):
        def forward(self, x: Tensor, edge_index: Any, count: int) -> Tensor:
            return F.dropout(x[:count], training=self.training)

    def case(group: Group, path: str) -> None:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        mine = sar.prepare(Some(), data.edge_index)
        with pytest.raises(ValueError, match="sar.nn.Dropout"):
            mine(data.x, data.edge_index, 3 + group.rank)

    run_threads(3, case, partitioned(mixed(), 3))


def test_a_model_that_is_not_prepared_draws_as_torch(partitioned: Cutter) -> None:
    def case(group: Group, path: str) -> None:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        model = nn.Dropout(0.5)
        torch.manual_seed(5)
        got = model(data.x)
        torch.manual_seed(5)
        assert torch.equal(got, nn.Dropout(0.5)(data.x)) and group.seeds.count == 0

    run_threads(1, case, partitioned(mixed(), 1))


def test_what_is_recomputed_needs_the_same_masks(partitioned: Cutter) -> None:
    """An error, or ``context_fn=sar.nn.same_dropout``."""

    class Again(Own):
        options: dict[str, Any] = {}

        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            def inner(x: Tensor) -> Tensor:
                return F.dropout(self.first(x, edge_index).tanh(), training=self.training)

            return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False, **self.options)

    def call(mine: Any, x: Tensor, data: Any) -> Tensor:
        return mine(x, data.edge_index)

    path, model = partitioned(mixed(), 2), made(Again)
    with pytest.raises(sar.SarError, match="same_dropout"):
        of_ranks(path, 2, model, call)
    model.options = {"context_fn": sar.nn.same_dropout}
    want = of_ranks(partitioned(mixed(), 1), 1, model, call)
    torch.testing.assert_close(of_ranks(path, 2, model, call), want, rtol=1e-10, atol=1e-10)


# -- training ------------------------------------------------------------------------------------


def stack(kind: Any, **options: Any) -> Model:
    return lambda: kind(WIDTH, HIDDEN, 3, NUM_CLASSES, **options)


DEGREES = torch.bincount(mixed().edges[ETYPE_HOMO][1].bincount())
PNA = {"aggregators": ["mean", "min", "max", "std"], "scalers": ["identity", "amplification"]}
TRAINED: dict[str, Model] = {
    "GCN": stack(of_pyg.GCN, jk="cat", norm="batch_norm"),
    "GCN, lstm": stack(of_pyg.GCN, jk="lstm", norm="graph_norm", act="elu"),
    "GAT": stack(of_pyg.GAT, heads=2, jk="max", act="elu", norm="layer_norm"),
    "GATv2": stack(of_pyg.GAT, heads=4, v2=True, norm="pair_norm"),
    "GraphSAGE": stack(of_pyg.GraphSAGE, jk="last", norm="instance_norm", act_first=True),
    "GraphSAGE, max": stack(of_pyg.GraphSAGE, aggr="max", act="tanh"),
    "PNA": lambda: of_pyg.PNA(WIDTH, HIDDEN, 2, NUM_CLASSES, deg=DEGREES, **PNA),
    "GIN": stack(of_pyg.GIN, train_eps=True, jk="cat"),
}


@cache
def graph() -> GraphArrays:
    """With labels that follow from the features, which can be learned."""
    one = mixed()
    columns = dict(one.node_data[NTYPE_HOMO])
    columns["label"] = columns["feat"][:, :NUM_CLASSES].argmax(1)
    return replace(one, name="learned", node_data={NTYPE_HOMO: columns})


def epochs(model: Any, forward: Callable[[], Tensor], loss_of: Any, gather: Any) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = loss_of(F.cross_entropy, forward())
        loss.backward()
        gather(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", TRAINED)
def test_ten_epochs_are_those_of_one_process(name: str, partitioned: Cutter) -> None:
    model, columns = made(TRAINED[name]), graph().node_data[NTYPE_HOMO]
    alone, mask = copy.deepcopy(model), columns["train_mask"].bool()
    inputs = whole_inputs()
    want = epochs(
        alone,
        lambda: alone(*inputs),
        lambda loss, out: loss(out[mask], columns["label"][mask]),
        lambda net: None,
    )
    assert want[-1] < want[0]

    def case(group: Group, path: str) -> tuple[list[float], dict[str, Tensor]]:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        mine = sar.prepare(copy.deepcopy(model), data.edge_index)
        x, mask = data.x.double(), data.train_mask.bool()
        losses = epochs(
            mine,
            lambda: mine(x, data.edge_index),
            lambda loss, out: sar.global_mean(loss(out, data.y, reduction="none"), mask),
            sar.gather_grads,
        )
        return losses, {n: p.detach() for n, p in mine.named_parameters()}

    size, method = ((2, "adversarial"), (3, "random"))[list(TRAINED).index(name) % 2]
    for losses, parameters in run_threads(size, case, partitioned(graph(), size, method)):
        torch.testing.assert_close(losses, want, rtol=1e-9, atol=1e-9)
        for key, parameter in alone.named_parameters():
            torch.testing.assert_close(parameters[key], parameter, rtol=1e-8, atol=1e-9)
