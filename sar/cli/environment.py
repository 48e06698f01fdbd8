"""`sar environment`: what to set for ranks that something else starts."""

import argparse
import os
import shlex

from sar.allocator import SOFT_LIMIT, allocator_environment, is_preloaded
from sar.cli.launch import soft_limit_of


def run(args: argparse.Namespace) -> int:
    is_preloaded(args.allocator)  # raises where something else is
    for name, value in allocator_environment(args.allocator, soft_limit_of(args)).items():
        if name == SOFT_LIMIT or not os.environ.get(name):  # a limit was asked for here and now
            print(f"export {name}={shlex.quote(value)}")
    return 0
