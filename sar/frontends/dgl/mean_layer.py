"""DGL's GraphSAGE layer of means on a sharded graph: computed as a whole, by :mod:`sar.ops`.

It stands before the forward of the class, and only where nobody can see the difference: a call with
one graph and one tensor of rows in training, exact rows on the wire, nothing replaced or hooked in
the layer. A layer that is recomputed goes by Note [Column blocks], where all ranks can; others by
Note [Linear of mean].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sar.config import EXACT
from sar.edges.relation import Relation
from sar.frontends.dgl.counts import Counts
from sar.ops.callers import is_linear, is_mean_layer
from sar.ops.column_blocks import linear_by_columns
from sar.ops.frugal import Frugal
from sar.ops.linear_of_mean import linear_of_mean
from sar.ops.linear_sum import may_wait
from sar.ops.reuse import is_made_here, is_plain
from sar.ops.saving import is_checkpointed, is_innermost, once, takes_notes

_MODULE = "dgl.nn.pytorch.conv.sageconv"
_DTYPES = (torch.float32, torch.float64)


def before(forward: Callable) -> Callable:
    """``SAGEConv.forward`` that is computed as a whole where that fits; its own if not DGL's."""
    if forward.__module__ != _MODULE:
        return forward

    @wraps(forward)
    def call(self: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(graph, Counts) and len(args) == 1 and not kwargs:
            linear = _linear_of(self, graph, *args)
            if linear is not None:
                return _compute(self, graph, *args, linear)
        return forward(self, graph, *args, **kwargs)

    return call


def _linear_of(layer: Any, graph: Any, x: Any) -> Callable[..., Tensor] | None:
    """What computes the products of a layer; ``None``: DGL's code does."""
    if takes_notes():
        # A block has few own rows beside which its columns could travel: 1.5 of the time there.
        if graph.is_block or not (is_innermost() and is_mean_layer(layer) and _is_one(graph)):
            return None
        return linear_by_columns if once(lambda: _fits_everywhere(layer, graph, x)) else None
    fits = not is_checkpointed() and is_mean_layer(layer) and _is_one(graph)
    return linear_of_mean if fits and _fits(layer, graph, x) else None


def _fits_everywhere(layer: Any, graph: Any, x: Any) -> bool:
    fits = graph.policy.zeros == "send" and _fits(layer, graph, x)
    fits = fits and x.requires_grad and is_made_here(x)
    if graph.group.size == 1:
        return fits
    return bool(graph.group.all_reduce(torch.tensor(int(fits)), "min"))


def _fits(layer: Any, graph: Any, x: Any) -> bool:
    parts = layer.fc_self, layer.fc_neigh
    return (
        _is_unchanged(type(layer))
        and all(map(is_linear, parts))
        and parts[1].bias is None
        and graph.policy.lossy == EXACT
        and _are_alike(x, graph, *parts)
        and may_wait(layer)
    )


def _is_unchanged(kind: type[nn.Module]) -> bool:
    """Whether the code of a class of DGL, and of the linear layers in it, is as it came."""
    own = kind.forward.__module__ == kind.__module__
    return own and nn.Linear.forward is _LINEAR and F.linear is torch._C._nn.linear


_LINEAR = nn.Linear.forward


def _is_one(graph: Any) -> bool:
    """Whether a layer finds one kind of rows and edges, its own rows before all others."""
    return (
        graph.is_homogeneous
        and graph._store.keep_seeds
        and graph._store.sharing is None
        and isinstance(graph.scope().relation, Relation)
    )


def _are_alike(x: Any, graph: Any, *parts: nn.Linear) -> bool:
    weights = [weight for part in parts for weight in part.parameters()]
    return (
        type(x) is Tensor
        and x.dim() == 2
        and len(x) == graph.num_src_nodes()
        and torch.is_grad_enabled()
        and (x.requires_grad or parts[1].weight.requires_grad)
        and x.dtype in _DTYPES
        and is_plain(x)
        and len({part.weight.shape for part in parts}) == 1
        and x.shape[1] == parts[0].weight.shape[1]
        and all((w.dtype, w.device) == (x.dtype, x.device) for w in weights)
        and torch.autograd.forward_ad._current_level < 0
        and not torch.is_autocast_enabled(x.device.type)
    )


def _compute(layer: Any, graph: Any, x: Tensor, linear: Callable[..., Tensor]) -> Tensor:
    def linear_of(x: Tensor) -> Tensor:
        own, neigh = layer.fc_self, layer.fc_neigh
        x, relation = layer.feat_drop(x).contiguous(), graph.scope().relation
        return linear(relation, x, own.weight, neigh.weight, own.bias, graph.policy)

    after = [step for step in (layer.activation, layer.norm) if step is not None]
    if not after:
        return linear_of(x)
    first, *rest = after
    with Frugal():
        out = first(linear_of(x))  # nobody else has the argument
    for step in rest:
        out = step(out)
    return out
