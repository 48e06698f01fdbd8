"""Graphs in tables, larger than memory: time and memory of a whole run of `sar partition`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.registry import Figure, Options, Report, Table, benchmark
from benchmarks.tasks.tables import Taken, folder_size, run, write_tables

EDGES_A_NODE = 10
EDGES = (10_000_000, 30_000_000, 100_000_000)
MOST_MEMORY, MOST_SECONDS = 1.5 * 2**30, 240
LINEAR = 1.3  # an edge of the largest graph may take so many times what one of the smallest takes
BILLION, BILLION_MEMORY, BILLION_SECONDS = 10**9, 4 * 2**30, 1800
COLUMNS = ["edges", "nodes", "cpu s", "wall s", "memory MB", "scratch GB", "written GB"]
TITLE = "A whole run; memory is anonymous, scratch holds the output until it is whole"


@benchmark("out-of-core", "partition")
def out_of_core(options: Options) -> Report:
    """`sar partition` of 10, 30 and 100 M edges in Parquet, symmetrised, balanced; 8 parts."""
    table = Table(TITLE, COLUMNS)
    wanted = ["--parts", "8", "--symmetrise", "--balance", "edges,halo"]
    found = [_partition(options, table, n, n // EDGES_A_NODE, wanted) for n in EDGES]
    last = found[-1]
    first_rate, last_rate = found[0].cpu / EDGES[0], last.cpu / EDGES[-1]
    figures = [
        Figure("largest: memory", last.memory / 1e6, "MB", at_most=MOST_MEMORY / 1e6),
        Figure("largest: wall", last.wall, "s", at_most=MOST_SECONDS),
        Figure("cpu an edge, largest / smallest", last_rate / first_rate, at_most=LINEAR),
    ]
    return Report(figures, [table])


@benchmark("billion", "partition")
def billion(options: Options) -> Report:
    """`sar partition` of a billion directed edges, balanced; 16 parts. Takes 70 GB of disk."""
    table = Table(TITLE, COLUMNS)
    wanted = ["--parts", "16", "--balance", "edges,halo", "--memory", "4GiB"]
    taken = _partition(options, table, BILLION, BILLION // 20, wanted, features=0)
    figures = [
        Figure("memory", taken.memory / 1e6, "MB", at_most=BILLION_MEMORY / 1e6),
        Figure("wall", taken.wall, "s", at_most=BILLION_SECONDS),
    ]
    return Report(figures, [table])


def _partition(
    options: Options, table: Table, edges: int, nodes: int, wanted: list[str], features: int = 32
) -> Taken:
    """Make the tables, cut them, add a row; nothing stays."""
    options.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tables-", dir=options.cache) as name:
        folder = Path(name)
        tables = write_tables(folder / "tables", nodes, edges, features)
        out = folder / "out"
        command = [sys.executable, "-m", "sar", "partition", str(tables), "--out", str(out)]
        taken = run([*command, *wanted], folder)
        sizes = [taken.memory / 1e6, taken.scratch / 1e9, folder_size(out) / 1e9]
    table.rows.append([edges, nodes, taken.cpu, taken.wall, *sizes])
    return taken
