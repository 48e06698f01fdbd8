"""Relu in place, remembered by a bit for each number, and its gradient in place.

The bits of a block of numbers lie in n bytes: bit b of byte i is that of number b * n + i. So
numbers side by side have their bits in bytes side by side, and a loop takes a vector of each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.kernels.jit import array, kernel, rows_in_parallel
from sar.kernels.registry import implements

DTYPES = (torch.float32, torch.float64)
_BYTES = 1 << 10  # of a block: its numbers and bits stay in the first cache
_BLOCK = 8 * _BYTES


@implements("rectify", "cpu", *DTYPES)
def rectify(x: Tensor) -> Tensor:
    """Make ``x`` max(x, 0); NaN stays.

    Args:
        x: contiguous, on the CPU, of one of ``DTYPES``.

    Returns:
        uint8 [numbers / 8, rounded up]: which numbers are not zero now, as :func:`mask` reads it.
    """
    bits = torch.empty(-(-x.numel() // 8), dtype=torch.uint8)
    _on_blocks(_rectify, x, bits)
    return bits


def mask(x: Tensor, bits: Tensor) -> None:
    """Make numbers of ``x`` zero where the bit of :func:`rectify` is not set."""
    _on_blocks(_mask, x, bits)


def _on_blocks(function: Any, x: Tensor, bits: Tensor) -> None:
    numbers, marks = array(x.detach().view(-1)), array(bits)
    rows_in_parallel(
        lambda part, first, last: function(numbers, marks, first, last),
        -(-len(numbers) // _BLOCK),
        len(numbers),
    )


@kernel
def _rectify(x: Any, bits: Any, first: int, last: int) -> None:
    zero = x.dtype.type(0)
    for block in range(first, last):
        marks = bits[block * _BYTES : (block + 1) * _BYTES]
        numbers = x[block * _BLOCK : (block + 1) * _BLOCK]
        marks[:] = 0
        for bit in range(8):
            some = numbers[bit * len(marks) : (bit + 1) * len(marks)]
            for i in range(len(some)):
                passes = not some[i] <= zero
                marks[i] |= np.uint8(passes) << np.uint8(bit)
                some[i] = some[i] if passes else zero


@kernel
def _mask(x: Any, bits: Any, first: int, last: int) -> None:
    zero = x.dtype.type(0)
    for block in range(first, last):
        marks = bits[block * _BYTES : (block + 1) * _BYTES]
        numbers = x[block * _BLOCK : (block + 1) * _BLOCK]
        for bit in range(8):
            some = numbers[bit * len(marks) : (bit + 1) * len(marks)]
            for i in range(len(some)):
                is_set = (marks[i] >> np.uint8(bit)) & np.uint8(1)
                some[i] = some[i] if is_set else zero
