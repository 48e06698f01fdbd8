"""One rank that :func:`sar.launch` started: ``python -m sar.cli.called FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sar.cli.launch import USER_ERROR
from sar.cli.parcel import read_call, write_error, write_result
from sar.cli.ranks import report_failure
from sar.comm import shutdown
from sar.comm.setup import leave_after


def main(path: str) -> int:
    """Call what the folder holds; rank 0 leaves the result there, whoever fails the error."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, not when a collective returns
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
    """The result; ``None`` of a function that leaves with the status 0, as a script may."""
    try:
        return function(*args)
    except SystemExit as leaving:
        if leaving.code:
            raise
        return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
