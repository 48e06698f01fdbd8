"""DGL's layers, bound to the fused functions of :mod:`sar.layers`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sar._private import width_wanted
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
    inputs_reason,
    linear_reason,
    may_donate,
    options_of,
)
from sar.models.known import Layers
from sar.ops.rectify import is_relu, rectified

_LAYERS = "dgl.nn.pytorch"


class DglLayers(Layers):
    """Those of DGL; see :class:`sar.models.known.Layers`."""

    def __init__(self) -> None:
        self._added: dict[type, Adapter] = {}

    def add(self, kind: type, adapter: Adapter) -> None:
        """Use an adapter for a class of DGL's, in place of the one that it has."""
        self._added[kind] = adapter

    def adapters(self) -> Mapping[type, Adapter]:
        layers = _imported()
        return {
            layers[name]: one for name, one in _ADAPTERS.items() if name in layers
        } | self._added

    def is_own(self, module: nn.Module) -> bool:
        return type(module) in _imported().values()

    def takes_graph(self, module: nn.Module) -> bool:
        return not isinstance(module, nn.Sequential) and graph_first(type(module).forward)

    def width(self, module: nn.Module) -> int | None:
        return width_wanted(module)


def _imported() -> dict[str, Any]:
    """DGL's layers by name, if they are imported."""
    return getattr(sys.modules.get(_LAYERS), "__dict__", {})


def graph_first(forward: Callable[..., Any]) -> bool:
    return list(inspect.signature(forward).parameters)[1:2] in (["graph"], ["g"])


def _activated(activation: Any, z: Tensor) -> Tensor:
    """``activation(z)``; a relu is computed in the memory of ``z``, which nobody else has."""
    if activation is None:
        return z
    return rectified(z) if is_relu(activation) else activation(z)


# -- SAGEConv of means ---------------------------------------------------------------------------


def _bind_sage(layer: Any, graph: Any, inputs: Arguments) -> Run | str:
    if layer._aggre_type != "mean":
        return f"the aggregator {layer._aggre_type!r} has no fused form"
    if inputs["edge_weight"] is not None:
        return "edges have weights"
    reason = linear_reason(layer, "fc_self", "fc_neigh")
    if reason is not None:
        return reason
    x, own, neigh = inputs["feat"], layer.fc_self, layer.fc_neigh
    reason = inputs_reason(graph, x, own.weight, neigh.weight, *own.parameters())
    if reason is not None:
        return reason
    if own is neigh or neigh.bias is not None:
        return "fc_neigh has a bias, or is fc_self"
    if not own.weight.shape == neigh.weight.shape == (len(own.weight), x.shape[1]):
        return "weights do not fit the rows"
    return partial(_sage, layer, graph, x)


def _sage(layer: Any, graph: Any, x: Tensor, by_columns: bool) -> Tensor:
    own, x = layer.fc_self, layer.feat_drop(x).contiguous()
    function = sage_mean_by_columns if by_columns else sage_mean
    z = function(
        graph.sole_relation, x, own.weight, layer.fc_neigh.weight, own.bias, graph.policy,
        donate=may_donate(layer, x),
    )  # fmt: skip
    z = _activated(layer.activation, z)
    return z if layer.norm is None else layer.norm(z)


def _agree_sage(layer: Any, graph: Any, inputs: Arguments, fused: bool) -> bool:
    if graph.is_block:
        return False
    return all_by_columns(graph.group, graph.policy, inputs.get("feat"), fused)


def _sage_reduces(layer: Any) -> str | None:
    drops = layer.feat_drop.training and getattr(layer.feat_drop, "p", 0)
    if drops or layer._in_src_feats > layer._out_feats:
        return None
    return {"mean": "mean", "gcn": "sum"}.get(layer._aggre_type)


# -- GraphConv -----------------------------------------------------------------------------------

_DIVIDED_BY: dict[str, dict[str, Degrees]] = {  # by DGL's name of the norm
    "none": {},
    "left": {"src": Degrees("out", -1.0)},
    "right": {"dst": Degrees("in", -1.0)},
    "both": {"src": Degrees("out", -0.5), "dst": Degrees("in", -0.5)},
}


def _bind_gcn(layer: Any, graph: Any, inputs: Arguments) -> Run | str:
    if inputs["edge_weight"] is not None:
        return "edges have weights"
    x, weight, bias = inputs["feat"], inputs["weight"], layer.bias
    if weight is not None and layer.weight is not None:
        return "it has a weight and gets another, of which its own code complains"
    weight = layer.weight if weight is None else weight
    reason = inputs_reason(graph, x, *(one for one in (weight, bias) if one is not None))
    if reason is not None:
        return reason
    width = x.shape[1]
    if weight is not None:
        if weight.dim() != 2 or weight.shape[0] != width:
            return "the weight does not fit the rows"
        width = weight.shape[1]
    if bias is not None and tuple(bias.shape) != (width,):
        return "the bias does not fit the rows"
    if not layer._allow_zero_in_degree and graph.sole_relation.has_no_edge_somewhere:
        return "nodes without edges, of which its own code complains"
    return partial(_gcn, layer, graph, x, weight)


def _gcn(layer: Any, graph: Any, x: Tensor, weight: Tensor | None) -> Tensor:
    x = x.contiguous()
    z = gcn(
        graph.sole_relation, x, weight, layer.bias, graph.policy, **_DIVIDED_BY[layer._norm],
        weight_first=layer._in_feats > layer._out_feats, donate=may_donate(layer, x),
    )  # fmt: skip
    return _activated(layer._activation, z)


def _gcn_reduces(layer: Any) -> str | None:
    is_given = layer._norm in ("none", "right") and layer._in_feats <= layer._out_feats
    return "sum" if is_given else None


# -- GINConv of sums and means -------------------------------------------------------------------


def _bind_gin(layer: Any, graph: Any, inputs: Arguments) -> Run | str:
    if layer._aggregator_type not in ("sum", "mean"):
        return f"the aggregator {layer._aggregator_type!r} has no fused form"
    if inputs["edge_weight"] is not None:
        return "edges have weights"
    x = inputs["feat"]
    reason = inputs_reason(graph, x, layer.eps)
    if reason is None and tuple(layer.eps.shape) != (1,):
        reason = "eps is not one number"
    return partial(_gin, layer, graph, x) if reason is None else reason


def _gin(layer: Any, graph: Any, x: Tensor) -> Tensor:
    x, op = x.contiguous(), layer._aggregator_type
    donate = may_donate(layer, x)
    z = gin_sum(graph.sole_relation, x, layer.eps, graph.policy, op=op, donate=donate)
    if layer.apply_func is not None:
        z = layer.apply_func(z)
    return z if layer.activation is None else layer.activation(z)


# -- GATConv and GATv2Conv -----------------------------------------------------------------------

_DROPOUT, _SLOPE = nn.Dropout.forward, nn.LeakyReLU.forward


def _attention_reason(
    layer: Any, graph: Any, inputs: Arguments, projections: tuple[str, ...]
) -> str | None:
    """Why a call is not fused; ``projections`` are the layers that make values and queries."""
    x = inputs["feat"]
    if inputs["get_attention"]:
        return "get_attention asks for the weights of the edges"
    if isinstance(x, tuple):
        return "sources and destinations have rows of their own"
    reason = linear_reason(layer, *projections) or _parts_reason(layer)
    if reason is not None:
        return reason
    weights = [*layer.parameters(recurse=False)]
    for name in projections:
        weights += getattr(layer, name).parameters()
    reason = inputs_reason(graph, x, *weights, dtypes=(*DTYPES, torch.bfloat16))
    if reason is not None:
        return reason
    if any([getattr(layer, name).weight.shape[1] != x.shape[1] for name in projections]):
        return "weights do not fit the rows"
    if not has("attend", x.device, x.dtype):
        return f"there are no kernels of attention on {x.device}"
    if not layer._allow_zero_in_degree and bool((graph.sole_relation.in_degrees == 0).any()):
        return "nodes without edges, of which its own code complains"
    return None


def _parts_reason(layer: Any) -> str | None:
    """Why dropout of weights and the activation of scores are not torch's."""
    drop, relu = layer.attn_drop, layer.leaky_relu
    keyed = type(drop) is nn.Dropout or getattr(drop, "keys_edges", False)
    if not keyed or "forward" in drop.__dict__ or nn.Dropout.forward is not _DROPOUT:
        return f"attn_drop is a {type(drop).__name__} with code of its own"
    plain = type(relu) is nn.LeakyReLU and "forward" not in relu.__dict__
    if not plain or nn.LeakyReLU.forward is not _SLOPE:
        return f"leaky_relu is a {type(relu).__name__} with code of its own"
    return None


def _agree_attention(
    projection: str, scores: int, layer: Any, graph: Any, inputs: Arguments, fused: bool
) -> bool:
    """Whether the layer's input travels, see :func:`sar.layers.attending.input_travels`.

    ``projection`` makes the values, beside which otherwise ``scores`` numbers a head travel.
    """
    numbers = layer._num_heads * (layer._out_feats + scores)
    weight = getattr(getattr(layer, projection, None), "weight", None)
    x, relation = inputs.get("feat"), graph.sole_relation
    return input_travels(relation, x, weight, numbers, graph.policy, fused)


def _bind_gat(layer: Any, graph: Any, inputs: Arguments) -> Run | str:
    if inputs["edge_weight"] is not None:
        return "edges have weights"
    reason = _attention_reason(layer, graph, inputs, ("fc",))
    return partial(_gat, layer, graph, inputs["feat"]) if reason is None else reason


def _gat(layer: Any, graph: Any, x: Tensor, travels: bool) -> Tensor:
    x = layer.feat_drop(x)
    out = gat(
        graph.sole_relation, x, layer.fc.weight, layer.attn_l, layer.attn_r, layer.bias,
        graph.policy, fc_bias=layer.fc.bias, input_travels=travels, **_weighing(layer, graph),
    )  # fmt: skip
    return _attended(layer, out, x)


def _bind_gatv2(layer: Any, graph: Any, inputs: Arguments) -> Run | str:
    reason = _attention_reason(layer, graph, inputs, ("fc_src", "fc_dst"))
    return partial(_gatv2, layer, graph, inputs["feat"]) if reason is None else reason


def _gatv2(layer: Any, graph: Any, x: Tensor, travels: bool) -> Tensor:
    x = layer.feat_drop(x)
    src, dst = ((part.weight, part.bias) for part in (layer.fc_src, layer.fc_dst))
    out = gatv2(
        graph.sole_relation, x, src, None if layer.share_weights else dst, layer.attn,
        graph.policy, input_travels=travels, **_weighing(layer, graph),
    )  # fmt: skip
    return _attended(layer, out, x)


def _weighing(layer: Any, graph: Any) -> dict[str, Any]:
    """Keywords of GAT and GATv2. The seed of attention dropout is drawn after that of the rows', as
    the layer's own code does it."""
    group, drop, dropout = graph.group, layer.attn_drop, None
    if drop.training and drop.p > 0:
        dropout = group.seeds.draw(group), drop.p
    slope, donate = layer.leaky_relu.negative_slope, options_of(layer).donate
    return {"heads": layer._num_heads, "slope": slope, "dropout": dropout, "donate": donate}


def _attended(layer: Any, out: Tensor, x: Tensor) -> Tensor:
    """[num_dst, H, D] with the residual and the activation behind the sum."""
    if layer.res_fc is not None:
        out = out + layer.res_fc(x[: len(out)]).view(out.shape)
    return layer.activation(out) if layer.activation else out


_ADAPTERS = {
    "SAGEConv": Adapter(_bind_sage, {"forward": ("4499b40ca6d15ecf",)}, _agree_sage, _sage_reduces),
    "GraphConv": Adapter(_bind_gcn, {"forward": ("a6a1ee0fcbb62d01",)}, None, _gcn_reduces),
    "GINConv": Adapter(
        _bind_gin, {"forward": ("e16747eb7781463c",)}, None, lambda layer: layer._aggregator_type
    ),
    "GATConv": Adapter(
        _bind_gat, {"forward": ("c6642c862834763c",)}, partial(_agree_attention, "fc", 1)
    ),
    "GATv2Conv": Adapter(
        _bind_gatv2, {"forward": ("8c3cd994a1a3d714",)}, partial(_agree_attention, "fc_src", 0)
    ),
}

LAYERS = DglLayers()
