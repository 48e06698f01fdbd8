"""METIS through DGL, so that the same graph gives the same cut whatever the process did before."""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch

from sar._private import dgl_metis
from sar.errors import PartitionError
from sar.partition.require import require_dgl

_M_PERTURB = -6  # <malloc.h>
_RECYCLED = range(24, 1033, 16)  # bytes; one size of each kind that glibc keeps for a thread
_BLOCKS_PER_SIZE = 64
# METIS draws from the process's one `rand`, and M_PERTURB is the process's, too.
_alone = threading.Lock()


def metis(
    src: np.ndarray, dst: np.ndarray, types: np.ndarray, num_parts: int, balance_edges: bool
) -> np.ndarray:
    """Partition id of every node, int64 [N].

    `src`, `dst`: int64 [E], a symmetric graph without loops and without multi-edges, which make
    METIS write past its buffers. `types`: int64 [N], from 0 on; nodes of each type are balanced,
    and with `balance_edges` the in-edges of each type as well.

    Raises MissingDependencyError without dgl, PartitionError when METIS gives up.
    """
    dgl = require_dgl("method 'metis' ('random' does not)")
    graph = dgl.graph((src, dst), num_nodes=len(types))
    weights = torch.from_numpy(_weights(dst, types, balance_edges))
    function, index, weights_of_dgl = dgl_metis(graph, weights)
    # What DGL's metis_partition_assignment ends in. Its Python before that leaves its own blocks
    # behind on the thread. Recursive bisection, not k-way: it cuts fewer edges on nearly every
    # graph tried, and k-way depends even more on what memory held before.
    with _alone, _quiet(), _cleared_memory() as call:
        found = call(
            function,
            index,
            num_parts,
            weights_of_dgl,
            "recursive",
            True,  # fewest edges cut
        )
    if len(found) == 0:
        raise PartitionError(
            f"METIS found no cut of {len(types)} nodes into {num_parts} partitions; "
            "use method 'random'"
        )
    return found.asnumpy().astype(np.int64)


def _weights(dst: np.ndarray, types: np.ndarray, balance_edges: bool) -> np.ndarray:
    """What METIS balances: int64 [N * constraints], each node's weights beside each other."""
    several = len(np.unique(types)) > 1
    if not several and not balance_edges:
        return np.zeros(0, dtype=np.int64)  # nodes count one each
    members = [types == number for number in np.unique(types)]
    if balance_edges:
        degrees = np.bincount(dst, minlength=len(types))
        members += [np.where(member, degrees, 0) for member in members]
    return np.stack(members, axis=1).astype(np.int64).reshape(-1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what compiled code writes to stderr: DGL's METIS reports every call there."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def _cleared_memory() -> Iterator[Callable]:
    """Gives a function that calls another one where glibc hands out memory without old contents.

    METIS reads memory before it writes it (as the median weight of a coarse node's edges, where it
    has fewer of them than half its members had), so that its result would depend on what the
    process did before. The call runs on a thread of its own, because glibc recycles a thread's
    small blocks as they are; those that an earlier thread left behind are overwritten first.
    Elsewhere than glibc it is a plain call.
    """
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    if libc is None or not hasattr(libc, "mallopt"):
        yield lambda function, *args: function(*args)
        return
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]

    def call(function, *args):
        blocks = [(libc.malloc(size), size) for size in _RECYCLED for _ in range(_BLOCKS_PER_SIZE)]
        for block, size in blocks:
            ctypes.memset(block, 0, size)
            libc.free(block)
        return function(*args)

    # New memory is filled with zeros, given back with ones: both let METIS keep an edge.
    libc.mallopt(_M_PERTURB, 0xFF)
    try:
        with ThreadPoolExecutor(1) as thread:
            yield lambda *args: thread.submit(call, *args).result()
    finally:
        libc.mallopt(_M_PERTURB, 0)
