"""Modules run in processes that need not import for seconds: forks of one that has."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

# The process that others are forked from has imported, and done nothing else: no thread runs there.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "dgl.nn", "sar.cli.train", "sar.sampling.serve"])


class Fork:
    """``python -m MODULE WORDS..`` that leads a session; as much of ``Popen`` as jobs need."""

    def __init__(self, words: Sequence[str], environment: dict[str, str], log: Path) -> None:
        args = list(words), environment, str(log)
        self._process: BaseProcess = _CONTEXT.Process(target=_run, args=args)
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def poll(self) -> int | None:
        """Its status when it has ended."""
        return self._process.exitcode

    def wait(self) -> None:
        """Return when it has ended."""
        self._process.join()


def _run(words: list[str], environment: dict[str, str], log: str) -> None:
    """What an interpreter does, to the end; the output goes to ``log``."""
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    status, sys.argv = 1, words
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)
