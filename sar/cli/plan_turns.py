"""`sar plan --out-of-core`: one machine whose process takes the parts in turns."""

from __future__ import annotations

import argparse
import json
import shutil
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sar.cli.inspect import aligned
from sar.cli.options import parse_disk_rate
from sar.comm.environment import memory_left
from sar.config import parse_bytes
from sar.errors import SarError
from sar.files import scratch_folder
from sar.memory.machine import anonymous_bytes, check_folder
from sar.plan import (
    CLASSES,
    GraphStatistics,
    Turns,
    Work,
    from_book,
    measure_costs,
    predict_turns,
)
from sar.run_options import ModelOptions

_MANY = 1 << 50  # where the system does not say how much memory is left
_SMALL = 500_000  # nodes and edges
_SURELY = 0.7  # of what the plan says; less cannot do


def plan_turns(args: argparse.Namespace, graph: GraphStatistics, work: Work) -> int:
    """Print what training takes within the least memory, with all in memory, and ``--memory``."""
    memory = None if args.memory is None else parse_bytes(args.memory, "--memory")
    nodes, edges = graph.totals
    with scratch_folder() as folder:
        expect_disk(folder)
        found = predict_turns(work, graph.size, nodes, edges, folder, memory, threads=args.threads)
    costs = measure_costs(work, args.threads)
    compute = costs.fixed_seconds * graph.size
    compute += nodes * costs.node_seconds + edges * costs.edge_seconds
    disk = args.disk or "1GB/s"
    rate = parse_disk_rate(disk)
    names = ("least", "all in memory", "--memory")
    rows = {name: _told(one, compute, rate) for name, one in zip(names, found)}
    is_enough = None if memory is None else "--memory" in rows
    if args.json:
        head = {"graph": graph.name, "parts": graph.size, "disk": rate, "is_enough": is_enough}
        print(json.dumps(head | {"settings": rows}, indent=2))
        return 0
    print("\n".join(render(graph, rows, disk)))
    if is_enough is False:
        print(
            f"\n--memory: {args.memory} is too little, expected at least {found[0].memory:,} "
            "bytes, or a graph of more parts"
        )
    return 0


def expect_disk(folder: Path) -> None:
    """Raise for temporary files in memory."""
    try:
        check_folder(folder)
    except ValueError as error:
        raise ValueError(
            f"--out-of-core: temporary files are in memory ({folder}), and a model to scale of the "
            "run needs a disk; expected TMPDIR to name a folder on one"
        ) from error


def check_room(args: argparse.Namespace, model: ModelOptions) -> None:
    """Compare memory and free space with the plan of a graph that is not small, and print both:
    ``SarError`` where there is far too little, a warning where there may be. Of one's own model
    the run tells.
    """
    nodes, edges = (graph := from_book(args.input, args.features, args.target_type)).totals
    if model.is_own or not graph.features or nodes + edges < _SMALL:
        return
    memory = anonymous_bytes() + int(min(memory_left(), _MANY)) // 2
    if args.memory is not None:
        memory = parse_bytes(args.memory, "--memory")
    folder = Path(args.out_of_core).absolute()
    free = shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free
    classes = graph.classes or CLASSES
    work = Work(model, graph.features, classes, types=graph.types)
    try:
        (found,) = predict_turns(work, graph.size, nodes, edges, folder, memory, only=True)
    except SarError as error:
        warnings.warn(f"memory and free space were not planned: {error}", UserWarning, stacklevel=2)
        return
    told = (
        f"--memory: got {memory:,} bytes, the plan says {found.memory:,} {{}}; --out-of-core: "
        f"got {free:,} bytes free in {args.out_of_core!r}, the plan says {found.file_bytes:,}"
    ).format("are enough" if found.memory <= memory else "at least")
    share = min(memory / found.memory, free / max(1, found.file_bytes))
    if share < _SURELY:
        raise SarError(f"{told}; expected more, or a graph of more parts")
    if share < 1:
        warnings.warn(f"{told}; that may be too little", UserWarning, stacklevel=2)
    else:
        print(told, flush=True)


def _told(one: Turns, compute: float, rate: int) -> dict[str, Any]:
    disk = (one.read_bytes + one.written_bytes) / rate
    seconds = {"disk_seconds": disk, "compute_seconds": compute, "seconds": max(disk, compute)}
    return asdict(one) | {"blocks": [list(two) for two in one.blocks]} | seconds


def render(graph: GraphStatistics, rows: dict[str, dict[str, Any]], disk: str) -> list[str]:
    nodes, edges = graph.totals
    lines = [
        f"graph   {graph.name}, {nodes:,} nodes, {edges:,} edges, {graph.size} parts in turns",
        f"disk    {disk}",
        "",
    ]
    table = [
        ["memory", "peak", "read an epoch", "written", "free space", "disk", "compute", "epoch"]
    ]
    for name, one in rows.items():
        table.append(
            [name, f"{one['peak_bytes'] / 2**30:.2f} GiB"]
            + [f"{one[key] / 1e9:.3f} GB" for key in ("read_bytes", "written_bytes", "file_bytes")]
            + [f"{one[key]:.3g} s" for key in ("disk_seconds", "compute_seconds", "seconds")]
        )
    lines += [*aligned(table), ""]
    for name, one in rows.items():
        lines.append(f"columns in blocks, {name}: {_blocks(one['blocks'])}")
    if any(one["sends"] for one in rows.values()):
        lines.append("parts exchange rows: this is for a random cut, and others exchange fewer")
    return lines


def _blocks(found: list[list[int]]) -> str:
    """As "64 in 2 (4 sums)"."""
    counted = Counter((width, blocks) for width, blocks in found)
    each = [f"{width} in {blocks} ({n} sums)" for (width, blocks), n in counted.items()]
    return ", ".join(each) or "none"
