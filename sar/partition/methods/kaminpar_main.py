"""KaMinPar on a file, in a process of its own, whose memory is given back when it ends."""

from __future__ import annotations

import sys

import numpy as np


def main(graph_path: str, out_path: str, num_parts: int, seed: int, imbalance: float) -> None:
    """Cut a ParHIP file; the part of each node goes to ``out_path``, int32 in `.npy`.

    One thread: with several the result differs from run to run.
    """
    import kaminpar

    kaminpar.reseed(seed)
    graph = kaminpar.load_graph(graph_path, kaminpar.GraphFileFormat.PARHIP, compress=True)
    solver = kaminpar.KaMinPar(1, kaminpar.default_context())
    parts = solver.compute_partition(graph, num_parts, eps=imbalance)
    np.save(out_path, np.array(parts, np.int32))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
