"""Processes that end with the one that started them, also where that one is killed."""

from __future__ import annotations

import os
import signal
import sys

# What a child runs before anything else: the kernel ends it when its parent dies (1 is
# PR_SET_PDEATHSIG), which it may have done before that line.
_FIRST = f"""
import ctypes, os, runpy, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)}, 0, 0, 0)
if os.getppid() != int(sys.argv.pop(1)):
    os._exit(1)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def command(file: str, *arguments: object) -> list[str]:
    """The command that runs a Python file in a child of this process."""
    return [sys.executable, "-c", _FIRST, str(os.getpid()), file, *map(str, arguments)]
