"""Typed linear layers inside message functions: ``dgl.ops.segment_mm`` in one step.

DGL multiplies type by type: several calls a type for each block of edges, and as many gradients of
the size of all matrices. Outside of message functions nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

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
