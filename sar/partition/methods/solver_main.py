"""KaMinPar and DGL's METIS on files, as a program: its arguments are a function's name and
arguments.

The caller has made the file for the result, and so learned of a full disk.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def kaminpar(out_path: str, num_parts: int, graph_path: str, seed: int, imbalance: float) -> None:
    """Cut a ParHIP file; int32 parts of the nodes go into the `.npy` file ``out_path``. One thread:
    with several the result differs from run to run."""
    import kaminpar

    kaminpar.reseed(seed)
    graph = kaminpar.load_graph(graph_path, kaminpar.GraphFileFormat.PARHIP)
    solver = kaminpar.KaMinPar(1, kaminpar.default_context())
    parts = solver.compute_partition(graph, num_parts, eps=imbalance)
    np.load(out_path, mmap_mode="r+")[:] = parts


def metis(out_path: str, num_parts: int, folder: str, seed: int, balance_edges: float) -> None:
    """Cut the graph in ``folder``; int32 parts of the nodes go into the `.npy` file ``out_path``.

    The folder has ``indptr.npy`` and ``values.npy``, a symmetric graph without loops and
    multi-edges, which make METIS write past its buffers, and ``types.npy``, int16 [N]: nodes of
    each type are balanced, and with ``balance_edges`` their in-edges too. Raises ``SystemExit``
    when METIS gives up.
    """
    import dgl
    import torch

    from sar._private import dgl_metis

    indptr, types = (np.load(Path(folder, f"{name}.npy")) for name in ("indptr", "types"))
    nodes = len(types)
    # It takes no seed from DGL: another seed is another order of the nodes.
    order = np.random.default_rng(seed).permutation(nodes) if seed else np.arange(nodes)
    src = np.repeat(order, np.diff(indptr))
    dst = order[np.load(Path(folder, "values.npy"), mmap_mode="r")[: len(src)]]
    ordered = np.empty_like(types)
    ordered[order] = types
    weights = torch.from_numpy(_weights(dst, ordered, balance_edges))
    cut, index, given = dgl_metis(dgl.graph((src, dst), num_nodes=nodes), weights)
    # Recursive bisection, not k-way: it cuts fewer edges on nearly every graph tried.
    fewest_edges = True
    found = cut(index, num_parts, given, "recursive", fewest_edges).asnumpy()
    if len(found) == 0:
        raise SystemExit("it gave up; method 'random' does not")
    np.load(out_path, mmap_mode="r+")[:] = found[order]


def _weights(dst: np.ndarray, types: np.ndarray, balance_edges: float) -> np.ndarray:
    """What METIS balances: int64 [N * constraints], each node's weights beside each other."""
    members = [types == number for number in np.unique(types)]
    if len(members) < 2 and not balance_edges:
        return np.zeros(0, dtype=np.int64)  # nodes count one each
    if balance_edges:
        degrees = np.bincount(dst, minlength=len(types))
        members += [np.where(member, degrees, 0) for member in members]
    return np.stack(members, axis=1).astype(np.int64).reshape(-1)


if __name__ == "__main__":
    name, out, parts, graph, seed, last = sys.argv[1:]
    solve = kaminpar if name == "kaminpar" else metis
    solve(out, int(parts), graph, int(seed), float(last))
