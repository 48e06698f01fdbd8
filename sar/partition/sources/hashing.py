"""Compiled hash tables from ids to the numbers 0, 1, ... in the order in which they come.

A table has 2^k words: 0 is empty, else the upper half is a part of the hash and the lower half the
number plus 1. Probing is linear from the hash's highest bits on; equal hashes are told apart by the
ids themselves, so nothing collides unseen.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sar.partition.compiled import inlined, mix
from sar.splitmix import STEP

_compiled: Any = numba.njit(nogil=True, cache=True)  # unlike other loops: these own memory
_STEP = np.uint64(STEP)
_LOW, _HALF, _ONE = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(1)
_PRIME = np.uint64(0x100000001B3)  # of FNV-1a
_AT_ONCE = 512


@inlined
def _hash_bytes(data: Any, low: int, high: int) -> Any:
    found = _STEP
    for at in range(low, high):
        found = (found ^ np.uint64(data[at])) * _PRIME
    return mix(found)


@inlined
def _same_bytes(data: Any, low: int, high: int, known: Any, begin: int, end: int) -> bool:
    if high - low != end - begin:
        return False
    for at in range(high - low):
        if data[low + at] != known[begin + at]:
            return False
    return True


@_compiled
def number_ints(
    table: Any, shift: Any, known: Any, count: int, ids: Any, out: Any, add: bool
) -> Any:
    """``out[i]`` becomes the number of ``ids[i]``; -1 where it is unknown, unless ``add``.
    ``known`` has the ids by number, and with ``add`` room for all. Returns how many ids are known
    now.

    Many ids at a time are looked up where they belong, without a branch, so that the processor does
    not wait for one word after another; those that are not there are searched for.
    """
    mask = np.uint64(table.shape[0] - 1)
    hashes = np.empty(_AT_ONCE, np.uint64)
    words = np.empty(_AT_ONCE, np.uint64)
    others = np.empty(_AT_ONCE + 1, np.int64)
    for start in range(0, ids.shape[0], _AT_ONCE):
        size, left = min(_AT_ONCE, ids.shape[0] - start), 0
        for j in range(size):
            hashes[j] = mix(np.uint64(ids[start + j]) + _STEP)
            words[j] = table[hashes[j] >> shift]
        for j in range(size):
            number = np.int64(words[j] & _LOW) - 1
            out[start + j] = number
            others[left] = j
            left += (words[j] == 0) | (known[max(number, 0)] != ids[start + j])
        for other in range(left):
            j = others[other]
            wanted, slot, tag = ids[start + j], hashes[j] >> shift, hashes[j] & _LOW
            found: Any = np.int64(-1)
            while True:
                word = table[slot]
                if word == 0:
                    if add:
                        table[slot] = (tag << _HALF) | np.uint64(count + 1)
                        known[count] = wanted
                        found = count
                        count += 1
                    break
                if word >> _HALF == tag and known[np.int64(word & _LOW) - 1] == wanted:
                    found = np.int64(word & _LOW) - 1
                    break
                slot = (slot + _ONE) & mask
            out[start + j] = found
    return count


@_compiled
def number_texts(
    table: Any, shift: Any, known: Any, ends: Any, count: int, data: Any, bounds: Any, out: Any,
    add: bool,
) -> Any:  # fmt: skip
    """As :func:`number_ints` of texts: number i is ``known[ends[i]:ends[i + 1]]``, id i is
    ``data[bounds[i]:bounds[i + 1]]``. The second result only keeps the reading ahead alive."""
    mask = np.uint64(table.shape[0] - 1)
    touched: Any = np.int64(0)
    hashes = np.empty(_AT_ONCE, np.uint64)
    words = np.empty(_AT_ONCE, np.uint64)
    for start in range(0, out.shape[0], _AT_ONCE):
        size = min(_AT_ONCE, out.shape[0] - start)
        for j in range(size):
            hashes[j] = _hash_bytes(data, bounds[start + j], bounds[start + j + 1])
            words[j] = table[hashes[j] >> shift]
        for j in range(size):
            word = words[j] & _LOW
            words[j] = ends[np.int64(word) - (word != 0)]
        for j in range(size):
            touched ^= np.int64(known[np.int64(words[j])])
        for j in range(size):
            low, high = bounds[start + j], bounds[start + j + 1]
            slot, tag = hashes[j] >> shift, hashes[j] & _LOW
            number: Any = np.int64(-1)
            while True:
                word = table[slot]
                if word == 0:
                    if add:
                        table[slot] = (tag << _HALF) | np.uint64(count + 1)
                        begin = ends[count]
                        for at in range(high - low):
                            known[begin + at] = data[low + at]
                        ends[count + 1] = begin + high - low
                        number = count
                        count += 1
                    break
                found = np.int64(word & _LOW) - 1
                if word >> _HALF == tag and _same_bytes(
                    data, low, high, known, ends[found], ends[found + 1]
                ):
                    number = found
                    break
                slot = (slot + _ONE) & mask
            out[start + j] = number
    return count, touched
