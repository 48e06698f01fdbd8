"""The options of `sar environment`."""

from __future__ import annotations

from typing import Any

from sar.cli.arguments.ranks import add_allocator_arguments
from sar.cli.parser import Parser


def add_parser(subparsers: Any) -> Parser:
    parser = subparsers.add_parser(
        "environment",
        help="print the memory settings that ranks should start with",
        description="Print shell commands that set for the ranks of torchrun how memory is "
        'allocated, as `sar train` does for its own: eval "$(sar environment)". What is set '
        "already stays. Threads are OMP_NUM_THREADS.",
    )
    add_allocator_arguments(parser.add_argument_group("memory"))
    return parser
