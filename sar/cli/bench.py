"""`sar bench`: memory, speed, bandwidth and traffic on this machine, beside DGL in one process."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import sar
from sar.cli.pictures import need_matplotlib
from sar.errors import SarError


def run(args: argparse.Namespace) -> int:
    need_matplotlib("sar bench")  # before minutes of measuring
    root = package_root()
    words = [sys.executable, "-m", "benchmarks.tables", *shlex.split(args.typed)[2:]]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, check=False)
    if done.returncode:
        raise SarError(f"the measurement ended with status {done.returncode}")
    return 0


def package_root() -> Path:
    """The folder that holds the package ``benchmarks``: the source tree, or what came with a wheel.
    Raises ``SarError`` where neither has it."""
    package = Path(sar.__file__).resolve().parent
    for root in (package.parent, package / "_bench"):
        if (root / "benchmarks" / "tables").is_dir():
            return root
    raise SarError("this installation has no 'benchmarks' folder: reinstall sar-gnn")
