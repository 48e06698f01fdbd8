"""Numbers that are not zero, told by a bit each: rows packed without their zeros, and relu.

Packed are the numbers whose bit is set, row by row. A number counts as zero when all of its own
bits are: a negative zero travels. A row's bits lie in words as wide as a number, the first
number's in the lowest bit of the first word.

Relu's bits of a block of numbers lie in n bytes: bit b of byte i is that of number b * n + i. So
numbers side by side have their bits in bytes side by side, and a loop takes a vector of each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sar.kernels.device import KERNELS, implements
from sar.kernels.jit import array, kernel, rows_in_parallel

SLACK = 1  # numbers behind the packed ones that are read, or written, and mean nothing
DTYPES = (torch.float32, torch.float64)
_BYTES = 1 << 10  # of a block: its numbers and bits stay in the first cache
_BLOCK = 8 * _BYTES
_WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}


def can_pack(dtype: torch.dtype) -> bool:
    """Whether rows of this dtype can be packed, on any device: ranks may not differ in it."""
    return dtype in _WORDS


def nonzero_bits(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of each row of ``rows``, contiguous float32 or float64 [n, width], and their number.
    Returns int32 or int64 [n, words of a row], and int32 [n]."""
    word, size = _WORDS[rows.dtype], 8 * rows.element_size()
    numbers = rows.detach().view(word)
    words = rows.new_empty((len(rows), -(-rows.shape[1] // size)), dtype=word)
    run = KERNELS.get(("nonzero_bits", rows.device.type, rows.dtype))
    if run:
        return words, run(numbers, words)
    found = numbers != 0
    padded = pad(found, (0, words.shape[1] * size - rows.shape[1])).view(len(rows), -1, size)
    torch.sum(padded.to(words.dtype) << _places(words), dim=2, out=words)
    return words, found.sum(1, dtype=torch.int32)


def pack_rows(rows: Tensor, words: Tensor, idx: Tensor | None, out: Tensor) -> None:
    """Fill ``out`` with the numbers of rows ``idx`` (all when ``None``) whose bits are set.

    Args:
        rows: [n, width] contiguous. words: [n, words of a row] bits of the same rows.
        idx: int32 of rows in [0, n).
        out: contiguous, of the dtype of ``rows``: as many numbers, and ``SLACK``.
    """
    run = KERNELS.get(("pack_rows", rows.device.type, rows.dtype))
    if run:
        run(rows, words, idx, out)
        return
    chosen = rows if idx is None else rows.index_select(0, idx)
    bits = words if idx is None else words.index_select(0, idx)
    found = chosen[mask_of(bits, rows.shape[1])]
    out[: len(found)] = found


def unpack_rows(words: Tensor, numbers: Tensor, out: Tensor) -> None:
    """Fill ``out`` [n, width], contiguous, with packed rows and their zeros. ``words`` is [n, words
    of a row]; ``numbers`` are as many as bits are set, and ``SLACK``."""
    run = KERNELS.get(("unpack_rows", out.device.type, out.dtype))
    if run:
        run(words, numbers, out)
        return
    out.zero_().masked_scatter_(mask_of(words, out.shape[1]), numbers)


@implements("nonzero_bits", "cpu", *_WORDS)
def _find_compiled(numbers: Tensor, words: Tensor) -> Tensor:
    counts = torch.empty(len(numbers), dtype=torch.int32)
    _find(array(numbers), _unsigned(words), array(counts))
    return counts


@implements("pack_rows", "cpu", *_WORDS)
def _pack_compiled(rows: Tensor, words: Tensor, idx: Tensor | None, out: Tensor) -> None:
    order = torch.arange(len(rows), dtype=torch.int32) if idx is None else idx
    _pack(array(rows), array(words), array(order), array(out))


@implements("unpack_rows", "cpu", *_WORDS)
def _unpack_compiled(words: Tensor, numbers: Tensor, out: Tensor) -> None:
    _unpack(array(words), array(numbers), array(out))


def _unsigned(words: Tensor) -> np.ndarray:
    return array(words).view(f"u{words.element_size()}")


def _places(words: Tensor) -> Tensor:
    return torch.arange(8 * words.element_size(), dtype=words.dtype, device=words.device)


def mask_of(words: Tensor, width: int) -> Tensor:
    """The bits of rows as bool [n, width]."""
    bits = (words.unsqueeze(2) >> _places(words)) & 1
    return bits.view(len(words), -1)[:, :width].bool()


@kernel
def _find(numbers: Any, words: Any, counts: Any) -> None:
    one, size = words.dtype.type, 8 * words.itemsize
    for row in range(len(numbers)):
        total = np.int32(0)
        for word in range(words.shape[1]):
            some, bits = numbers[row, word * size : (word + 1) * size], one(0)
            for place in range(len(some)):
                found = some[place] != 0
                bits |= one(found) << one(place)
                total += np.int32(found)
            words[row, word] = bits
        counts[row] = total


@kernel
def _pack(rows: Any, words: Any, idx: Any, out: Any) -> None:
    width, size, filled = rows.shape[1], 8 * words.itemsize, 0
    for n in range(len(idx)):
        row = idx[n]
        for word in range(words.shape[1]):
            low, bits = word * size, words[row, word]
            for place in range(min(size, width - low)):
                out[filled] = rows[row, low + place]  # the next one overwrites it if it is zero
                filled += (bits >> place) & 1


@kernel
def _unpack(words: Any, numbers: Any, out: Any) -> None:
    width, size, read = out.shape[1], 8 * words.itemsize, 0
    for row in range(len(out)):
        for word in range(words.shape[1]):
            low, bits = word * size, words[row, word]
            for place in range(min(size, width - low)):
                bit, number = (bits >> place) & 1, numbers[read]
                out[row, low + place] = number if bit else 0
                read += bit


@implements("rectify", "cpu", *DTYPES)
def rectify(x: Tensor) -> Tensor:
    """Make ``x``, contiguous and on the CPU, max(x, 0); NaN stays. Returns a bit for each number
    that is not zero now, uint8 [numbers / 8, rounded up], as :func:`mask` reads it."""
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
