"""`sar bench`: memory, speed, bandwidth and traffic on this machine, beside DGL in one process."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sar
from sar.errors import MissingDependencyError, SarError
from sar.partition.cut import METHODS

MODELS = ("sage", "gat", "gatv2")
CACHE = Path("build/benchmarks")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "bench",
        help="measure memory, speed and traffic on this machine",
        description="Train one model on a generated graph with DGL in one process and with several "
        "numbers of ranks, in turns, and write tables and plots.",
    )
    add_arguments(parser, MODELS)
    return parser


def add_arguments(parser: argparse.ArgumentParser, models: Sequence[str]) -> None:
    """The options, which the measuring process takes as well."""
    parser.add_argument("--scale", type=int, default=15, help="2^SCALE nodes, default 15")
    parser.add_argument("--method", choices=METHODS, default="metis", help="of the cuts")
    parser.add_argument("--model", choices=models, default="sage", help="default: sage")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], metavar="P", help="default 1 2 4"
    )
    parser.add_argument("--epochs", type=int, default=5, help="measured ones, default 5")
    parser.add_argument(
        "--bandwidth", nargs="*", default=["100mbit", "300mbit", "1gbit"], metavar="RATE",
        help="of hosts' links, where namespaces can be made; default 100mbit 300mbit 1gbit",
    )  # fmt: skip
    parser.add_argument("--sar-path", type=Path, metavar="CHECKOUT", help="IntelLabs SAR, beside")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder, default bench")
    parser.add_argument("--cache", type=Path, default=CACHE, help="of generated graphs")


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ``ValueError`` for what cannot be measured."""
    from sar.cli.plan import parse_rate

    if not 8 <= args.scale <= 26:
        raise ValueError(f"--scale: got {args.scale}, expected 8 to 26")
    if min(args.ranks) < 1:
        raise ValueError(f"--ranks: got {min(args.ranks)}, expected at least 1")
    if args.epochs < 1:
        raise ValueError(f"--epochs: got {args.epochs}, expected at least 1")
    for rate in args.bandwidth:
        parse_rate(rate)
    if args.sar_path is not None and not (args.sar_path / "sar").is_dir():
        raise ValueError(f"--sar-path: {args.sar_path} holds no folder 'sar', expected a checkout")
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out: {args.out} is a file, expected a folder")


def run(args: argparse.Namespace) -> int:
    """Check the options and run the measuring package in a process of its own."""
    check_arguments(args)
    try:
        import matplotlib  # noqa: F401 - before minutes of measuring
    except ImportError as error:
        raise MissingDependencyError("sar bench draws plots: pip install matplotlib") from error
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
    words = []
    for name in ("scale", "method", "model", "epochs", "out", "cache"):
        words += [f"--{name}", str(getattr(args, name))]
    words += ["--ranks", *map(str, args.ranks), "--bandwidth", *args.bandwidth]
    return words + (["--sar-path", str(args.sar_path)] if args.sar_path is not None else [])
