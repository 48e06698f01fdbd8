"""The options of `sar bench`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sar.cli.parser import Parser
from sar.cli.values import positive, rate, whole
from sar.words import METHODS

MODELS = ("sage", "gat", "gatv2")
CACHE = Path("build/benchmarks")


def add_parser(subparsers: Any) -> Parser:
    parser = subparsers.add_parser(
        "bench",
        help="measure memory, speed and traffic on this machine",
        description="Train one model on a generated graph with DGL in one process and with several "
        "numbers of ranks, in turns, and write tables and plots.",
    )
    add_arguments(parser.add_argument_group("measurement"), MODELS)
    return parser


def add_arguments(parser: Any, models: Sequence[str]) -> None:
    """The options, which the measuring process takes as well."""
    parser.add_argument("--scale", type=whole(8), default=15, help="2^SCALE nodes, at most 26")
    parser.add_argument("--method", choices=METHODS, default="metis", help="of the cuts")
    parser.add_argument("--model", choices=models, default="sage", help="what is trained")
    parser.add_argument(
        "--ranks", type=positive, nargs="+", default=[1, 2, 4], metavar="P", help="numbers of ranks"
    )
    parser.add_argument("--epochs", type=positive, default=5, help="measured ones")
    parser.add_argument(
        "--bandwidth", type=rate, nargs="*", default=["100mbit", "300mbit", "1gbit"],
        metavar="RATE", help="of hosts' links, where namespaces can be made",
    )  # fmt: skip
    parser.add_argument("--sar-path", type=Path, metavar="CHECKOUT", help="IntelLabs SAR, beside")
    parser.add_argument(
        "--out", type=Path, default=Path("bench"), metavar="DIR", help="folder to write in"
    )
    parser.add_argument("--dark", action="store_true", help="draw on a dark ground")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, metavar="DIR", help="of generated graphs"
    )


def check(args: argparse.Namespace) -> Iterator[str]:
    """What cannot be measured."""
    if args.scale > 26:
        yield f"--scale: got {args.scale}, expected 8 to 26"
    if args.sar_path is not None and not (args.sar_path / "sar").is_dir():
        yield f"--sar-path: {args.sar_path} holds no folder 'sar', expected a checkout"
    if args.out.exists() and not args.out.is_dir():
        yield f"--out: {args.out} is a file, expected a folder"
