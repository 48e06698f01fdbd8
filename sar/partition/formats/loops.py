"""Compiled loops over nodes and edges; they are kept on disk, and let other threads run.

Ids and parts are not checked: `GraphArrays.validate` did.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sar.partition.compiled import compiled, inlined

WORD = 64  # bits of an element of a bitmap
_ONE, _SIX = np.uint64(1), np.uint64(6)
_LOW = np.uint64(WORD - 1)


@compiled
def number_nodes(parts: Any, following: Any, new_ids: Any) -> None:
    """Give each node the next id of its part: int64 [P] ``following``, which moves on."""
    for i in range(len(parts)):
        new_ids[i] = following[parts[i]]
        following[parts[i]] += 1


@compiled
def count_each(parts: Any, counts: Any) -> None:
    """Add to int64 [P] ``counts`` how often each part comes."""
    for i in range(len(parts)):
        counts[parts[i]] += 1


@compiled
def count_parts(ids: Any, part_of: Any, counts: Any) -> None:
    """Add to int64 [P] ``counts`` the parts of nodes, one for each time that one comes."""
    for i in range(len(ids)):
        counts[part_of[ids[i]]] += 1


@compiled
def group_nodes(parts: Any, at: Any, order: Any) -> None:
    """int32 [n] rows, part after part and ascending inside each.

    Args:
        at: int64 [P], where each part's rows begin; moves on to where they end.
    """
    for i in range(len(parts)):
        place = at[parts[i]]
        at[parts[i]] = place + 1
        order[place] = i


@compiled
def group_edges(
    src: Any, dst: Any, part_of: Any, src_ids: Any, dst_ids: Any, first: Any, at: Any,
    out_src: Any, out_dst: Any, order: Any,
) -> None:  # fmt: skip
    """Edges [e] by the part of their destination, in their order inside each part.

    Args:
        part_of, dst_ids: part and new id of the nodes of the destinations' type.
        src_ids: new ids of the nodes of the sources' type.
        first: int64 [P], the first node of each part.
        at: as in :func:`group_nodes`.
        out_src: int64 [e], gets new ids of sources.
        out_dst: int64 [e], gets rows of destinations inside their part.
        order: int32 [e], gets positions in the order in which the edges came.
    """
    for e in range(len(src)):
        node = dst[e]
        part = part_of[node]
        place = at[part]
        at[part] = place + 1
        out_src[place] = src_ids[src[e]]
        out_dst[place] = dst_ids[node] - first[part]
        order[place] = e


@compiled
def mark_remote(ids: Any, start: int, stop: int, bitmap: Any) -> None:
    """Set the bits of ids outside [start, stop)."""
    for i in range(len(ids)):
        one = ids[i]
        if one < start or one >= stop:
            bit = np.uint64(one)
            bitmap[bit >> _SIX] |= _ONE << (bit & _LOW)


@inlined
def _ones(word: Any) -> Any:
    """How many bits are set; LLVM makes one instruction of it."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + (
        (word >> np.uint64(2)) & np.uint64(0x3333333333333333)
    )
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (word * np.uint64(0x0101010101010101)) >> np.uint64(56)


@compiled
def count_before(bitmap: Any, before: Any) -> None:
    """int64 [words + 1]: bits that are set before each word, and all."""
    total = np.int64(0)
    for i in range(len(bitmap)):
        before[i] = total
        total += np.int64(_ones(bitmap[i]))
    before[len(bitmap)] = total


@compiled
def make_local(ids: Any, start: int, stop: int, bitmap: Any, before: Any) -> None:
    """In place: inner nodes count from 0, then those in the bitmap in ascending order."""
    for i in range(len(ids)):
        one = ids[i]
        if start <= one < stop:
            ids[i] = one - start
        else:
            bit = np.uint64(one)
            below = bitmap[bit >> _SIX] & ((_ONE << (bit & _LOW)) - _ONE)
            ids[i] = stop - start + before[bit >> _SIX] + np.int64(_ones(below))


@compiled
def list_bits(words: Any, first: int, out: Any) -> None:
    """int64 [n], ascending: the bits that are set, counted from ``first``."""
    at = 0
    for i in range(len(words)):
        word, bit = words[i], first + i * WORD
        while word:
            if word & _ONE:
                out[at] = bit
                at += 1
            word >>= _ONE
            bit += 1
