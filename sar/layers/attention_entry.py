"""What DGL's attention layers have in common: when they are fused, and what surrounds the sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sar.kernels.registry import has
from sar.layers.arriving import input_travels
from sar.layers.checks import DTYPES, graph_reason, linear_reason, rows_reason
from sar.layers.entry import Inputs, options_of

_DROPOUT, _SLOPE = nn.Dropout.forward, nn.LeakyReLU.forward


def why_not(layer: Any, graph: Any, inputs: Inputs, projections: tuple[str, ...]) -> str | None:
    """Why a call is not fused.

    Args:
        projections: names of the linear layers that make values and queries.
    """
    x = inputs["feat"]
    if inputs["get_attention"]:
        return "get_attention asks for the weights of the edges"
    if isinstance(x, tuple):
        return "sources and destinations have rows of their own"
    reason = graph_reason(graph) or linear_reason(layer, *projections) or _parts_reason(layer)
    if reason is not None:
        return reason
    relation, weights = graph.sole_relation, [*layer.parameters(recurse=False)]
    for name in projections:
        weights += getattr(layer, name).parameters()
    reason = rows_reason(x, relation.num_src, *weights, dtypes=(*DTYPES, torch.bfloat16))
    if reason is not None:
        return reason
    if any([getattr(layer, name).weight.shape[1] != x.shape[1] for name in projections]):
        return "weights do not fit the rows"
    if not has("attend", x.device, x.dtype):
        return f"there are no kernels of attention on {x.device}"
    if not layer._allow_zero_in_degree and bool((relation.in_degrees == 0).any()):
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


def agree(projection: Any, numbers: int, graph: Any, inputs: Inputs, fused: bool) -> bool:
    """Whether the layer's input travels, see :func:`sar.layers.arriving.input_travels`.

    Args:
        projection: the linear layer that makes values, or what is in its place.
        numbers: of a row, which would travel instead.
    """
    x, relation = inputs["feat"], graph.sole_relation
    weight = getattr(projection, "weight", None)
    if relation is None or not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return False
    return input_travels(relation, x, weight, numbers, graph.policy, fused)


def inputs_of_sum(layer: Any, graph: Any, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The rows after their dropout, and what GAT and GATv2 both know of the sum, by name.

    The seed of the weights' dropout is drawn after that of the rows', as the layer's code does it.
    """
    relation, drop = graph.sole_relation, layer.attn_drop
    x, dropout = layer.feat_drop(x), None
    if drop.training and drop.p > 0:
        dropout = relation.group.seeds.draw(relation.group), drop.p
    known = {
        "heads": layer._num_heads,
        "slope": layer.leaky_relu.negative_slope,
        "dropout": dropout,
        "donate": options_of(layer).donate,
    }
    return x, known


def finished(layer: Any, out: Tensor, x: Tensor) -> Tensor:
    """The residual and the activation behind the sum.

    Args:
        out: [num_dst, H, D].
        x: [num_src, F] the rows after their dropout.
    """
    if layer.res_fc is not None:
        out = out + layer.res_fc(x[: len(out)]).view(len(out), -1, layer._out_feats)
    return layer.activation(out) if layer.activation else out
