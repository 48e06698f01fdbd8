"""oneCCL's binding, or a stand-in with its faults, over gloo: ``install`` registers it as ``ccl``.

As in the binding, one thread of the process waits for the oldest collective, without a limit and
under a lock that beginning another one takes. A rank that has ended is waited for for ever.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Work

NAME = "oneccl_bindings_for_pytorch"
_lock = threading.Lock()
_begun: SimpleQueue[_Collective] = SimpleQueue()


class _Collective(Work):
    def __init__(self, begin: Callable[[], Any]) -> None:
        super().__init__()
        self.over = threading.Event()
        with _lock:
            self.work = begin()
        _begun.put(self)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return self.over.wait()

    def is_completed(self) -> bool:
        with _lock:
            return self.over.is_set()


def _wait_in_turn() -> None:
    while True:
        collective = _begun.get()
        with _lock:
            try:
                collective.work.wait()
            except RuntimeError:  # a connection broke
                threading.Event().wait()
        collective.over.set()


class _Blocking(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(hours=1))

    group_name = ""

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def getBackendName(self) -> str:
        return "ccl"

    def allreduce(self, *args: Any) -> Work:
        return _Collective(lambda: self._gloo.allreduce(*args))

    def allgather(self, *args: Any) -> Work:
        return _Collective(lambda: self._gloo.allgather(*args))

    def broadcast(self, *args: Any) -> Work:
        return _Collective(lambda: self._gloo.broadcast(*args))

    def alltoall_base(self, *args: Any) -> Work:
        return _Collective(lambda: self._gloo.alltoall_base(*args))


def install(which: str) -> str:
    """Register ``"ccl"``, the binding, or ``"stand-in"``; returns torch's name of either."""
    if "CCL" in vars(dist.Backend):
        return "ccl"
    if which == "ccl":
        importlib.import_module(NAME)
        return "ccl"
    sys.modules[NAME] = sys.modules[__name__]
    dist.Backend.register_backend("ccl", _Blocking, devices=["cpu"])
    threading.Thread(target=_wait_in_turn, daemon=True).start()
    return "ccl"
