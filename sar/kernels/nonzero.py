"""Rows without their zeros: a bit for each number, and the numbers whose bit is set, row by row.

A number counts as zero when all of its own bits are: a negative zero travels. A row's bits lie in
words as wide as a number, the first number's in the lowest bit of the first word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sar.kernels.jit import array, kernel
from sar.kernels.registry import KERNELS, implements

SLACK = 1  # numbers behind the packed ones that are read, or written, and mean nothing
_WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}


def can_pack(dtype: torch.dtype) -> bool:
    """Whether rows of this dtype can be packed, on any device: ranks may not differ in it."""
    return dtype in _WORDS


def nonzero_bits(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of each row, and how many of them are set.

    Args:
        rows: [n, width] contiguous float32 or float64.

    Returns:
        int32 or int64 [n, words of a row], and int32 [n].
    """
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
    """Fill ``out`` [n, width], contiguous, with packed rows and their zeros.

    Args:
        words: [n, words of a row]. numbers: as many as bits are set, and ``SLACK``.
    """
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
    """bool [n, width] of the bits of rows."""
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
