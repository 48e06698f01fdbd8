"""Tables larger than memory: made by a stream, and what a command takes that reads them."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.processes import anonymous_bytes, children

FILES, COMMUNITIES = 8, 256
_INSIDE = 0.75  # of the edges join nodes of the same community
_SKEW = 1.7  # an exponent: above 1, few nodes of a community have many edges
_BLOCK = 1 << 21
_EVERY = 0.05  # seconds between two looks at memory

DESCRIPTION = """
name: tables
nodes:
  _N:
    count: {nodes}
    columns:
{features}      label: {{files: nodes.parquet, column: label}}
      train_mask: {{files: nodes.parquet, column: train_mask}}
edges:
  - files: ["edges-*.parquet"]
    src: src
    dst: dst
"""


FEATURES = "      feat: {files: nodes.parquet, column: feat}\n"


def write_tables(folder: Path, nodes: int, edges: int, features: int) -> Path:
    """Parquet of edges, in one direction, and of nodes; returns their description."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    schema = pa.schema([("src", pa.int64()), ("dst", pa.int64())])
    for number in range(FILES):
        low, high = number * edges // FILES, (number + 1) * edges // FILES
        with pq.ParquetWriter(
            folder / f"edges-{number}.parquet", schema, compression="zstd"
        ) as writer:
            for at in range(low, high, _BLOCK):
                src, dst = _pairs(rng, nodes, min(_BLOCK, high - at))
                writer.write_table(pa.table({"src": src, "dst": dst}, schema))
    fields = [("label", pa.int64()), ("train_mask", pa.bool_())]
    if features:
        fields.append(("feat", pa.list_(pa.float32(), features)))
    schema = pa.schema(fields)
    with pq.ParquetWriter(folder / "nodes.parquet", schema) as writer:
        for at in range(0, nodes, _BLOCK // 8):
            count = min(_BLOCK // 8, nodes - at)
            columns = {"label": rng.integers(0, 10, count), "train_mask": rng.random(count) < 0.1}
            if features:
                rows = pa.array(rng.standard_normal(count * features, dtype=np.float32))
                columns["feat"] = pa.FixedSizeListArray.from_arrays(rows, features)
            writer.write_table(pa.table(columns, schema))
    path = folder / "tables.yaml"
    path.write_text(DESCRIPTION.format(nodes=nodes, features=FEATURES if features else ""))
    return path


def _pairs(rng: np.random.Generator, nodes: int, count: int) -> list[np.ndarray]:
    """Both ends of edges; neighbors in number are no neighbors in the graph."""
    size = nodes // COMMUNITIES
    first = rng.integers(0, COMMUNITIES, count)
    inside = rng.random(count) < _INSIDE
    second = np.where(inside, first, rng.integers(0, COMMUNITIES, count))
    ranks = [(rng.random(count) ** _SKEW * size).astype(np.int64) for _ in range(2)]
    return [(c * size + rank) * 7919 % nodes for c, rank in zip((first, second), ranks)]


@dataclass(frozen=True)
class Taken:
    """Seconds and bytes of a command and its children.

    Attributes:
        memory: the most anonymous memory of all processes together, sampled.
        scratch: the most that lay in hidden or temporary folders beside the output, sampled.
    """

    cpu: float
    wall: float
    memory: int
    scratch: int


def run(command: list[str], beside: Path) -> Taken:
    """Run it to its end. Raises ``RuntimeError`` when it fails."""
    before, start = _cpu(), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    memory = scratch = looks = 0
    while process.poll() is None:
        memory = max(memory, sum(map(anonymous_bytes, [process.pid, *children(process.pid)])))
        if looks % 20 == 0:
            scratch = max(scratch, sum(map(folder_size, beside.glob("sar-*"))))
        looks += 1
        time.sleep(_EVERY)
    if process.returncode:
        raise RuntimeError(f"{command}: status {process.returncode}")
    return Taken(_cpu() - before, time.perf_counter() - start, memory, scratch)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def folder_size(folder: Path) -> int:
    """Bytes of all files below it."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name)).st_size
            except OSError:  # it is gone by now
                continue
    return total
