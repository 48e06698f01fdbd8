"""Rows added into rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.kernels.jit import LINE, array, flat, kernel, prefetch_byte
from sar.kernels.registry import KERNELS, implements

_FEW = 1 << 13  # numbers; torch adds fewer before this has begun
_LATER = 8  # rows between asking for one and adding into it


def add_rows(target: Tensor, idx: Tensor, rows: Tensor) -> None:
    """target[idx] += rows, an index as often as it comes.

    Torch's ``index_add_`` takes half as long again, and six times as long where one of the two is
    some columns of a wider tensor.

    Args:
        target: [R, width] floating point.
        idx: integer [n] of rows in [0, R), which is not checked.
        rows: [n, width] of the dtype of ``target``.
    """
    run = KERNELS.get(("add_rows", rows.device.type, rows.dtype))
    if run and rows.numel() >= _FEW and target.stride(1) == rows.stride(1) == 1:
        run(target, idx, rows)
    else:  # int64 indices add twice as fast as int32
        target.index_add_(0, idx.long(), rows)


@implements("add_rows", "cpu", torch.float32, torch.float64)
def _add_compiled(target: Tensor, idx: Tensor, rows: Tensor) -> None:
    strides = np.uint64(target.stride(0)), np.uint64(rows.stride(0))
    _add(flat(target), array(idx), flat(rows), *strides, np.uint64(rows.shape[1]))


@kernel
def _add(target: Any, idx: Any, rows: Any, target_stride: Any, stride: Any, width: Any) -> None:
    for n in range(len(idx)):
        if n + _LATER < len(idx):
            start = np.uint64(idx[n + _LATER]) * target_stride * target.itemsize
            for byte in range(start, start + width * target.itemsize, LINE):
                prefetch_byte(target, byte)
        to, low = np.uint64(idx[n]) * target_stride, np.uint64(n) * stride
        for d in range(width):
            target[to + d] += rows[low + d]
