"""`sar bench`: memory, speed, bandwidth and traffic on this machine, beside DGL in one process."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import sar
from sar.cli.commands import COMMANDS
from sar.cli.pictures import need_matplotlib
from sar.errors import SarError
from sar.options import FLAG


def run(args: argparse.Namespace) -> int:
    """Run the measuring package in a process of its own."""
    need_matplotlib("sar bench")  # before minutes of measuring
    root = package_root()
    words = [sys.executable, "-m", "benchmarks.tables", *_words(args)]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, check=False)
    if done.returncode:
        raise SarError(f"the measurement ended with status {done.returncode}")
    return 0


def package_root() -> Path:
    """The folder that holds the package ``benchmarks``: the source tree, or what came with a wheel.

    Raises ``SarError`` where neither has it.
    """
    package = Path(sar.__file__).resolve().parent
    for root in (package.parent, package / "_bench"):
        if (root / "benchmarks" / "tables").is_dir():
            return root
    raise SarError("this installation has no 'benchmarks' folder: reinstall sar-gnn")


def _words(args: argparse.Namespace) -> list[str]:
    """The command's words once more, of the options that have a value."""
    words = []
    for one in COMMANDS["bench"].groups[0].options:
        value = getattr(args, one.name)
        if one.kind is FLAG:
            words += one.flags * value
        elif value is not None:
            words += [*one.flags, *map(str, value if one.many else [value])]
    return words
