"""The graph layers of the built-in models: modules over the functions of :mod:`sar.layers`.

Each is called with a graph of one node type and one edge type, or a block of such, and the rows of
its sources. Parameters start, and follow each other, as those of DGL's layers of the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sar.kernels import has
from sar.layers.attending import input_travels
from sar.layers.gat import gat
from sar.layers.gcn import Degrees, gcn
from sar.layers.gin import gin_sum
from sar.layers.sage import all_by_columns, sage_mean
from sar.layers.sage_columns import sage_mean_by_columns
from sar.models.choice import (
    DTYPES,
    Adapter,
    Arguments,
    Run,
    choose,
    inputs_reason,
    may_donate,
    options_of,
    standing,
)
from sar.models.known import Layers
from sar.ops.aggregate import check_reduction
from sar.ops.rectify import is_relu, rectified
from sar.tracing.reducing import reduce_rows, rows_of, softmax

_GAIN = nn.init.calculate_gain("relu")


class SAGEConv(nn.Module):
    """z_i = W_own x_i + b + W_neigh mean(x_j), the mean over edges (j -> i) (arXiv 1706.02216).

    Args:
        in_feats, out_feats: widths.
        activation: of the result, if any.
    """

    def __init__(
        self, in_feats: int, out_feats: int, activation: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        neigh, own = nn.Linear(in_feats, out_feats, bias=False), nn.Linear(in_feats, out_feats)
        nn.init.xavier_uniform_(own.weight, gain=_GAIN)
        nn.init.xavier_uniform_(neigh.weight, gain=_GAIN)
        self.neigh, self.own, self.bias = neigh.weight, own.weight, own.bias
        self.activation = activation

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """``x`` [num_src, in_feats] to [num_dst, out_feats]; collective."""
        z = _fused(_SAGE, self, graph, x)
        if z is None:
            narrows = self.neigh.shape[0] < self.neigh.shape[1]
            mean = graph.aggregate(F.linear(x, self.neigh) if narrows else x, "mean")
            neigh = mean if narrows else F.linear(mean, self.neigh)
            z = F.linear(x[: len(mean)], self.own, self.bias) + neigh
        if self.activation is None:
            return z
        return rectified(z) if is_relu(self.activation) else self.activation(z)


class GraphConv(nn.Module):
    """z_i = b + sum of x_j W / sqrt(out-degree of j, in-degree of i) over edges (j -> i)
    (arXiv 1609.02907); degrees count at least 1.

    Args:
        in_feats, out_feats: widths.
    """

    def __init__(self, in_feats: int, out_feats: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_feats, out_feats))
        self.bias = nn.Parameter(torch.zeros(out_feats))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """``x`` [num_src, in_feats] to [num_dst, out_feats]; collective."""
        z = _fused(_GCN, self, graph, x)
        if z is not None:
            return z
        x = x * _root(graph.out_degrees(), x)
        if self.narrows:
            sums = graph.aggregate(x @ self.weight)
        else:
            sums = graph.aggregate(x) @ self.weight
        return sums * _root(graph.in_degrees(), sums) + self.bias

    @property
    def narrows(self) -> bool:
        """Whether rows are multiplied before they are summed."""
        return self.weight.shape[0] > self.weight.shape[1]


class GINConv(nn.Module):
    """z_i = f((1 + eps) x_i + sum of x_j over edges (j -> i)) (arXiv 1810.00826); eps is 0.

    Args:
        apply_func: f.
    """

    eps: Tensor

    def __init__(self, apply_func: nn.Module) -> None:
        super().__init__()
        self.apply_func = apply_func
        self.register_buffer("eps", torch.zeros(1))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """``x`` [num_src, in_feats] to [num_dst, out_feats]; collective."""
        z = _fused(_GIN, self, graph, x)
        if z is None:
            sums = graph.aggregate(x)
            z = (1 + self.eps) * x[: len(sums)] + sums
        return self.apply_func(z)


class GATConv(nn.Module):
    """z_i = b + sum of a_ij W x_j over edges (j -> i), a_ij per head the softmax over j of
    lrelu(<a_src, W x_j> + <a_dst, W x_i>) (arXiv 1710.10903).

    Args:
        in_feats: width of rows. out_feats: of a head's result.
        num_heads: heads. slope: of lrelu.
    """

    def __init__(self, in_feats: int, out_feats: int, num_heads: int, slope: float = 0.2) -> None:
        super().__init__()
        self.num_heads, self.slope = num_heads, slope
        weight = nn.Linear(in_feats, out_feats * num_heads, bias=False).weight
        self.attn_src = nn.Parameter(torch.empty(1, num_heads, out_feats))
        self.attn_dst = nn.Parameter(torch.empty(1, num_heads, out_feats))
        self.bias = nn.Parameter(torch.zeros(num_heads * out_feats))
        self.weight = weight
        for one in (self.weight, self.attn_src, self.attn_dst):
            nn.init.xavier_normal_(one, gain=_GAIN)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """``x`` [num_src, in_feats] to [num_dst, num_heads, out_feats]; collective."""
        z = _fused(_GAT, self, graph, x)
        return self._plain(graph, x) if z is None else z

    def _plain(self, graph: Any, x: Tensor) -> Tensor:
        """The layer in steps; where there are kernels of attention, with the same messages."""
        scope = graph.scope()
        value = F.linear(x, self.weight).view(len(x), self.num_heads, -1)
        key = (value * self.attn_src).sum(-1, keepdim=True)
        query = (value[: graph.num_dst_nodes()] * self.attn_dst).sum(-1, keepdim=True)
        scores = F.leaky_relu(rows_of(scope, "u", key) + rows_of(scope, "v", query), self.slope)
        messages: Any = rows_of(scope, "u", value) * softmax(scope, scores)
        return reduce_rows(messages, "sum") + self.bias.view(1, self.num_heads, -1)


def _root(degrees: Tensor, like: Tensor) -> Tensor:
    """[n, 1] degrees ** -0.5, which count at least 1, as factors of rows."""
    return degrees.to(like.dtype).clamp(min=1).pow(-0.5).unsqueeze(1)


# -- the fused functions -------------------------------------------------------------------------


def _fused(adapter: Adapter, layer: nn.Module, graph: Any, x: Tensor) -> Tensor | None:
    """The layer's result before its activation; ``None`` where its own code has to compute it."""
    run = choose(adapter, type(layer).forward, layer, graph, {"x": x})
    if run is not None:
        return run()
    if graph.sole_relation is not None:
        check_reduction(graph.sole_relation, x, "sum")
    return None


def _binds(
    run: Run, kernel: str = "", *more: torch.dtype
) -> Callable[[Any, Any, Arguments], Run | str]:
    """A ``bind`` to ``run`` where graph and rows allow it, for the usual dtypes and ``more``."""

    def bind(layer: Any, graph: Any, inputs: Arguments) -> Run | str:
        x, weights = inputs["x"], layer.parameters(recurse=False)
        reason = inputs_reason(graph, x, *weights, dtypes=(*DTYPES, *more))
        if reason is None and kernel and not has(kernel, x.device, x.dtype):
            reason = f"there are no kernels of attention on {x.device}"
        return reason or partial(run, layer, graph, x)

    return bind


def _sage(layer: Any, graph: Any, x: Tensor, by_columns: bool) -> Tensor:
    function, x = sage_mean_by_columns if by_columns else sage_mean, x.contiguous()
    return function(
        graph.sole_relation, x, layer.own, layer.neigh, layer.bias, graph.policy,
        donate=may_donate(layer, x),
    )  # fmt: skip


def _agree_sage(layer: Any, graph: Any, inputs: Arguments, fused: bool) -> bool:
    if graph.is_block:
        return False
    return all_by_columns(graph.group, graph.policy, inputs["x"], fused)


def _gcn(layer: Any, graph: Any, x: Tensor) -> Tensor:
    x = x.contiguous()
    return gcn(
        graph.sole_relation, x, layer.weight, layer.bias, graph.policy, src=_BY_OUT, dst=_BY_IN,
        weight_first=layer.narrows, donate=may_donate(layer, x),
    )  # fmt: skip


_BY_OUT, _BY_IN = Degrees("out", -0.5), Degrees("in", -0.5)


def _gin(layer: Any, graph: Any, x: Tensor) -> Tensor:
    x = x.contiguous()
    return gin_sum(graph.sole_relation, x, layer.eps, graph.policy, donate=may_donate(layer, x))


def _agree_gat(layer: Any, graph: Any, inputs: Arguments, fused: bool) -> bool:
    relation, numbers = graph.sole_relation, layer.num_heads + len(layer.weight)
    if relation is None:
        return False
    return input_travels(relation, inputs["x"], layer.weight, numbers, graph.policy, fused)


def _gat(layer: Any, graph: Any, x: Tensor, travels: bool) -> Tensor:
    weights = layer.weight, layer.attn_src, layer.attn_dst, layer.bias
    return gat(
        graph.sole_relation, x, *weights, graph.policy, heads=layer.num_heads, slope=layer.slope,
        input_travels=travels, donate=options_of(layer).donate,
    )  # fmt: skip


_SAGE = Adapter(_binds(_sage), {}, _agree_sage)
_GCN, _GIN = Adapter(_binds(_gcn), {}), Adapter(_binds(_gin), {})
_GAT = Adapter(_binds(_gat, "attend", torch.bfloat16), {}, _agree_gat)


class OwnLayers(Layers):
    """The layers of this module, and classes of users; see :class:`sar.models.known.Layers`."""

    def __init__(self) -> None:
        self._added: dict[type, Adapter] = {}

    def add(self, kind: type[nn.Module], adapter: Adapter, graph: int = 0, rows: int = 1) -> None:
        """From now on let an adapter compute a class of your own on sharded graphs.

        Args:
            graph, rows: places of the graph and of the rows of sources among the arguments of
                ``kind.forward``, from 0 without ``self``.

        Raises:
            ValueError: the class has an adapter.
        """
        if kind in self.adapters():
            got = f"{kind.__name__}, which has an adapter"
            raise ValueError(f"kind: got {got}; expected a class without one")
        self._added[kind] = adapter
        kind.forward = standing(kind.forward, adapter, graph=graph, rows=rows)  # type: ignore[method-assign]

    def adapters(self) -> Mapping[type, Adapter]:
        own = {SAGEConv: _SAGE, GraphConv: _GCN, GINConv: _GIN, GATConv: _GAT}
        return own | self._added


LAYERS = OwnLayers()
