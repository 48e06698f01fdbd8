"""Processes that need not import for seconds: forks of one that has, each ending as it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness.pool import OWNED

_PAUSE = 0.02
# Forks once for each line that it reads: a process that waits for the one that does the work, and
# then leaves its status in a file.
_LOOP = """
import json, os, runpy, signal, sys
sys.path.insert(0, os.getcwd())
import torch, torch.distributed, sar, sar.__main__, sar.cli.sample_server, sar.sampling
try:
    import dgl.nn
except ImportError:
    pass
torch.set_num_threads(1)

def work(words, environment, cwd, base):
    os.setsid()
    os.chdir(cwd)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{base}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words[1:] if words[0] == "-m" else words
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(words[0]))
        runpy.run_path(words[0], run_name="__main__")

def child(*given):
    status = 1
    try:
        work(*given)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        import threading
        threading._shutdown()
        import atexit
        atexit._run_exitfuncs()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
for line in sys.stdin:
    *given, base = json.loads(line)
    waiting = os.fork()
    if waiting == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if pid == 0:
            child(*given, base)
        print(pid, flush=True)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with open(f"{base}.tmp", "w") as file:
            file.write(str(status))
        os.rename(f"{base}.tmp", f"{base}.status")
        os._exit(0)
    """


@dataclass
class Child:
    """A process that runs; as much of ``subprocess.Popen`` as tests need."""

    pid: int
    base: Path

    @property
    def returncode(self) -> int | None:
        """Its status, negative for a signal, when it has ended."""
        path = self.base.with_suffix(".status")
        return int(path.read_text()) if path.exists() else None

    def wait(self, timeout: float) -> int:
        """Its status; raises ``subprocess.TimeoutExpired``."""
        end = time.monotonic() + timeout
        while self.returncode is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.base), timeout)
            time.sleep(_PAUSE)
        return self.returncode or 0

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
                pass
            self.wait(10)


class Nursery:
    """Starts children that have torch and sar imported; ``close`` ends the process they come from.

    Args:
        folder: where children write.
        cwd, environment: of the process that they come from.
    """

    def __init__(self, folder: Path, cwd: Path, environment: dict[str, str]) -> None:
        self._folder, self._cwd, self._count = folder, cwd, 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LOOP], cwd=cwd, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        OWNED.add(self._process.pid)

    def start(
        self, words: list[str], environment: dict[str, str], cwd: Path | None = None
    ) -> Child:
        """``python words...`` with this environment and nothing else in it."""
        base = self._folder / f"child{self._count}"
        self._count += 1
        into, out = self._process.stdin, self._process.stdout
        if into is None or out is None:
            raise RuntimeError("the nursery has no pipes")
        given = words, environment, str(cwd or self._cwd), str(base)
        into.write(json.dumps(given) + "\n")
        into.flush()
        return Child(int(out.readline()), base)

    def close(self) -> None:
        self._process.communicate(timeout=30)
        OWNED.discard(self._process.pid)
