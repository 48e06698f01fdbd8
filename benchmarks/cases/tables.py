"""Graphs in tables, larger than memory: time and memory of a whole run of `sar partition`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.registry import Figure, Options, Report, Table, benchmark
from benchmarks.tasks.tables import folder_size, run, write_tables

PARTS, EDGES_A_NODE = 8, 10
EDGES = (10_000_000, 30_000_000, 100_000_000)
MOST_MEMORY, MOST_SECONDS = 1.5 * 2**30, 240
LINEAR = 1.3  # an edge of the largest graph may take so many times what one of the smallest takes


@benchmark("out-of-core", "partition")
def out_of_core(options: Options) -> Report:
    """`sar partition` of 10, 30 and 100 M edges in Parquet, symmetrised, balanced; 8 parts."""
    columns = ["edges", "nodes", "cpu s", "wall s", "memory MB", "scratch GB", "written GB"]
    title = "A whole run; memory is anonymous, scratch holds the output until it is whole"
    table = Table(title, columns)
    found = []
    options.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tables-", dir=options.cache) as name:
        for edges in EDGES:
            folder = Path(name, str(edges))
            nodes = edges // EDGES_A_NODE
            tables = write_tables(folder / "tables", nodes, edges)
            out = folder / "out"
            command = [sys.executable, "-m", "sar", "partition", str(tables), "--out", str(out)]
            taken = run(
                [*command, "--parts", str(PARTS), "--symmetrise", "--balance", "edges,halo"], folder
            )
            found.append(taken)
            sizes = [taken.memory / 1e6, taken.scratch / 1e9, folder_size(out) / 1e9]
            table.rows.append([edges, nodes, taken.cpu, taken.wall, *sizes])
            shutil.rmtree(folder)
    last = found[-1]
    first_rate, last_rate = found[0].cpu / EDGES[0], last.cpu / EDGES[-1]
    figures = [
        Figure("largest: memory", last.memory / 1e6, "MB", at_most=MOST_MEMORY / 1e6),
        Figure("largest: wall", last.wall, "s", at_most=MOST_SECONDS),
        Figure("cpu an edge, largest / smallest", last_rate / first_rate, at_most=LINEAR),
    ]
    return Report(figures, [table])
