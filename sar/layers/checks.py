"""Reasons that several fused layers have for leaving a call to the layer's own code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sar.config import EXACT
from sar.layers.entry import NO_OPTIONS, OPTIONS

DTYPES = (torch.float32, torch.float64)
_LINEAR, _PRODUCT = nn.Linear.forward, F.linear


def graph_reason(graph: Any) -> str | None:
    """Why a graph is not one relation between rows of one kind that travel exactly and alone."""
    if graph.sole_relation is None:
        return "the graph has several kinds of rows or edges, or they are reversed or unordered"
    if graph._store.sharing is not None:
        return "other modules of the layer read the same rows, which travel once for all"
    return None if graph.policy.lossy == EXACT else "the policy is lossy"


def rows_reason(
    x: Any, num_rows: int, *weights: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> str | None:
    """Why ``x`` is not plain [num_rows, width] of one of ``dtypes``, that of all ``weights``."""
    if type(x) is not Tensor or x.layout != torch.strided:
        return f"rows are a {type(x).__name__}, not a plain tensor"
    if x.dim() != 2 or len(x) != num_rows:
        return f"rows have shape {tuple(x.shape)}, not [{num_rows}, width]"
    if x.dtype not in dtypes:
        return f"rows are {x.dtype}"
    for weight in weights:
        if weight.dtype != x.dtype or weight.device != x.device:
            return "rows and weights differ in dtype or device"
    return None


def linear_reason(layer: nn.Module, *names: str) -> str | None:
    """Why parts of a layer are not torch's linear layers as they came."""
    if nn.Linear.forward is not _LINEAR or F.linear is not _PRODUCT:
        return "torch's linear layer was replaced"
    for name in names:
        part = getattr(layer, name, None)
        if type(part) is not nn.Linear or "forward" in part.__dict__:
            return f"{name} is a {type(part).__name__} with code of its own"
    return None


def may_donate(layer: nn.Module, x: Tensor) -> bool:
    """Whether backward may write over the input ``x``: the user asked for it, and an operation with
    a gradient made it, in memory of its own."""
    asked = layer.__dict__.get(OPTIONS, NO_OPTIONS).donate
    return asked and x.requires_grad and not x.is_leaf and not x._is_view()
