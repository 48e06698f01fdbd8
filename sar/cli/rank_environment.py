"""What the ranks of this machine start with, and their parent, early where that saves time."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from sar.allocator import allocator_environment
from sar.cli.fork_server import ForkServer

# Beside the library: what the first step of an optimizer imports, and covers of `sar.edges`.
TRAINING = "sar._private:prepare_optimizers", "scipy.sparse.csgraph"
MODULES = {
    "train": ("sar.cli.train", *TRAINING),
    "evaluate": ("sar.cli.evaluate",),
    "sample-server": ("sar.cli.sample_server",),
}
_MOST_EARLY = 64  # ranks; more may be a slip of the pen, which is told later


def joined() -> bool:
    """Whether something else (``torchrun``, Slurm) already started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def worker_environment(
    nproc: int, threads: int | None, allocator: str = "system"
) -> dict[str, str]:
    """Environment variables of ranks; what the user has set stays."""
    share = max(1, len(os.sched_getaffinity(0)) // nproc)
    own = {"OMP_NUM_THREADS": str(share), "SAR_KEEP_THREADS": "1"}
    asked = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    wanted = {**allocator_environment(allocator), **own}
    kept = {name: os.environ[name] for name in wanted if os.environ.get(name)}
    return {**wanted, **kept, **asked}


def start_server(args: argparse.Namespace, size: int) -> ForkServer:
    """The parent of ``size`` ranks of a command, which begins to import what they need."""
    environment = worker_environment(size, args.threads, args.allocator)
    return ForkServer(size, environment, MODULES[args.command])


@contextmanager
def started_early(args: argparse.Namespace) -> Iterator[None]:
    """Inside, ``args.server`` is that of :func:`start_server`, if this process has still to import
    the same, and knows how many ranks there will be. They ask ``launch`` for it."""
    size = None
    if args.command in MODULES and not joined() and "torch" not in sys.modules:
        size = args.nproc or _parts_of(args.input)
        size = size if vars(args).get("out_of_core") is None else 1
    if size is None or not 1 <= size <= _MOST_EARLY:
        yield
        return
    with closing(start_server(args, size)) as args.server:
        yield


def _parts_of(path: str) -> int | None:
    """Of a JSON; ``None`` where there is none, which is told later."""
    with suppress(OSError, ValueError, LookupError, TypeError), open(path, "rb") as file:
        return int(json.load(file)["num_parts"]) if path.endswith(".json") else None
    return None
