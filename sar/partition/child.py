"""Processes that end with the one that started them, also where that one is killed."""

from __future__ import annotations

import os
import signal
import sys

# What a child runs before anything else: the kernel ends it when its parent dies (1 is
# PR_SET_PDEATHSIG), which it may have done before that line.
_FIRST = f"""
import sys
sys.path[:] = sys.argv.pop(1).split({os.pathsep!r})
import ctypes, os, runpy
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)}, 0, 0, 0)
if os.getppid() != int(sys.argv.pop(1)):
    os._exit(1)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def command(file: str, *arguments: object) -> list[str]:
    """The command that runs a Python file in a child with this process's import path: by itself it
    would import from the current folder first, where a ``random.py`` ends it."""
    path = os.pathsep.join(str(place) or os.getcwd() for place in sys.path)
    return [sys.executable, "-c", _FIRST, path, str(os.getpid()), file, *map(str, arguments)]


def death(status: int) -> str:
    """A return code of ``subprocess`` in words."""
    if status >= 0:
        return f"status {status}"
    hint = "; out of memory?" if status == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-status).name}{hint}"
