"""The passes of batch normalization over rows [n, F]: y = (x - mean) * scale + shift.

Rows of float32 and float64 on the CPU go through compiled loops that compute in float64, others
through torch in the wide dtype. Sums are float64 everywhere. Either reads rows in blocks that fit
the cache, so a float64 copy of the rows is never made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sar.kernels.device import KERNELS, implements
from sar.kernels.jit import array, flat, kernel, rows_in_parallel, wide_dtype

_COMPILED = ("cpu", torch.float32, torch.float64)
_ROWS = 64  # of a block of the compiled loops
_BLOCK_ELEMENTS = 1 << 17  # of a block for torch
Moments = tuple[Tensor, Tensor, int]


class Norm(NamedTuple):
    """The map of a row; ``mean``, ``scale``, ``shift`` are [F] float64; ``relu`` comes last."""

    mean: Tensor
    scale: Tensor
    shift: Tensor
    relu: bool = False


def moments(x: Tensor) -> Moments:
    """Mean and sum of squared deviations (float64 [F]) of the rows of ``x``, and their number."""
    zeros = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    found = zeros, zeros, 0
    run = _kernel("moments", x)
    if run:
        return run(x, found)
    for rows in _blocks(x):
        block = x[rows].double()
        mean = block.mean(0)
        found = merge(found, (mean, (block - mean).square_().sum(0), len(block)))
    return found


@implements("moments", *_COMPILED)
def _moments_compiled(x: Tensor, found: Moments) -> Moments:
    x = _by_rows(x)
    numbers, stride = flat(x), np.uint64(x.stride(0))
    parts: dict[int, Moments] = {}

    def part(number: int, first: int, last: int) -> None:
        mean, m2, room = torch.zeros((3, x.shape[1]), dtype=torch.float64)
        _add_moments(first, last, numbers, stride, array(mean), array(m2), array(room))
        parts[number] = mean, m2, last - first

    rows_in_parallel(part, len(x), x.numel())
    for number in range(len(parts)):
        found = merge(found, parts[number])
    return found


def merge(a: Moments, b: Moments) -> Moments:
    """Moments of two sets of rows together. Source: Chan, Golub and LeVeque 1979."""
    if not a[2] or not b[2]:
        return a if a[2] else b
    count = a[2] + b[2]
    delta = b[0] - a[0]
    mean = a[0] + delta * (b[2] / count)
    m2 = a[1] + b[1] + delta.square() * (a[2] * b[2] / count)
    return mean, m2, count


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """y [n, F], of the dtype of ``x``."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    run = _kernel("normalize", x)
    if run:
        run(x, norm, y)
        return y
    for rows in _blocks(x):
        block = _normalized(x[rows], norm)
        y[rows] = block.relu_() if norm.relu else block
    return y


@implements("normalize", *_COMPILED)
def _normalize_compiled(x: Tensor, norm: Norm, y: Tensor) -> None:
    x = _by_rows(x)
    ends = flat(x), np.uint64(x.stride(0)), flat(y), *_columns(norm)
    rows_in_parallel(lambda _, first, last: _normalize(first, last, *ends), len(x), x.numel())


def gradient_sums(x: Tensor, dy: Tensor, norm: Norm) -> Tensor:
    """Sums over rows of dy and of dy * (x - mean), float64 [2, F]; with relu, dy counts where y is
    positive."""
    run = _kernel("gradient_sums", x)
    if run:
        return run(x, dy, norm)
    sums = torch.zeros((2, x.shape[1]), dtype=torch.float64, device=x.device)
    for rows in _blocks(x):
        block = _incoming(x[rows], dy[rows], norm).double()
        sums[0] += block.sum(0)
        sums[1] += (block * (x[rows].double() - norm.mean)).sum(0)
    return sums


@implements("gradient_sums", *_COMPILED)
def _gradient_sums_compiled(x: Tensor, dy: Tensor, norm: Norm) -> Tensor:
    x, dy = _by_rows(x), _by_rows(dy)
    ends = flat(x), np.uint64(x.stride(0)), flat(dy), np.uint64(dy.stride(0)), *_columns(norm)
    parts: dict[int, Tensor] = {}

    def part(number: int, first: int, last: int) -> None:
        parts[number] = torch.zeros((2, x.shape[1]), dtype=torch.float64)
        _add_gradients(first, last, *ends, array(parts[number]))

    rows_in_parallel(part, len(x), x.numel())
    return torch.stack([parts[number] for number in range(len(parts))]).sum(0)


def input_gradient(
    x: Tensor, dy: Tensor, norm: Norm, slope: Tensor, offset: Tensor, out: Tensor
) -> None:
    """out = (dy - offset - (x - mean) * slope) * scale; ``slope`` and ``offset`` are [F] float64,
    ``out`` [n, F] has columns side by side and may be ``x``."""
    run = _kernel("input_gradient", x)
    if run:
        run(x, dy, norm, slope, offset, out)
        return
    wide = wide_dtype(x.dtype)
    scale, slope, offset = (one.to(wide) for one in (norm.scale, slope, offset))
    for rows in _blocks(x):
        incoming = _incoming(x[rows], dy[rows], norm).to(wide)
        out[rows] = (incoming - offset - _centered(x[rows], norm.mean) * slope) * scale


@implements("input_gradient", *_COMPILED)
def _input_gradient_compiled(
    x: Tensor, dy: Tensor, norm: Norm, slope: Tensor, offset: Tensor, out: Tensor
) -> None:
    x, dy = _by_rows(x), _by_rows(dy)
    strides = [np.uint64(rows.stride(0)) for rows in (x, dy, out)]
    ends = flat(x), strides[0], flat(dy), strides[1], *_columns(norm)
    more = array(slope), array(offset), flat(out), strides[2]

    def part(_: int, first: int, last: int) -> None:
        room = np.empty(x.shape[1], ends[0].dtype)
        _input_gradient(first, last, *ends, *more, room)

    rows_in_parallel(part, len(x), x.numel())


def _kernel(operation: str, x: Tensor) -> Any:
    """The implementation to run on ``x``; ``None`` where it is empty or there is none."""
    return KERNELS.get((operation, x.device.type, x.dtype)) if x.numel() else None


def _by_rows(x: Tensor) -> Tensor:
    """The same numbers with columns side by side, as loops need them."""
    return x if x.stride(1) == 1 else x.contiguous()


def _columns(norm: Norm) -> tuple[Any, ...]:
    return array(norm.mean), array(norm.scale), array(norm.shift), norm.relu


@kernel
def _add_moments(first: int, last: int, x: Any, stride: Any, mean: Any, m2: Any, room: Any) -> None:
    """``mean`` and ``m2`` [F] of rows [first, last); both begin as zeros."""
    width = np.uint64(len(mean))
    for low in range(first, last, _ROWS):
        high, count = min(low + _ROWS, last), low - first
        room[:] = 0
        for i in range(low, high):
            p = np.uint64(i) * stride
            for d in range(width):
                room[d] += x[p + d]
        share = (high - low) / (high - first)
        for d in range(width):
            delta = room[d] / (high - low) - mean[d]
            room[d] /= high - low
            mean[d] += delta * share
            m2[d] += delta * delta * (count * share)
        for i in range(low, high):
            p = np.uint64(i) * stride
            for d in range(width):
                away = x[p + d] - room[d]
                m2[d] += away * away


@kernel
def _normalize(
    first: int, last: int, x: Any, stride: Any, y: Any, mean: Any, scale: Any, shift: Any,
    relu: bool,
) -> None:  # fmt: skip
    width, zero = np.uint64(len(mean)), x.dtype.type(0)
    for i in range(first, last):
        p, q = np.uint64(i) * stride, np.uint64(i) * width
        for d in range(width):
            value = x.dtype.type((x[p + d] - mean[d]) * scale[d] + shift[d])
            y[q + d] = zero if relu and value <= zero else value


@kernel
def _add_gradients(
    first: int, last: int, x: Any, stride: Any, dy: Any, dy_stride: Any, mean: Any, scale: Any,
    shift: Any, relu: bool, sums: Any,
) -> None:  # fmt: skip
    width, zero = np.uint64(len(mean)), x.dtype.type(0)
    for i in range(first, last):
        p, q = np.uint64(i) * stride, np.uint64(i) * dy_stride
        for d in range(width):
            away, incoming = x[p + d] - mean[d], dy[q + d]
            value = x.dtype.type(away * scale[d] + shift[d])
            incoming = zero if relu and value <= zero else incoming
            sums[0, d] += incoming
            sums[1, d] += incoming * away


@kernel
def _input_gradient(
    first: int, last: int, x: Any, stride: Any, dy: Any, dy_stride: Any, mean: Any, scale: Any,
    shift: Any, relu: bool, slope: Any, offset: Any, out: Any, out_stride: Any, room: Any,
) -> None:  # fmt: skip
    """``room`` [F] has a row's result, as loops over memory that is read and written are slow."""
    width, zero = np.uint64(len(mean)), x.dtype.type(0)
    for i in range(first, last):
        p, q, r = np.uint64(i) * stride, np.uint64(i) * dy_stride, np.uint64(i) * out_stride
        for d in range(width):
            away, incoming = x[p + d] - mean[d], dy[q + d]
            value = x.dtype.type(away * scale[d] + shift[d])
            incoming = zero if relu and value <= zero else incoming
            room[d] = (incoming - offset[d] - away * slope[d]) * scale[d]
        for d in range(width):
            out[r + d] = room[d]


def _blocks(x: Tensor) -> Iterator[slice]:
    """Slices of rows of [n, F] that fit the cache."""
    step = max(1, _BLOCK_ELEMENTS // max(1, x.shape[1]))
    for start in range(0, len(x), step):
        yield slice(start, start + step)


def _normalized(x: Tensor, norm: Norm) -> Tensor:
    """A block of y before any relu, in the wide dtype."""
    wide = wide_dtype(x.dtype)
    return _centered(x, norm.mean) * norm.scale.to(wide) + norm.shift.to(wide)


def _incoming(x: Tensor, dy: Tensor, norm: Norm) -> Tensor:
    """A block of dy before relu, whose y is computed again."""
    if not norm.relu:
        return dy
    return dy.masked_fill(_normalized(x, norm).to(x.dtype) <= 0, 0)


def _centered(x: Tensor, mean: Tensor) -> Tensor:
    """``x - mean`` in float32 or wider, exact also where the mean dwarfs the deviation.

    The float64 mean is split in the part that float32 holds and the rest: the first subtraction
    is then (nearly) exact and the second restores what rounding the mean would have lost.
    """
    wide = wide_dtype(x.dtype)
    high = mean.to(wide)
    return (x.to(wide) - high) - (mean - high.double()).to(wide)
