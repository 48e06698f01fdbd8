"""KaMinPar on a file, in a process of its own, whose memory is given back when it ends."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # its folder has modules whose names others may have, too
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]

import numpy as np  # noqa: E402

# KaMinPar reads a flag of its graphs that it has not written: whether nodes are sorted by degree.
# With this glibc clears memory that it gives out, so that the flag says no, which is true.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.perturb=255:glibc.malloc.tcache_count=0"}


def main(graph_path: str, out_path: str, num_parts: int, seed: int, imbalance: float) -> None:
    """Cut a ParHIP file; the part of each node goes into the `.npy` file ``out_path``, int32.

    That file is there: the caller made it, and so learned of a full disk.
    One thread: with several the result differs from run to run. :data:`ENVIRONMENT` is needed for
    the same reason.
    """
    import kaminpar

    kaminpar.reseed(seed)
    graph = kaminpar.load_graph(graph_path, kaminpar.GraphFileFormat.PARHIP, compress=True)
    solver = kaminpar.KaMinPar(1, kaminpar.default_context())
    parts = solver.compute_partition(graph, num_parts, eps=imbalance)
    np.load(out_path, mmap_mode="r+")[:] = parts


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
