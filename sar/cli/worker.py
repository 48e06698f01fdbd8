"""One rank that a launcher started: ``python -m sar.cli.worker COMMAND JSON``, or ``FUNCTION
FOLDER`` of :func:`sar.launch`."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sar.cli.call_files import read_call, write_error, write_result
from sar.cli.launch import USER_ERROR, run_rank
from sar.cli.ranks import report_failure
from sar.comm import shutdown
from sar.comm.setup import leave_after
from sar.errors import SarError

FUNCTION = "function"
_SET_NAME = 15  # PR_SET_NAME of prctl


def main(command: str, argument: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, not when a collective returns
    if sys.platform == "linux":  # for `ps`: all that were forked have one command line
        ctypes.CDLL(None).prctl(_SET_NAME, f"sar rank {os.environ['RANK']}".encode(), 0, 0, 0)
    return call_function(argument) if command == FUNCTION else run_command(command, argument)


def run_command(command: str, arguments: str) -> int:
    args = argparse.Namespace(**json.loads(arguments))
    try:
        run_rank(args, importlib.import_module(f"sar.cli.{command}").work)
    except Exception as error:
        report_failure(error)
        if args.debug or not isinstance(error, (SarError, ValueError, OSError)):
            traceback.print_exc()
        return USER_ERROR
    return 0


def call_function(path: str) -> int:
    """Call what the folder holds; rank 0 leaves its result there, a rank that fails its error."""
    folder, rank = Path(path), int(os.environ["RANK"])
    try:
        function, args = read_call(folder)
        result = _call(function, args)
        if rank == 0:
            write_result(folder, result)
    except Exception as error:
        write_error(folder, rank, error)
        report_failure(error)
        leave_after(error, USER_ERROR)
        return USER_ERROR
    shutdown()
    return 0


def _call(function: Callable[..., Any], args: tuple) -> Any:
    """The result; ``None`` of a function that exits with status 0, as a script may."""
    try:
        return function(*args)
    except SystemExit as leaving:
        if leaving.code:
            raise
        return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
