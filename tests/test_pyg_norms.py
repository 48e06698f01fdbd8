"""Norms and poolings of PyG: statistics are those of all ranks' rows, or there is a warning."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from harness import run_threads
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, NUM_FEATURES, GraphArrays, mixed, mostly_isolated
from harness.parts import Cutter, joined
from harness.pyg import compare
from torch import Tensor, nn
from torch_geometric import nn as of_pyg
from torch_geometric.data import Data
from torch_geometric.nn import aggr
from torch_geometric.utils import (
    mask_feature,
    scatter,
    shuffle_node,
    softmax,
    to_dense_batch,
    unbatch,
)

import sar
import sar.pyg
from sar.comm import Group

WIDTH, GRAPHS = NUM_FEATURES, 3
Use = Callable[[Any, Any], Tensor]  # (layer, data): rows of nodes, or of graphs


@cache
def several() -> GraphArrays:
    """Nodes of three graphs and a number that no node has, in no order."""
    graph = mixed()
    columns = dict(graph.node_data[NTYPE_HOMO])
    numbers = torch.randint(GRAPHS, columns["label"].shape, generator=torch.manual_seed(3))
    columns["batch"] = numbers + (numbers > 0)
    return replace(graph, name="several", node_data={NTYPE_HOMO: columns})


def filled(layer: nn.Module) -> nn.Module:
    """With parameters that differ from their first values."""
    generator = torch.Generator().manual_seed(2)
    for parameter in layer.parameters():
        with torch.no_grad():
            parameter.normal_(generator=generator)
    return layer.double()


def found_of(layer: Any, use: Use, data: Any, ids: Tensor, share: float | None) -> dict[str, Any]:
    """Two training calls, of which the last is differentiated, then one in evaluation."""
    layer = layer.train()
    data.x = data.x.double().requires_grad_()
    use(layer, data)
    out = use(layer, data)
    names = ids if share is None else torch.arange(len(out))
    factors = torch.sin(names.double() + 1).view(-1, *[1] * (out.dim() - 1)) + 0.1 * torch.arange(
        out.shape[-1]
    )
    (out * factors).sum().mul(share or 1).backward()
    found = {"output": out.detach(), "input": data.x.grad}
    found |= {f"parameter {name}": p.grad for name, p in layer.named_parameters()}
    found |= {f"buffer {name}": b.double() for name, b in layer.named_buffers()}
    with torch.no_grad():
        found["evaluated"] = use(layer.eval(), data)
    return found


def whole(graph: GraphArrays, layer: Any, use: Use, is_pooled: bool) -> dict[str, Any]:
    columns = graph.node_data[NTYPE_HOMO]
    data = Data(columns["feat"], torch.stack(graph.edges[ETYPE_HOMO]), batch=columns.get("batch"))
    return found_of(
        copy.deepcopy(layer), use, data, torch.arange(data.num_nodes), 1.0 if is_pooled else None
    )


def of_ranks(
    path: str, size: int, layer: Any, use: Use, is_pooled: bool, is_prepared: bool
) -> dict[str, Any]:
    def case(group: Group) -> tuple[dict[str, Any], Tensor]:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        mine = copy.deepcopy(layer)
        if is_prepared:
            mine = sar.prepare(mine, data.edge_index)
        ids, share = data.orig_id.long(), 1 / group.size if is_pooled else None
        return found_of(mine, use, data, ids, share), ids

    found, ids = zip(*run_threads(size, case))
    together: dict[str, Any] = {}
    for name in found[0]:
        pieces = [one[name] for one in found]
        if name.startswith("parameter"):
            together[name] = None if pieces[0] is None else sum(pieces)
        elif name.startswith("buffer") or (is_pooled and name != "input"):
            assert all(torch.equal(piece, pieces[0]) for piece in pieces), f"{name} differs"
            together[name] = pieces[0]
        else:
            together[name] = joined(pieces, ids, sum(map(len, ids)))
    return together


CUTS = ((1, "random"), (3, "random"), (4, "adversarial"))


def check(
    graph: GraphArrays, partitioned: Cutter, layer: nn.Module, use: Use, is_pooled: bool = False,
    is_prepared: bool = True, cuts: Any = CUTS,
) -> None:  # fmt: skip
    """Outputs, gradients, running statistics and evaluation; the last rank of four is empty."""
    want = whole(graph, layer, use, is_pooled)
    for size, method in cuts:
        got = of_ranks(partitioned(graph, size, method), size, layer, use, is_pooled, is_prepared)
        compare(want, got, 1e-9)


def of_x(layer: Any, data: Any) -> Tensor:
    return layer(data.x)


def with_batch(layer: Any, data: Any) -> Tensor:
    return layer(data.x, data.batch)


def with_edges(layer: Any, data: Any) -> Tensor:
    return layer(data.x, data.edge_index)


def statistics() -> dict[str, bool]:
    return {"affine": True, "track_running_stats": True}


NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: of_pyg.BatchNorm(WIDTH),
    "BatchNorm of a single element": lambda: of_pyg.BatchNorm(WIDTH, allow_single_element=True),
    "BatchNorm without memory": lambda: of_pyg.BatchNorm(WIDTH, track_running_stats=False),
    "GraphNorm": lambda: of_pyg.GraphNorm(WIDTH),
    "PairNorm": lambda: of_pyg.PairNorm(2.0),
    "PairNorm of each": lambda: of_pyg.PairNorm(scale_individually=True),
    "LayerNorm": lambda: of_pyg.LayerNorm(WIDTH, eps=0.1),
    "LayerNorm of rows": lambda: of_pyg.LayerNorm(WIDTH, mode="node"),
    "InstanceNorm": lambda: of_pyg.InstanceNorm(WIDTH, **statistics()),
    "MeanSubtractionNorm": of_pyg.MeanSubtractionNorm,
    "GraphSizeNorm": of_pyg.GraphSizeNorm,
    "DiffGroupNorm": lambda: of_pyg.DiffGroupNorm(WIDTH, 4, lamda=1.0),
}
GROUPED = [n for n in NORMS if "Batch" not in n and n not in ("LayerNorm of rows", "DiffGroupNorm")]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GCN of GraphNorm": lambda: of_pyg.GCN(WIDTH, 8, 2, 4, norm="graph_norm", jk="cat"),
    "SAGE of LayerNorm": lambda: of_pyg.GraphSAGE(WIDTH, 8, 2, 4, norm="layer_norm"),
    "GIN of BatchNorm": lambda: of_pyg.GIN(WIDTH, 8, 2, 4, norm="batch_norm"),
    "GAT of means subtracted": lambda: of_pyg.GAT(
        WIDTH, 8, 2, 4, norm=of_pyg.MeanSubtractionNorm(), act="tanh"
    ),
    "GENConv": lambda: of_pyg.GENConv(WIDTH, 5, norm="batch"),
    "DeepGCNLayer": lambda: of_pyg.DeepGCNLayer(
        of_pyg.GCNConv(WIDTH, WIDTH), of_pyg.LayerNorm(WIDTH), nn.ReLU(), block="res+"
    ),
    "messages, BatchNorm": lambda: of_pyg.EdgeConv(of_pyg.MLP([2 * WIDTH, 8, 5])),
    "messages, GraphNorm": lambda: of_pyg.EdgeConv(
        of_pyg.MLP([2 * WIDTH, 8, 5], norm="graph_norm")
    ),
    "messages, LayerNorm": lambda: of_pyg.EdgeConv(
        of_pyg.MLP([2 * WIDTH, 8, 5], norm="layer_norm")
    ),
    "messages, InstanceNorm": lambda: of_pyg.EdgeConv(
        of_pyg.MLP([2 * WIDTH, 8, 5], norm="instance_norm", plain_last=False)
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_prepared_norm_is_that_of_one_process(name: str, partitioned: Cutter) -> None:
    check(mixed(), partitioned, filled(NORMS[name]()), of_x)


@pytest.mark.parametrize("name", MODELS)
def test_norms_inside_of_models(name: str, partitioned: Cutter) -> None:
    """Also those that PyG puts on messages, whose rows are edges."""
    check(mixed(), partitioned, filled(MODELS[name]()), with_edges, cuts=CUTS[1:2])


@pytest.mark.parametrize("is_prepared", [False, True], ids=["as it is", "prepared"])
@pytest.mark.parametrize("name", GROUPED)
def test_norms_of_several_graphs(name: str, is_prepared: bool, partitioned: Cutter) -> None:
    cuts = CUTS[1 + is_prepared :][:1]
    layer = filled(NORMS[name]())
    check(several(), partitioned, layer, with_batch, is_prepared=is_prepared, cuts=cuts)


@pytest.mark.parametrize("kind", [of_pyg.HeteroBatchNorm, of_pyg.HeteroLayerNorm])
def test_norms_by_type(kind: Any, partitioned: Cutter) -> None:
    def use(layer: Any, data: Any) -> Tensor:
        return layer(data.x, (data.x[:, 0] > 0).long() * 2)

    check(mixed(), partitioned, filled(kind(WIDTH, num_types=4)), use)


def test_a_prepared_norm_stays_the_same_module(partitioned: Cutter) -> None:
    """With the same parameters and state, and the name that PyG prints."""

    def case(group: Group, path: str) -> None:
        index = sar.pyg.construct_full_graph(sar.load_partition_data(path)).edge_index
        for make in NORMS.values():
            model = nn.Sequential(make())
            text, keys, parts = repr(model), list(model.state_dict()), list(model.parameters())
            assert sar.prepare(sar.prepare(model, index), index) is model
            assert repr(model[0]).partition("(")[0] == text.partition(": ")[2].partition("(")[0]
            assert list(model.state_dict()) == keys
            assert all(a is b for a, b in zip(model.parameters(), parts, strict=True))
            for layer in model.modules():
                getattr(layer, "reset_running_stats", lambda: None)()

    run_threads(2, case, partitioned(mixed(), 2))


class Pool(nn.Module):
    """A pooling, and a layer that every rank applies to its copy of the rows of graphs."""

    def __init__(self, pool: Any, width: int = WIDTH) -> None:
        super().__init__()
        self.pool, self.last = pool, nn.Linear(width, 3)

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        return torch.tanh(self.last(self.pool(x, batch)))


class Back(Pool):
    """Rows of graphs go back to their nodes: gradients differ from rank to rank."""

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        return torch.tanh(x[:, :3] * super().forward(x, batch)[batch])


def one_step(x: Tensor, batch: Any) -> Tensor:
    return scatter(x * softmax(x, batch), batch, dim=0, reduce="mean")


def some(x: Tensor, batch: Any) -> Tensor:
    return scatter(x[x[:, 0] > 0], batch[x[:, 0] > 0], dim=0, dim_size=4, reduce="sum")


def by_torch(x: Tensor, batch: Any) -> Tensor:
    sizes = torch.bincount(batch, minlength=5).clamp(min=1)
    return x.new_zeros(5, x.shape[1]).index_add_(0, batch, x) / sizes.unsqueeze(1)


def relu_max(x: Tensor, batch: Any) -> Tensor:
    """Many rows have the largest number, 0.5."""
    return of_pyg.global_max_pool(x.clamp(max=0.5), batch)


def whole_numbers(x: Tensor, batch: Any) -> Tensor:
    rows = (10 * x.detach()).long()
    least, most, mean = (scatter(rows, batch, 0, 5, reduce=r) for r in ("min", "max", "mean"))
    return (least + most + mean).double() + scatter(x, batch, 0, 5)


def rounded_max(x: Tensor, batch: Any) -> Tensor:
    """Several rows have the largest number, and each a gradient."""
    return of_pyg.global_max_pool(x.detach().round() + 0.1 + (x - x.detach()), batch)


POOLS: dict[str, Callable[[], nn.Module]] = {
    "add": lambda: Pool(of_pyg.global_add_pool),
    "mean": lambda: Pool(of_pyg.global_mean_pool),
    "max": lambda: Pool(of_pyg.global_max_pool),
    "ties": lambda: Pool(relu_max),
    "shared ties": lambda: Pool(rounded_max),
    "back": lambda: Back(of_pyg.global_mean_pool),
    "back of max": lambda: Back(of_pyg.global_max_pool),
    "functions": lambda: Pool(one_step),
    "some rows": lambda: Pool(some),
    "functions of torch": lambda: Pool(by_torch),
    "SoftmaxAggregation": lambda: Pool(aggr.SoftmaxAggregation(learn=True)),
    "PowerMean": lambda: Pool(lambda x, b: aggr.PowerMeanAggregation(learn=False)(x.abs() + 1, b)),
    "Attentional": lambda: Pool(aggr.AttentionalAggregation(nn.Linear(WIDTH, 1))),
    "Set2Set": lambda: Pool(aggr.Set2Set(WIDTH, 3), 2 * WIDTH),
    "Std": lambda: Pool(aggr.StdAggregation()),
    "whole numbers": lambda: Pool(whole_numbers),
    "several": lambda: Pool(aggr.MultiAggregation(["mean", "max", "std"]), 3 * WIDTH),
    "DeepSets": lambda: Pool(aggr.DeepSetsAggregation(nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH))),
}


@pytest.mark.parametrize("graph", [mixed, several], ids=["one graph", "several"])
@pytest.mark.parametrize("name", POOLS)
def test_poolings_are_those_of_one_process(name: str, graph: Any, partitioned: Cutter) -> None:
    def use(layer: Any, data: Any) -> Tensor:
        zeros = torch.zeros(data.num_nodes, dtype=torch.int64)
        return layer(data.x, zeros if data.batch is None else data.batch)

    is_pooled, cuts = not name.startswith("back"), CUTS[:2] if graph is mixed else CUTS[2:]
    layer = filled(POOLS[name]())
    check(graph(), partitioned, layer, use, is_pooled, is_prepared=False, cuts=cuts)


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "to_dense_batch": lambda x, b: to_dense_batch(x, b),
    "topk": lambda x, b: of_pyg.pool.select.topk.topk(x[:, 0], 0.5, b),
    "add": lambda x, b: b + 1,
    "cumsum": lambda x, b: b.cumsum(0),
    "reduce='mul'": lambda x, b: scatter(x, b, 0, reduce="mul"),
    "unbatch": lambda x, b: unbatch(x, b),
    **{
        name: lambda x, b, name=name, sizes=sizes: getattr(aggr, name)(*sizes)(x, b)
        for name, sizes in {
            "MedianAggregation": (),
            "MulAggregation": (),
            "SortAggregation": (3,),
            "LSTMAggregation": (WIDTH, 4),
            "QuantileAggregation": (0.5,),
            "SetTransformerAggregation": (WIDTH,),
            "GraphMultisetTransformer": (WIDTH, 2),
        }.items()
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_of_batch_is_refused(name: str, partitioned: Cutter) -> None:
    """On every rank, one without nodes too."""

    def case(group: Group, path: str) -> str:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        with pytest.raises(sar.NotSupportedError) as caught:
            REFUSED[name](data.x, data.batch)
        return str(caught.value)

    found = run_threads(3, case, partitioned(mostly_isolated(), 3, "adversarial"))
    assert len(set(found)) == 1 and name in found[0], found


MISTAKES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "GraphNorm": ("GraphNorm(6) normalizes", lambda d: of_pyg.GraphNorm(6)(d.x)),
    "PairNorm": ("PairNorm() normalizes", lambda d: of_pyg.PairNorm()(d.x)),
    "LayerNorm": ("LayerNorm(6, affine=True, mode=graph)", lambda d: of_pyg.LayerNorm(6)(d.x)),
    "InstanceNorm": ("InstanceNorm(6) normalizes", lambda d: of_pyg.InstanceNorm(6)(d.x)),
    "BatchNorm": ("BatchNorm1d(6", lambda d: of_pyg.BatchNorm(6)(d.x)),
    "global_mean_pool": ("global_mean_pool", lambda d: of_pyg.global_mean_pool(d.x, None)),
    "mask_feature": ("mask_feature draws", lambda d: mask_feature(d.x)),
    "shuffle_node": ("shuffle_node draws", lambda d: shuffle_node(d.x)),
    "a plain batch": (
        "global_add_pool by a plain batch",
        lambda d: of_pyg.global_add_pool(d.x, torch.zeros(d.num_nodes, dtype=torch.int64)),
    ),
    "": ("", lambda d: of_pyg.LayerNorm(6, mode="node")(d.x)),
    "in evaluation": ("", lambda d: of_pyg.InstanceNorm(6, track_running_stats=True).eval()(d.x)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_rows_of_one_rank_are_warned_of(name: str, partitioned: Cutter) -> None:
    """Once, by the layer's or function's name, unless there is one rank."""
    expected, call = MISTAKES[name]

    def case(group: Group, path: str) -> None:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        call(data)
        call(data)

    for size in (1, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_threads(size, case, partitioned(mixed(), size))
        texts = [str(one.message) for one in caught if one.category is sar.MistakeWarning]
        if size == 1 or not expected:
            assert texts == []
        else:
            assert texts and all(expected in text for text in texts), texts
            assert len(texts) == (1 if "_" in name or "plain" in name else 2)  # layers
