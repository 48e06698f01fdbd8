"""`sar environment`: what to set for ranks that something else starts."""

import argparse
import os
import shlex

from sar.allocator import SOFT_LIMIT, allocator_environment, is_preloaded
from sar.cli.launch import add_allocator_arguments, soft_limit_of


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "environment",
        help="print the memory settings that ranks should start with",
        description="Print shell commands that set for the ranks of torchrun how memory is "
        'allocated, as `sar train` does for its own: eval "$(sar environment)". What is set '
        "already stays, but for --soft-limit. Threads are OMP_NUM_THREADS.",
    )
    add_allocator_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    is_preloaded(args.allocator)  # raises where something else is
    for name, value in allocator_environment(args.allocator, soft_limit_of(args)).items():
        if name == SOFT_LIMIT or not os.environ.get(name):  # a limit was asked for here and now
            print(f"export {name}={shlex.quote(value)}")
    return 0
