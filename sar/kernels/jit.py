"""Tools of compiled kernels: options, arrays, prefetching, exponentials, random numbers, threads.

Kernels are compiled on first use and kept on disk by numba. They release the interpreter lock, so
that :func:`in_parallel` can run one on ranges of rows in several threads.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from torch import Tensor

from sar._private import lazily_disabled, llvm_tools, njit, without_counting
from sar.splitmix import STEP as SPLITMIX_STEP
from sar.splitmix import mix as splitmix_mix

# Sums may be reordered, so that they use vector units; NaN and infinity keep their meaning.
_FAST = {"reassoc", "nsz", "arcp", "contract", "afn"}
_AHEAD = 8  # edges between the prefetch of a row and its use
LINE = 64  # bytes of a cache line
STREAMED = 16  # bytes that are streamed at once
_EDGES_A_THREAD = 4096  # fewer are not worth one
_ELEMENTS_A_THREAD = 1 << 17
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

# Kernels own no memory: counting who refers to an array costs more than what is done with
# one edge. Where they need room, the caller passes it.
_OPTIONS: Any = {"nogil": True, "cache": True, **without_counting()}
kernel: Any = njit(**_OPTIONS, fastmath=_FAST)
ordered_kernel: Any = njit(**_OPTIONS)  # whose sums are not reordered
inlined: Any = numba.njit(inline="always")
_emitted: Any = intrinsic  # the decorated function takes the arguments of the compiled one


class _Memory:
    """The object that numpy makes an array of, and holds as long as the array."""

    __slots__ = ("__array_interface__", "tensor")
    tensor: Tensor
    __array_interface__: dict[str, Any]


class _Reading(threading.local):
    """Who is told, in this thread, of tensors whose memory compiled loops will read or write."""

    told: Callable[[Sequence[Tensor]], object] | None = None


reading = _Reading()


def array(tensor: Tensor, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """The memory of a tensor on the CPU, whether or not it asks for a gradient; holds the tensor.
    ``shape``: of an array of other numbers, which lie side by side from the tensor's first on."""
    if reading.told is not None:
        reading.told((tensor,))
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
    side, as loops need it, and rows ``rows.stride(0)`` apart."""
    extent = (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1] if rows.numel() else 0
    return array(rows, (extent,))


@_emitted
def prefetch_byte(typing_context: Any, array: Any, offset: Any) -> Any:
    """Prefetch the cache line ``offset`` bytes into an array."""
    signature = types.void(array, offset)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.gep(builder.bitcast(data, byte), [args[1]])
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = llvm_tools().get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data_cache = (ir.Constant(word, value) for value in (0, 3, 1))
        builder.call(function, [address, read, keep, data_cache])
        return context.get_dummy_value()

    return signature, emit


@_emitted
def copy_bytes(
    typing_context: Any, target: Any, to: Any, source: Any, begin: Any, count: Any
) -> Any:
    """Copy ``count`` bytes from ``begin`` bytes into an array to ``to`` bytes into another."""
    signature = types.void(target, to, source, begin, count)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, places = ir.IntType(8).as_pointer(), []
        for at, offset in ((0, 1), (2, 3)):
            data = context.make_array(signature.args[at])(context, builder, args[at]).data
            places.append(builder.gep(builder.bitcast(data, byte), [args[offset]]))
        llvm_tools().raw_memcpy(builder, places[0], places[1], args[4], 1)
        return context.get_dummy_value()

    return signature, emit


@_emitted
def stream_bytes(
    typing_context: Any, target: Any, to: Any, source: Any, begin: Any, count: Any
) -> Any:
    """As :func:`copy_bytes`, past the caches: memory to write is not read first.

    ``count`` and the target's address are multiples of 16. Before another thread is told of it,
    :func:`end_streams`.
    """
    signature = types.void(target, to, source, begin, count)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, vector = ir.IntType(8).as_pointer(), ir.VectorType(ir.IntType(32), 4)
        places, size = [], ir.Constant(args[4].type, STREAMED)
        for at, offset in ((0, 1), (2, 3)):
            data = context.make_array(signature.args[at])(context, builder, args[at]).data
            places.append(builder.gep(builder.bitcast(data, byte), [args[offset]]))
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        with llvm_tools().for_range(builder, builder.udiv(args[4], size)) as loop:
            offset = builder.mul(loop.index, size)
            ends = [builder.gep(place, [offset]) for place in places]
            target, source = (builder.bitcast(end, vector.as_pointer()) for end in ends)
            stored = builder.store(builder.load(source, align=1), target, align=STREAMED)
            stored.set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return signature, emit


@_emitted
def end_streams(typing_context: Any) -> Any:
    """A fence: other threads see what was streamed before, once they see anything written later."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


@inlined
def prefetch_row(rows: Any, indices: Any, edge: int, low: int, width: int) -> None:
    """Prefetch columns [low, low + width) of the row that an edge a little later will read. Rows
    that a shard reads lie all over memory; without this the processor waits for each."""
    if edge + _AHEAD >= len(indices):
        return
    size = rows.itemsize
    start = (np.int64(indices[edge + _AHEAD]) * rows.shape[1] + low) * size
    for byte in range(start, start + width * size, LINE):
        prefetch_byte(rows, byte)


@_emitted
def _float_of_bits(typing_context: Any, bits: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), emit


@_emitted
def _floor(typing_context: Any, x: Any) -> Any:
    """The largest whole number that is not above ``x``; ``math.floor`` would be a call."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        floor = builder.module.declare_intrinsic("llvm.floor", [args[0].type])
        return builder.call(floor, args)

    return x(x), emit


def exp(x: Any) -> Any:
    """e^x of a scalar inside kernels; of float32 x above 88 that of 88."""
    raise TypeError("exp: only for compiled kernels")


@overload(exp, jit_options={"fastmath": _FAST})
def _exp_of_type(x: Any) -> Any:
    return _exp32 if x == types.float32 else _exp64


def _exp64(x: Any) -> Any:
    return math.exp(x)


def _exp32(x: Any) -> Any:
    """2^k e^r with |r| <= ln 2 / 2 and the polynomial of Cephes' expf: one unit in the last place.
    Unlike the library's function it is computed for a vector of numbers at once."""
    low = min(max(x, np.float32(-87.0)), np.float32(88.0))
    whole = _floor(low * np.float32(1.44269504) + np.float32(0.5))
    k = np.int32(whole)
    r = low - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1.0)
    y = y * _float_of_bits((k + np.int32(127)) << np.int32(23))
    return y if x == x else x


STEP = np.uint64(SPLITMIX_STEP)
mix = inlined(splitmix_mix)


@inlined
def keep_factor(key: int, column: int, seed: int, probability: float, keep: Any) -> Any:
    """Dropout's factor of an element: ``keep`` = 1 / (1 - probability), or 0. The same numbers as
    ``sar.kernels.keyed.keyed_uniform``."""
    row = mix(np.uint64(key) * STEP + np.uint64(seed))
    bits = mix(row + (np.uint64(column) + np.uint64(1)) * STEP)
    dropped = np.float64(bits >> np.uint64(11)) * 2.0**-53 < probability
    return keep - keep if dropped else keep


def in_parallel(run: Callable[[int, int, int], None], indptr: Tensor, *others: Tensor) -> None:
    """Call ``run(part, first, last)`` on ranges of segments with about as many edges each, at most
    as many as torch has threads; the same cut for the same number of threads. ``others``: what is
    read as well, of the same edges."""
    if reading.told is not None:
        reading.told((indptr, *others))
    parts, num_segments = num_parts(indptr), indptr.shape[0] - 1  # len() goes through Python
    if parts == 1:
        run(0, 0, num_segments)
        return
    num_edges = int(indptr[-1])
    goals = torch.tensor([num_edges * part // parts for part in range(1, parts)])
    inner = torch.searchsorted(indptr, goals.to(indptr.dtype)).clamp_(max=num_segments)
    _run_parts(run, [0, *inner.tolist(), num_segments])


def rows_in_parallel(run: Callable[[int, int, int], None], rows: int, elements: int) -> None:
    """Call ``run(part, first, last)`` on ranges of as many rows each, ``elements`` in all."""
    parts = max(1, min(torch.get_num_threads(), elements // _ELEMENTS_A_THREAD, rows))
    _run_parts(run, [rows * part // parts for part in range(parts + 1)])


def _run_parts(run: Callable[[int, int, int], None], bounds: list[int]) -> None:
    parts = len(bounds) - 1
    if parts == 1:
        run(0, 0, bounds[1])
        return
    with ThreadPoolExecutor(parts - 1) as pool:
        others = [
            pool.submit(run, part, bounds[part], bounds[part + 1]) for part in range(1, parts)
        ]
        run(0, bounds[0], bounds[1])
        for other in others:
            other.result()


def num_parts(indptr: Tensor) -> int:
    """The number of parts that :func:`in_parallel` cuts; few edges are not worth a thread."""
    threads = torch.get_num_threads()
    return threads if threads == 1 else max(1, min(threads, int(indptr[-1]) // _EDGES_A_THREAD))


_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(function: _F, otherwise: Callable[..., Any] | None = None) -> _F:
    """``function``, which ``torch.compile`` calls as it stands and never looks into; compiled code
    calls ``otherwise`` in its place, if there is one."""
    apart = lazily_disabled(otherwise or function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (apart if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return cast(_F, call)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of ``dtype`` are accumulated in across blocks and rounds."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
