"""Training on a graph that is larger than memory, in a memory group of the kernel's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, ROOT
from benchmarks.processes import joining, memory_group, most_bytes, no_memory_groups
from benchmarks.registry import Figure, Options, Report, Table, benchmark
from benchmarks.tasks.larger import WIDTHS

PARTS = 16
LIMIT, BARE = 1 << 30, 400 << 20  # bytes of the group; of them what no smaller graph saves
SHARE, BLOCKS = 0.81, 2  # of the limit, for what no file backs: half of a layer's columns fit then
SMALL_SCALE = 16
BYTES, SECONDS, SINGLE, DOUBLE = 1.3, 1.5, 1e-5, 1e-12


@benchmark("larger", "limits")
def larger(options: Options) -> Report:
    """Out of core in 1 GiB, page cache included / in memory: 2.1 M nodes, 33.5 M edges, SAGE.

    In turn, an epoch each: ranks that are threads, all in memory (6 GB), and ranks in turns. Then
    bits and gradients in float64 on 65,536 nodes. Makes a control group of version 1, as root.
    """
    if why := no_memory_groups():
        return Report(skipped=why)
    options.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.cache) as folder:
        report = _full(options, Path(folder))
        report.figures += _small(options, Path(folder))
    return report


def _full(options: Options, folder: Path) -> Report:
    nodes = 1 << options.scale
    parts = graphs.near(options, nodes, PARTS, torch.float32)
    limit = BARE + (LIMIT - BARE) * nodes // (1 << 21)
    columns = ["", "cpu s", "of the system", "GB read", "GB written", "peak MB"]
    table = Table(f"An epoch of {nodes:,} nodes and {16 * nodes:,} edges", columns)
    runs = list[tuple[dict[str, Any], dict[str, Any]]]()
    for _ in range(min(options.repeats, 3)):
        inside = _run(parts, folder)
        outside = _run(parts, folder, limit, spill=str(folder), memory=int(limit * SHARE))
        runs.append((inside, outside))
        for name, one in (("in memory", inside), ("out of core", outside)):
            sizes = [one[key] / 1e9 for key in ("read", "written")]
            peak = one.get("peak", 0) / 1e6
            table.rows.append([name, _cpu(one), one["system"], *sizes, peak])
    reads, writes = model_bytes(nodes, 16 * nodes)
    table.rows.append(["model", "", "", reads / 1e9, writes / 1e9, ""])
    moved = [one["read"] + one["written"] for _, one in runs]
    ratio = median(_cpu(outside) / _cpu(inside) for inside, outside in runs)
    figures = [
        Figure("bytes / the model's", median(moved) / (reads + writes), at_most=BYTES),
        Figure("cpu, out of core / in memory", ratio, at_most=SECONDS),
        Figure("peak / the group's limit", max(one["peak"] for _, one in runs) / limit, at_most=1),
        Figure("gradients, float32", max(_apart(*one) for one in runs), at_most=SINGLE),
        Figure("the same, of their tensor's", max(_apart(*one, each=True) for one in runs)),
    ]
    return Report(figures, [table])


def _small(options: Options, folder: Path) -> list[Figure]:
    """Gradients in float64, and bits of one and of four blocks of columns."""
    nodes = 1 << SMALL_SCALE
    parts = graphs.near(options, nodes, PARTS, torch.float64)
    inside, outside = _run(parts, folder), dict[int, Any]()
    for blocks in (1, 4):
        table = 8 * nodes * 64 // blocks + 6 * 8 * nodes * 64 // PARTS
        outside[blocks] = _run(
            parts, folder, spill=str(folder), room=144 << 20, table=table, warm=True
        )
    others = sum(not torch.equal(*pair) for pair in _pairs(outside[1], outside[4]))
    return [
        Figure("gradients, float64", _apart(inside, outside[1], each=True), at_most=DOUBLE),
        Figure("moved, float64", outside[4]["moved"] / 1e6, "MB", at_least=100),
        Figure("gradients that differ, a block / four", others, at_most=0),
    ]


def model_bytes(nodes: int, edges: int, widths: tuple[int, ...] = WIDTHS) -> tuple[int, int]:
    """Bytes of float32 that an epoch has to read and to write where the table takes the widest sum
    in ``BLOCKS`` blocks of columns."""
    ends, last = 4 * (edges + nodes), len(widths) - 2
    summed = [min(pair) for pair in pairwise(widths)]
    reads = writes = 0
    for layer, (wide, narrow) in enumerate(pairwise(widths)):
        blocks = -(-summed[layer] * BLOCKS // max(summed))
        projects = layer < last and (wide > narrow or blocks > 1)  # own rows for each block
        back = narrow if layer < last else 0
        columns = wide + blocks * wide * projects + back + blocks * wide
        reads += 2 * blocks * ends + 4 * nodes * columns
        writes += 4 * nodes * (back + (wide if layer else 0))
    return reads, writes


def _run(parts: Path, folder: Path, limit: int = 0, **options: Any) -> dict[str, Any]:
    """What a process prints that trains, in a group of ``limit`` bytes if given; its gradients."""
    result = folder / "grads.pt"
    task = [sys.executable, "-m", "benchmarks.tasks.larger", str(parts), str(result)]
    task.append(json.dumps(options))
    with memory_group(limit) if limit else nullcontext() as group:
        done = subprocess.run(
            joining(group, task) if group else task, cwd=ROOT, env={**os.environ, **LAUNCH},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"training ended with {done.returncode}: {done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        if group is not None:
            found["peak"] = most_bytes(group)
    return {**found, "grads": torch.load(result)}


def _cpu(found: dict[str, Any]) -> float:
    return found["user"] + found["system"]


def _pairs(one: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    return zip(one["grads"], other["grads"], strict=True)


def _apart(one: dict[str, Any], other: dict[str, Any], each: bool = False) -> float:
    """The largest difference of gradients, as a share of the largest of all, or of ``each``
    tensor's largest, which cancellation makes small in the first layer."""
    tops = [float(a.abs().max()) for a in one["grads"]]
    apart = [float((a - b).abs().max()) for a, b in _pairs(one, other)]
    if not each:
        return max(apart) / max(tops)
    return max(gap / top for gap, top in zip(apart, tops, strict=True))
