"""PyG's layers, bound to the fused functions of :mod:`sar.layers`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from sar.frontends.pyg.index import ShardedEdgeIndex
from sar.kernels import has
from sar.layers.attending import input_travels
from sar.layers.gat import gat
from sar.layers.gatv2 import gatv2
from sar.layers.gcn import Degrees, gcn
from sar.layers.gin import gin_sum
from sar.layers.sage import all_by_columns, sage_mean
from sar.layers.sage_columns import sage_mean_by_columns
from sar.models.choice import (
    DTYPES,
    Adapter,
    Arguments,
    Run,
    fingerprint,
    inputs_reason,
    linear_reason,
    may_donate,
    options_of,
)
from sar.ops.saving import any_rank, compute_once


class MessageAdapter(Adapter):
    """An adapter of a class whose messages are methods, of which PyG generates some."""

    def _compared(self, kind: type, forward: Callable[..., Any]) -> str | None:
        for name, known in _GENERATED.items():
            if name == "propagate" or "edge_update" in self.code:
                if fingerprint(_written(kind, name)) not in known:
                    return f"the code of {kind.__name__}.{name} is not that of a known version"
        return super()._compared(kind, forward)


def _written(kind: type, name: str) -> Any:
    """The method that a class, or a base, has in its source: not what was generated of it."""
    for base in kind.__mro__:
        own, method = vars(base), vars(base).get(name)
        made = own.get(f"_jinja_{name}") is method and own.get(f"_orig_{name}") is not method
        if method is not None and not made:
            return method
    return None


_GENERATED = {"propagate": ("c2e7c091d7a3bf44",), "edge_updater": ("9760a8c92062f402",)}
_MESSAGES = {"aggregate": ("12a5962c99a2d4a1",), "update": ("575c81c31eca8182",)}
_ROW_OF_SOURCE = ("918cfcee19e92335",)  # message: x_j
_WEIGHTED = ("5dc7b82e26d6b4de",)  # x_j, or times the weight of the edge
_PARTS = {
    "Linear": Adapter(lambda *_: "", {"forward": ("f052ea877fb1ed78",)}),
    "SumAggregation": Adapter(lambda *_: "", {"forward": ("0a8d845ae98e5f9f",)}),
    "MeanAggregation": Adapter(lambda *_: "", {"forward": ("0b43ab2992d13da5",)}),
    "MaxAggregation": Adapter(lambda *_: "", {"forward": ("cd85f20fec13b409",)}),
    "MinAggregation": Adapter(lambda *_: "", {"forward": ("969adf5edfb3423b",)}),
}

# -- reasons -------------------------------------------------------------------------------------


def _reason(layer: Any, graph: Any, inputs: Arguments, linears: tuple[str, ...]) -> str | None:
    """Why a call is not that of plain rows of nodes over edges as they are."""
    edges, x, given = inputs["edge_index"], inputs["x"], layer.__dict__
    relation = graph.sole_relation
    if relation is not None and relation.num_src != relation.num_dst:
        return "there are more rows of sources than of destinations"
    if not isinstance(edges, ShardedEdgeIndex):
        return f"edges are a {type(edges).__name__}"
    if (layer.flow == "source_to_target") != (edges.order == "uv"):
        return "messages go from destinations to sources"
    if layer.node_dim not in (-2, 0) or inputs.get("size") is not None:
        return "it has a node_dim, or gets a size"
    if isinstance(x, (tuple, list)):
        return "sources and destinations have rows of their own"
    for name in ("edge_weight", "edge_attr"):
        if inputs.get(name) is not None:
            return f"edges have values: {name}"
    if inputs.get("return_attention_weights") is not None:
        return "return_attention_weights asks for the weights of the edges"
    if layer.explain or layer.decomposed_layers != 1 or not _OVERRIDES.isdisjoint(given):
        return "it explains, decomposes, or has methods of its own"
    if any([given.get(name) for name in _HOOKS]):
        return "a hook looks into its messages"
    return _linear_reason(layer, *linears)


_OVERRIDES = {"message", "aggregate", "update", "propagate", "edge_update", "edge_updater"}
_HOOKS = [
    f"_{name}_forward{when}_hooks"
    for name in ("propagate", "message", "aggregate", "edge_update")
    for when in ("", "_pre")
]


def _linear_reason(layer: Any, *names: str) -> str | None:
    """Why parts of a layer are not PyG's linear layers as they came."""
    if (reason := linear_reason(layer)) is not None:
        return reason
    for name in names:
        part = getattr(layer, name)
        if not _is_plain(part, "Linear"):
            return f"{name} is a {type(part).__name__} with code of its own"
        if is_lazy(part.weight):
            return f"{name} has no weight before its first call"
    return None


def _is_plain(part: Any, name: str) -> bool:
    """Whether a part of a layer is of PyG's class of that name, with its code."""
    kind = type(part)
    if kind.__name__ != name or not kind.__module__.startswith("torch_geometric.nn."):
        return False
    return "forward" not in part.__dict__ and _PARTS[name].changed(kind, kind.forward) is None


def _op(layer: Any) -> str | None:
    """``"sum"`` or ``"mean"``, if the layer's aggregation is one of them as it came."""
    ops = {"SumAggregation": "sum", "MeanAggregation": "mean"}
    name = type(layer.aggr_module).__name__
    return ops.get(name) if name in ops and _is_plain(layer.aggr_module, name) else None


# -- the order of products and sums --------------------------------------------------------------


def _all_fused(graph: Any, narrower: bool, fused: bool) -> bool:
    """Whether rows are multiplied and summed in the other order than the layer's own code has, as
    all ranks compute the layer as a whole and rows that travel are ``narrower`` then; collective
    where they are."""
    if not narrower or graph.group.size == 1:
        return narrower and fused
    return not compute_once(lambda: any_rank(graph.group, not fused))


def _weight(layer: Any, name: str) -> Tensor | None:
    """The weight of a linear part, [columns that it gives, columns that it gets], if it has one."""
    weight = getattr(getattr(layer, name, None), "weight", None)
    is_one = isinstance(weight, Tensor) and not is_lazy(weight) and weight.dim() == 2
    return weight if is_one else None


def _widening(layer: Any, name: str) -> int:
    """How many columns more a linear part gives than it gets; 0 where it has no weight."""
    weight = _weight(layer, name)
    return 0 if weight is None else weight.shape[0] - weight.shape[1]


# -- SAGEConv and GraphConv of sums and means ----------------------------------------------------

_SAGE, _GRAPH = ("lin_r", "lin_l"), ("lin_root", "lin_rel")  # of own rows, of neighbors'


def _bind_sage(names: tuple[str, str], layer: Any, graph: Any, inputs: Arguments) -> Run | str:
    op, x = _op(layer), inputs["x"]
    if op is None:
        return f"the aggregation {layer.aggr!r} has no fused form"
    if getattr(layer, "project", False) or not getattr(layer, "root_weight", True):
        return "it projects rows of sources, or does without own rows"
    reason = _reason(layer, graph, inputs, names)
    if reason is not None:
        return reason
    own, neigh = getattr(layer, names[0]), getattr(layer, names[1])
    reason = inputs_reason(graph, x, *own.parameters(), *neigh.parameters())
    if reason is not None:
        return reason
    if own is neigh or own.bias is not None:
        return f"{names[0]} has a bias, or is {names[1]}"
    if not own.weight.shape == neigh.weight.shape == (len(own.weight), x.shape[1]):
        return "weights do not fit the rows"
    return partial(_sage, layer, graph, x, own, neigh, op)


def _sage(
    layer: Any, graph: Any, x: Tensor, own: Any, neigh: Any, op: str, agreed: tuple[bool, bool]
) -> Tensor:
    by_columns, product_first = agreed
    x, given = x.contiguous(), {} if by_columns else {"op": op}
    function: Callable[..., Tensor] = sage_mean_by_columns if by_columns else sage_mean
    z = function(
        graph.sole_relation, x, own.weight, neigh.weight, neigh.bias, graph.policy,
        sum_first=not product_first, donate=may_donate(layer, x), **given,
    )  # fmt: skip
    return F.normalize(z, p=2.0, dim=-1) if getattr(layer, "normalize", False) else z


def _agree_sage(
    name: str, layer: Any, graph: Any, inputs: Arguments, fused: bool
) -> tuple[bool, bool]:
    if graph.sole_relation is None:
        return False, False
    mean = fused and _op(layer) == "mean"
    by_columns = all_by_columns(graph.group, graph.policy, inputs.get("x"), mean)
    return by_columns, _all_fused(graph, _widening(layer, name) < 0, fused)


_REDUCTIONS = {"SumAggregation": "sum", "MeanAggregation": "mean", "MaxAggregation": "max",
            "MinAggregation": "min"}  # fmt: skip


def _reduces(layer: Any) -> str | None:
    """How a layer reduces the rows it is given; ``None`` where it makes others of them first."""
    name = type(layer.aggr_module).__name__
    is_plain = name in _REDUCTIONS and _is_plain(layer.aggr_module, name)
    return _REDUCTIONS[name] if is_plain and not getattr(layer, "project", False) else None


# -- GCNConv -------------------------------------------------------------------------------------

_BOTH = Degrees("in", -0.5, empty=0.0)


def _bind_gcn(layer: Any, graph: Any, inputs: Arguments) -> Run | str:
    if layer.improved or layer.cached or not layer.normalize:
        return "improved, cached or normalize=False has no fused form"
    if _op(layer) != "sum":
        return f"the aggregation {layer.aggr!r} has no fused form"
    reason = _reason(layer, graph, inputs, ("lin",))
    if reason is not None:
        return reason
    x, weight, bias = inputs["x"], layer.lin.weight, layer.bias
    reason = inputs_reason(graph, x, *(one for one in (weight, bias) if one is not None))
    if reason is not None:
        return reason
    if layer.lin.bias is not None or weight.shape[1] != x.shape[1]:
        return "lin has a bias, or does not fit the rows"
    if bias is not None and tuple(bias.shape) != (len(weight),):
        return "the bias does not fit the rows"
    return partial(_gcn, layer, graph, x)


def _gcn(layer: Any, graph: Any, x: Tensor, sum_first: bool) -> Tensor:
    x = x.contiguous()
    return gcn(
        _relation(layer, graph), x, layer.lin.weight.t(), layer.bias, graph.policy, src=_BOTH,
        dst=_BOTH, weight_first=not sum_first, donate=may_donate(layer, x),
    )  # fmt: skip


def _agree_gcn(layer: Any, graph: Any, inputs: Arguments, fused: bool) -> bool:
    if graph.sole_relation is None:
        return False
    return _all_fused(graph, _widening(layer, "lin") > 0, fused)


def _relation(layer: Any, graph: Any) -> Any:
    """The edges of a layer, with one loop at every node if it adds them; collective at first."""
    return (graph.with_own_loops() if layer.add_self_loops else graph).sole_relation


# -- GINConv -------------------------------------------------------------------------------------


def _bind_gin(layer: Any, graph: Any, inputs: Arguments) -> Run | str:
    op, x = _op(layer), inputs["x"]
    if op is None:
        return f"the aggregation {layer.aggr!r} has no fused form"
    reason = _reason(layer, graph, inputs, ()) or inputs_reason(graph, x, layer.eps)
    if reason is None and tuple(layer.eps.shape) != (1,):
        reason = "eps is not one number"
    return partial(_gin, layer, graph, x, op) if reason is None else reason


def _gin(layer: Any, graph: Any, x: Tensor, op: str) -> Tensor:
    x = x.contiguous()
    donate = may_donate(layer, x)
    return layer.nn(gin_sum(graph.sole_relation, x, layer.eps, graph.policy, op=op, donate=donate))


# -- GATConv and GATv2Conv -----------------------------------------------------------------------


def _bind_attention(
    run: Callable[..., Tensor], linears: tuple[str, ...], layer: Any, graph: Any, inputs: Arguments
) -> Run | str:
    """``linears`` make values and queries."""
    x = inputs["x"]
    if any([getattr(layer, name) is None for name in linears]):
        return "sources and destinations have projections of their own"
    if _op(layer) != "sum":
        return f"the aggregation {layer.aggr!r} has no fused form"
    reason = _reason(layer, graph, inputs, linears)
    if reason is not None:
        return reason
    weights = [*layer.parameters(recurse=False)]
    for name in linears:
        weights += getattr(layer, name).parameters()
    reason = inputs_reason(graph, x, *weights, dtypes=(*DTYPES, torch.bfloat16))
    if reason is not None:
        return reason
    if any([getattr(layer, name).weight.shape[1] != x.shape[1] for name in linears]):
        return "weights do not fit the rows"
    if not has("attend", x.device, x.dtype):
        return f"there are no kernels of attention on {x.device}"
    return partial(_attended, run, layer, graph, x)


def _attended(
    run: Callable[..., Tensor], layer: Any, graph: Any, x: Tensor, travels: bool
) -> Tensor:
    """Heads side by side or their mean, with the residual and the bias behind."""
    out = run(
        layer, _relation(layer, graph), x, graph.policy, heads=layer.heads,
        slope=layer.negative_slope, dropout=_dropout(layer, graph.group), input_travels=travels,
        donate=options_of(layer).donate,
    )  # fmt: skip
    out = out.flatten(1) if layer.concat else out.mean(1)
    if getattr(layer, "res", None) is not None:
        out = out + layer.res(x)
    is_in_it = layer.bias is None or (run is _gat and layer.concat)
    return out if is_in_it else out + layer.bias


def _dropout(layer: Any, group: Any) -> tuple[int, float] | None:
    if layer.training and layer.dropout > 0:
        return group.seeds.draw(group), layer.dropout
    return None


def _gat(layer: Any, relation: Any, x: Tensor, policy: Any, **weighing: Any) -> Tensor:
    bias = layer.bias if layer.concat else None
    weights = layer.lin.weight, layer.att_src, layer.att_dst, bias
    return gat(relation, x, *weights, policy, fc_bias=layer.lin.bias, **weighing)


def _gatv2(layer: Any, relation: Any, x: Tensor, policy: Any, **weighing: Any) -> Tensor:
    src, dst = ((part.weight, part.bias) for part in (layer.lin_l, layer.lin_r))
    queries = None if layer.share_weights else dst
    return gatv2(relation, x, src, queries, layer.att, policy, **weighing)


def _agree_attention(
    projection: str, scores: int, layer: Any, graph: Any, inputs: Arguments, fused: bool
) -> bool:
    """Whether the layer's input travels, see :func:`sar.layers.attending.input_travels`.

    ``projection`` makes the values, beside which otherwise ``scores`` numbers a head travel.
    """
    weight, numbers = _weight(layer, projection), layer.heads * (layer.out_channels + scores)
    return input_travels(graph.sole_relation, inputs.get("x"), weight, numbers, graph.policy, fused)


_SCORED = _MESSAGES | {"message": ("4fde4d44de6d0f1a",), "edge_update": ("d21a8aed265a6a15",)}
_MIXED = _MESSAGES | {"message": ("56caf3475da8f07b",), "edge_update": ("28092624fb1dc708",)}

ADAPTERS = {
    "SAGEConv": MessageAdapter(
        partial(_bind_sage, _SAGE),
        {"forward": ("fd4691df15b30f7e",), "message": _ROW_OF_SOURCE, **_MESSAGES},
        partial(_agree_sage, "lin_l"),
        _reduces,
    ),
    "GraphConv": MessageAdapter(
        partial(_bind_sage, _GRAPH),
        {"forward": ("e0a070063ef2a771",), "message": _WEIGHTED, **_MESSAGES},
        partial(_agree_sage, "lin_rel"),
        _reduces,
    ),
    "GCNConv": MessageAdapter(
        _bind_gcn,
        {"forward": ("3715282ade7f4f4c",), "message": _WEIGHTED, **_MESSAGES},
        _agree_gcn,
    ),
    "GINConv": MessageAdapter(
        _bind_gin,
        {"forward": ("a0a982f04fe548ac",), "message": _ROW_OF_SOURCE, **_MESSAGES},
        None,
        _reduces,
    ),
    "GATConv": MessageAdapter(
        partial(_bind_attention, _gat, ("lin",)),
        {"forward": ("d174c56936d52907", "e171ca222ae6ae04"), **_SCORED},
        partial(_agree_attention, "lin", 1),
    ),
    "GATv2Conv": MessageAdapter(
        partial(_bind_attention, _gatv2, ("lin_l", "lin_r")),
        {"forward": ("74844abd2feb3fd8", "da6af9c239cba986"), **_MIXED},
        partial(_agree_attention, "lin_l", 0),
    ),
}
