"""One rank that ``sar.cli.launch`` started: ``python -m sar.cli.worker COMMAND JSON``."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import traceback

from sar.cli.launch import USER_ERROR, run_rank
from sar.cli.ranks import report_failure
from sar.errors import SarError


def main(command: str, arguments: str) -> int:
    """Run the command's ``work``; an error is told to the launcher."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, not when a collective returns
    args = argparse.Namespace(**json.loads(arguments))
    try:
        run_rank(args, importlib.import_module(f"sar.cli.{command}").work)
    except Exception as error:
        report_failure(error)
        if args.debug or not isinstance(error, (SarError, ValueError, OSError)):
            traceback.print_exc()
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
