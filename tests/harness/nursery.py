"""Scripts in processes of their own that need not import for seconds: forks of one that has."""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import runpy
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from harness import pool

ROOT = Path(__file__).resolve().parent.parent.parent
_PAUSE = 0.02


def _run(words: list[str], environment: dict[str, str], cwd: str, base: str) -> None:
    """``python words...`` in this process, which leads a session and writes to files."""
    gc.freeze()  # a collection would copy all pages of what was imported before the fork
    os.setsid()
    os.chdir(cwd)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{base}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    status = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    except Exception:
        status = 1
        sys.excepthook(*sys.exc_info())
    finally:  # as at the end of an interpreter
        threading._shutdown()
        atexit._run_exitfuncs()
    sys.exit(status)


@dataclass
class Child:
    """A process that runs; as much of ``subprocess.Popen`` as tests need."""

    process: BaseProcess
    base: Path

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    @property
    def returncode(self) -> int | None:
        """Its status, negative for a signal, when it has ended."""
        return self.process.exitcode

    def wait(self, timeout: float) -> int:
        """Its status; raises ``subprocess.TimeoutExpired``."""
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.base), timeout)
        return self.returncode

    def text(self, name: str) -> str:
        """What it has written to ``"out"`` or ``"err"`` so far."""
        path = self.base.with_suffix(f".{name}")
        return path.read_text() if path.exists() else ""

    def line(self, timeout: float) -> str:
        """The first line of what it writes; empty if it ends before."""
        end = time.monotonic() + timeout
        while "\n" not in self.text("out") and self.returncode is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.base), timeout)
            time.sleep(_PAUSE)
        return self.text("out").partition("\n")[0]

    def kill(self) -> None:
        """End it and what is in its session, if it runs, and wait for that."""
        if self.returncode is None:
            try:
                os.killpg(self.pid, 9)
            except ProcessLookupError:
                self.process.kill()
            self.wait(10)


class Nursery:
    """Starts children that have torch, dgl and sar imported.

    Args:
        folder: where children write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, itertools.count()

    def start(self, words: list[str], environment: dict[str, str], cwd: Path = ROOT) -> Child:
        """``python words...`` with this environment and nothing else in it."""
        base = self._folder / f"child{next(self._count)}"
        process = pool.CONTEXT.Process(target=_run, args=(words, environment, str(cwd), str(base)))
        pool.start(process)
        return Child(process, base)
