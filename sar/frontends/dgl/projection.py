"""Scores that a layer has projected from the rows it sums: ``(rows * vector).sum(-1)``.

Layers of the field compute them outside of any edge program, and autograd's way back makes two
tensors of the size of the rows for each. What autograd noted of the forward pass tells what the
scores are, so that attention can add their gradients to those of the rows itself. Only in layers of
DGL, whose scores nobody outside can hold, hook or ask the gradient of, on the way either.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from sar.ops.attention import Projection
from sar.ops.callers import layer_of_dgl
from sar.ops.head_sums import HeadSums


def find_projection(scores: Tensor, rows: Tensor) -> Projection | None:
    """What ``scores`` [n, .., 1] are of ``rows`` [n, .., D]; ``None``: not such a sum.

    The vector is a leaf that requires a gradient.
    """
    if layer_of_dgl() is None:
        return None
    node: Any = scores.grad_fn
    here = rows.grad_fn, rows.output_nr
    if node is None or here[0] is None:
        return None
    if node.name() == "UnsqueezeBackward0":
        node = node.next_functions[0][0]
    if not _sums_heads(node):
        if node is None or node.name() != "SumBackward1" or not _over_columns(node, rows):
            return None
        node = node.next_functions[0][0]
        if node is None or node.name() != "MulBackward0":
            return None
    for factor, (other, _) in zip(node.next_functions, node.next_functions[::-1], strict=True):
        vector = getattr(other, "variable", None)
        if factor == here and vector is not None and _is_row(vector, rows):
            return Projection(vector, weakref.ref(scores))
    return None


def _sums_heads(node: Any) -> bool:
    """Whether it is the node of a sum over columns that this library computed as a whole."""
    is_ours = isinstance(node, BackwardCFunction)
    return is_ours and getattr(node, "_forward_cls", None) is HeadSums


def _over_columns(node: object, rows: Tensor) -> bool:
    """Whether a sum is known to be that of the last axis of a tensor of the shape of ``rows``."""
    # Torch promises neither name: without them scores are as any others.
    shape: Any = getattr(node, "_saved_self_sym_sizes", ())
    axes: Any = getattr(node, "_saved_dim", ())
    last = (rows.dim() - 1, 2**64 - 1)  # autograd holds -1 without a sign
    return tuple(shape) == tuple(rows.shape) and len(axes) == 1 and axes[0] % 2**64 in last


def _is_row(vector: Tensor, rows: Tensor) -> bool:
    columns = tuple(rows.shape[1:])
    return tuple(vector.shape) in (columns, (1, *columns))
