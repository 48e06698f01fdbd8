"""`sar environment`: what to set for ranks that something else starts."""

import argparse
import shlex

from sar.allocator import allocator_environment
from sar.cli.launch import add_allocator_argument


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "environment",
        help="print the memory settings that ranks should start with",
        description="Print shell commands that set for the ranks of torchrun how memory is "
        'allocated, as `sar train` does for its own: eval "$(sar environment)". Threads are '
        "OMP_NUM_THREADS.",
    )
    add_allocator_argument(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    for name, value in allocator_environment(args.allocator).items():
        print(f"export {name}={shlex.quote(value)}")
    return 0
