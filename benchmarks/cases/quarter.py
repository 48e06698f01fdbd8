"""Models out of core in a quarter of the memory that they need in memory: the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, ROOT
from benchmarks.processes import joining, memory_group, most_bytes, no_memory_groups
from benchmarks.registry import Figure, Options, Report, Table, benchmark
from benchmarks.tasks.quarter import MODELS, TYPED
from sar.partition.sources.generate import bibliography_graph

NODES, PAPERS, PARTS = 1 << 18, 1 << 17, 16
ANONYMOUS = 0.8  # of a quarter: the rest is for page cache, which counts, and for what is not seen
SHARE = {TYPED: 2}  # whose edges are many small tensors, which stay in memory
Told = dict[str, Any]


@benchmark("quarter", "limits")
def quarter(options: Options) -> Report:
    """Layers, wirings, an edge program and several types, out of core in a control group.

    It holds, above an interpreter with its imports, a quarter of what the run in memory needs above
    that; the page cache counts.
    """
    if why := no_memory_groups():
        return Report(skipped=why)
    cut = ("random", PARTS)
    plain = graphs.community(options, [cut], NODES, 8 * NODES).parts[cut]
    make = partial(bibliography_graph, papers=PAPERS)
    typed = graphs.partitions(options, f"bibliography-{PAPERS}", make, [cut])[cut]
    columns = ["model", "in memory MB", "group MB", "peak MB", "read GB", "written GB",
               "CPU s", "in memory CPU s", "same bits", "lived longest"]  # fmt: skip
    table = Table(f"{NODES} nodes, {PARTS} parts, MB above those of the bare process", columns)
    report = Report(tables=[table])
    for name in [*MODELS, TYPED]:
        parts = str(typed if name == TYPED else plain)
        line, same = _compare(parts, name)
        print(line, flush=True)
        table.rows.append([name, *line])
        report.figures.append(
            Figure(f"{name}: the same bits in 1 / {SHARE.get(name, 4)}", same, at_least=1)
        )
    return report


def _compare(parts: str, name: str) -> tuple[list[Any], bool]:
    """A line of the table behind the name, and whether all bits are the same."""
    bare, bare_group = run([parts])
    want, _ = run([parts, name])
    for one in (bare, want):
        if "error" in one:
            raise RuntimeError(f"{name}, in memory: {one['error']}")
    need = want["peak"] - bare["peak"]
    above = need // SHARE.get(name, 4)
    limit, memory = bare_group + above, bare["anonymous"] + int(ANONYMOUS * above)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        got, most = run([parts, name, folder, str(memory)], limit)
    if "error" in got:
        print(name, got["error"])
    same = got.get("found") == want["found"]
    kept = next(iter(got.get("kept", {"": 0})))
    moved = [got.get(f"{what}_bytes", 0) / 1e9 for what in ("read", "written")]
    peak = (most - bare_group) / 1e6
    cpu = [got.get("cpu", 0), want["cpu"]]
    return [need / 1e6, above / 1e6, peak, *moved, *cpu, same, kept], same


def run(words: list[str], limit: int = -1) -> tuple[Told, int]:
    """What a task tells, or its ``error``, and the most bytes that its group had."""
    command = [sys.executable, "-m", "benchmarks.tasks.quarter", *words]
    with memory_group(limit) as group:
        done = subprocess.run(
            joining(group, command), capture_output=True, text=True, cwd=ROOT,
            env={**os.environ, **LAUNCH, "PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip
        most = most_bytes(group)
    if done.returncode:
        return {"error": f"status {done.returncode}: {done.stderr[-600:]}"}, most
    return json.loads(done.stdout.splitlines()[-1]), most
