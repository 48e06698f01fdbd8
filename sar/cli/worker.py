"""One rank that ``sar.cli.launch`` started: ``python -m sar.cli.worker COMMAND JSON``."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback

from sar.cli.launch import LAUNCHER_PID, USER_ERROR, run_rank
from sar.errors import SarError

_PR_SET_PDEATHSIG = 1


def main(command: str, arguments: str) -> int:
    """Run the command's ``work``; an error is written where the launcher reads it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, not when a collective returns
    end_with_launcher()
    args = argparse.Namespace(**json.loads(arguments))
    try:
        run_rank(args, importlib.import_module(f"sar.cli.{command}").work)
    except Exception as error:
        leave_error(error)
        if args.debug or not isinstance(error, (SarError, ValueError, OSError)):
            traceback.print_exc()
        return USER_ERROR
    return 0


def end_with_launcher() -> None:
    """Ask the kernel to end this process when the launcher dies, also by SIGKILL."""
    launcher = os.environ.get(LAUNCHER_PID)
    if sys.platform != "linux" or launcher is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before the line above
        os._exit(1)


def leave_error(error: Exception) -> None:
    """Write ``error`` in the file that torch's launcher names."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    now = time.time()
    report = {"message": str(error), "kind": type(error).__name__, "when": now}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({**report, "timestamp": int(now)}, file)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
