"""Tensors as arrays, for compiled loops."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ORDER = "<" if sys.byteorder == "little" else ">"
_KINDS = {
    torch.float32: "f4",
    torch.float64: "f8",
    torch.uint8: "u1",
    torch.int8: "i1",
    torch.int16: "i2",
    torch.int32: "i4",
    torch.int64: "i8",
    torch.bool: "b1",
}
_TYPES = {dtype: _ORDER + kind for dtype, kind in _KINDS.items()}


class _Memory:
    """What numpy makes an array of, and holds as long as the array."""

    __slots__ = ("__array_interface__", "tensor")
    tensor: Tensor
    __array_interface__: dict[str, Any]


def array(tensor: Tensor, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """The memory of a tensor on the CPU, whether or not it asks for a gradient.

    This array is one more holder of the tensor, and no more.

    Args:
        shape: of an array of other numbers, which lie side by side from the tensor's first on.
    """
    strides = None  # side by side
    if shape is None and not tensor.is_contiguous():
        strides = tuple([step * tensor.element_size() for step in tensor.stride()])
    memory = _Memory()
    memory.tensor = tensor
    memory.__array_interface__ = {
        "version": 3,
        "typestr": _TYPES[tensor.dtype],
        "shape": tuple(tensor.shape) if shape is None else shape,
        "strides": strides,
        "data": (tensor.data_ptr(), False),
    }
    return np.asarray(memory)


def flat(rows: Tensor) -> np.ndarray:
    """The memory from the first number of some rows [*, width] to their last; columns lie side by
    side, as loops need it, and rows as far apart as ``rows.stride(0)`` says."""
    extent = (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1] if rows.numel() else 0
    return array(rows, (extent,))
