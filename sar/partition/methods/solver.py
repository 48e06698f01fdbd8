"""Solvers of others, METIS and KaMinPar, each in a process of its own.

Memory is given back when that process ends, and its crash is an error here. Both solvers read
memory that they have not written: KaMinPar whether nodes of a coarse graph are sorted by degree,
METIS the median weight of a coarse node's edges. With glibc they read zeros, whatever was there.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np

from sar.errors import MissingDependencyError, PartitionError
from sar.partition import child
from sar.partition.arrays import GraphArrays
from sar.partition.column import create_array
from sar.partition.methods import solver_main
from sar.partition.methods.base import CutOptions, Method, equal_shares
from sar.partition.methods.graph import cut_graph
from sar.partition.progress import Counter
from sar.partition.require import where_to_get_dgl

_CLEARED = {"GLIBC_TUNABLES": "glibc.malloc.perturb=255:glibc.malloc.tcache_count=0"}


# Of a function of ``solver_main.py``: library, method that uses it, package, where to get that.
_LIBRARIES = {
    "kaminpar": ("KaMinPar", "coarsen", "kaminpar", "pip install kaminpar"),
    "metis": ("METIS", "metis", "dgl", f"{where_to_get_dgl()}; method 'coarsen' does without it"),
}


def solve(function: str, out: Path, count: int, num_parts: int, *arguments: object) -> np.ndarray:
    """int32 [count] parts, mapped from the new file ``out``, which ``function`` of
    ``solver_main.py`` fills. Raises MissingDependencyError without its package, PartitionError when
    the program fails, ``OSError`` for a full disk."""
    library, method, package, missing = _LIBRARIES[function]
    parts = create_array(out, np.int32, (count,))
    done = subprocess.run(
        child.command(solver_main.__file__, function, out, num_parts, *arguments),
        env=environment(), capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [child.death(done.returncode)])[-1]
        if f"No module named '{package}'" in last:
            raise MissingDependencyError(f"method {method!r} needs {package}: {missing}")
        raise PartitionError(f"{library} found no cut into {num_parts} parts: {last}")
    return parts


def environment() -> dict[str, str]:
    """This process' environment, with glibc's allocator and its memory cleared."""
    changed = {**os.environ, **_CLEARED}
    changed.pop("MALLOC_PERTURB_", None)  # fills memory with something else
    preloaded = re.split("[: ]+", changed.get("LD_PRELOAD", ""))
    changed["LD_PRELOAD"] = ":".join(name for name in preloaded if "malloc" not in name)
    return changed


class Metis(Method):
    """METIS' recursive bisection; needs dgl, and some hundred bytes an edge in memory.

    Each node type is balanced. With ``edges`` the in-edges of each are balanced too: that cuts a
    few more edges, and no part has several times the work of the others. By itself it does so for
    graphs of one node type; with several, METIS then loses hold of both.
    """

    name = "metis"
    balances = frozenset({"edges"})

    def assign(self, graph: GraphArrays, options: CutOptions) -> np.ndarray:
        """Raises MissingDependencyError without dgl, PartitionError when METIS gives up."""
        balance, nodes = options.balance, graph.total_nodes
        if balance is None:
            balance = self.balances if len(graph.num_nodes) == 1 else frozenset()
        whole, folder = cut_graph(graph, options.scratch, options.progress), options.scratch
        # METIS has nothing to work with here, or complains of pieces without a node.
        if len(whole.rows.values) == 0 or 2 * options.num_parts > nodes:
            return equal_shares(graph, options.num_parts, None)
        create_array(folder / "types.npy", np.int16, (nodes,))[:] = whole.types
        counter = Counter(options.progress, "cutting the graph", nodes)
        settings = folder, options.seed, int("edges" in balance)
        parts = solve("metis", folder / "parts.npy", nodes, options.num_parts, *settings)
        counter.add(nodes)
        return np.array(parts)
