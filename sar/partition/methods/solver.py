"""Solvers of others, each in a process of its own.

Memory is given back when that process ends, and its crash is an error here. Both solvers read
memory that they have not written: KaMinPar whether nodes of a coarse graph are sorted by degree,
METIS the median weight of a coarse node's edges. With glibc they read zeros, whatever was there.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sar.errors import MissingDependencyError, PartitionError
from sar.partition import child
from sar.partition.column import create_array

_CLEARED = {"GLIBC_TUNABLES": "glibc.malloc.perturb=255:glibc.malloc.tcache_count=0"}


@dataclass(frozen=True)
class Solver:
    """A program that reads files and writes the part of each node into another.

    Attributes:
        name: of the library. method: what uses it. package: what it imports. requirement: what pip
            installs for it.
        file: of the program; its arguments are the path of the result, the number of parts, and
            what else :meth:`solve` gets.
    """

    name: str
    method: str
    package: str
    requirement: str
    file: str

    def solve(self, out: Path, count: int, num_parts: int, *arguments: object) -> np.ndarray:
        """int32 [count], mapped from the new file ``out``.

        Raises MissingDependencyError without the package, PartitionError when the program fails,
        ``OSError`` for a full disk.
        """
        parts = create_array(out, np.int32, (count,))
        done = subprocess.run(
            child.command(self.file, out, num_parts, *arguments),
            env=environment(), capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [child.death(done.returncode)])[-1]
            if f"No module named '{self.package}'" in last:
                raise MissingDependencyError(
                    f"method {self.method!r} needs {self.package}: pip install {self.requirement}"
                )
            raise PartitionError(f"{self.name} found no cut into {num_parts} parts: {last}")
        return parts


def environment() -> dict[str, str]:
    """That of this process, with glibc's memory, which is cleared."""
    changed = {**os.environ, **_CLEARED}
    changed.pop("MALLOC_PERTURB_", None)  # fills memory with something else
    preloaded = re.split("[: ]+", changed.get("LD_PRELOAD", ""))
    changed["LD_PRELOAD"] = ":".join(name for name in preloaded if "malloc" not in name)
    return changed
