"""Typed linear layers inside message functions, and ``GatedGraphConv``, which has one a type.

``dgl.ops.segment_mm`` is one step: DGL multiplies type by type, in several calls a type for each
block of edges, with as many gradients of the size of all matrices. Outside of message functions
nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sar.frontends.dgl.counts import Counts
from sar.ops.typed import typed_product
from sar.tracing.message_dropout import in_function


def segment_mm_in_udfs(original: Callable) -> Callable:
    """``dgl.backend.segment_mm`` that is one step inside message functions."""

    @wraps(original)
    def segment_mm(a: Any, b: Any, lengths: Any, *rest: Any) -> Tensor:
        if rest or not in_function() or not _fits(a, b, lengths):
            return original(a, b, lengths, *rest)
        # A torch function, so that parameters are seen and replaced: Note [Captured tensors].
        return typed_product(a.contiguous(), b.contiguous(), lengths.tolist())

    return segment_mm


def _fits(a: Any, b: Any, lengths: Any) -> bool:
    """Plain arguments of one floating type and device that DGL would accept, too."""
    return (
        all(isinstance(t, Tensor) for t in (a, b, lengths))
        and a.device == b.device
        and a.dtype == b.dtype
        and a.is_floating_point()
        and not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))
        and (a.dim(), b.dim(), lengths.dim()) == (2, 3, 1)
        and a.shape[1] == b.shape[1]
        and len(lengths) == len(b)
        and int(lengths.sum()) == len(a)
    )


def gated(forward: Callable) -> Callable:
    """``GatedGraphConv.forward`` that computes each type's messages on all ranks, on our graphs."""

    @wraps(forward)
    def call(self: Any, graph: Any, feat: Any, etypes: Any = None) -> Any:
        several = isinstance(graph, Counts) and etypes is not None
        return (_of_types if several else forward)(self, graph, feat, etypes)

    return call


def _of_types(layer: Any, graph: Any, rows: Tensor, etypes: Tensor) -> Tensor:
    import dgl.function as fn

    _check(layer, graph, etypes)
    with graph.local_scope():
        zeros = rows.new_zeros(len(rows), layer._out_feats - rows.shape[1])
        rows = torch.cat([rows, zeros], 1)
        for _ in range(layer._n_steps):
            graph.ndata["h"] = rows
            for linear, eids in zip(layer.linears, _edges_by_type(layer, etypes), strict=True):
                graph.apply_edges(_messages(linear), eids)
            graph.update_all(fn.copy_e("m", "m"), fn.sum("m", "a"))
            rows = layer.gru(graph.ndata.pop("a"), rows)
    return rows


def _messages(linear: Any) -> Callable[[Any], dict[str, Tensor]]:
    return lambda edges: {"m": linear(edges.src["h"])}


def _edges_by_type(layer: Any, etypes: Tensor) -> list[Tensor]:
    return [(etypes == one).nonzero().view(-1) for one in range(layer._n_etypes)]


def _check(layer: Any, graph: Any, etypes: Tensor) -> None:
    """Raise ``ValueError`` on every rank for types that are not; collective."""
    error, most = None, layer._n_etypes - 1
    if len(etypes) and not (0 <= etypes.min() and etypes.max() <= most):
        got = f"{int(etypes.min())} to {int(etypes.max())}"
        error = ValueError(f"etypes: got {got}, expected 0 to {most}")
    graph.group.agree(error, "GatedGraphConv")
