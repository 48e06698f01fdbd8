"""KaMinPar on a file, as a program of its own."""

from __future__ import annotations

import sys

import numpy as np


def main(out_path: str, num_parts: int, graph_path: str, seed: int, imbalance: float) -> None:
    """Cut a ParHIP file; the part of each node goes into the `.npy` file ``out_path``, int32.

    That file is there: the caller made it, and so learned of a full disk.
    One thread: with several the result differs from run to run.
    """
    import kaminpar

    kaminpar.reseed(seed)
    graph = kaminpar.load_graph(graph_path, kaminpar.GraphFileFormat.PARHIP)
    solver = kaminpar.KaMinPar(1, kaminpar.default_context())
    parts = solver.compute_partition(graph, num_parts, eps=imbalance)
    np.load(out_path, mmap_mode="r+")[:] = parts


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
