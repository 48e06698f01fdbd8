"""`sar environment`: what to set for ranks that something else starts."""

import argparse
import os
import shlex

from sar.allocator import allocator_environment, is_preloaded


def run(args: argparse.Namespace) -> int:
    is_preloaded(args.allocator)  # raises where something else is
    for name, value in allocator_environment(args.allocator).items():
        if not os.environ.get(name):
            print(f"export {name}={shlex.quote(value)}")
    return 0
