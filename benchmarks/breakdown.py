"""Where the processor time of a step goes: by torch operator, DGL kernel and exchange."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import measure

_GROUPS = {
    "spmm": ("embedding_bag", "embedding_bag_forward_only", "SpMM", "sum_rows"),
    "dense": ("mm", "addmm", "linear", "linear_backward"),
    "rows": (
        "index_select",
        "index_add",
        "index_add_",
        "gather",
        "scatter_add_",
        "index",
        "add_rows",
    ),
    "exchange": ("post", "wait"),
}


class Breakdown(TorchDispatchMode):
    """Adds up the main thread's processor seconds of every operator it sees, forward and backward.

    Work outside torch's operators is wrapped by name: DGL's sparse kernels, compiled loops, the
    posting of an exchange and the wait for it (whose wall seconds are kept too).
    """

    def __init__(self) -> None:
        super().__init__()
        self.cpu: dict[str, float] = defaultdict(float)
        self.wait_wall = 0.0
        self._stack = ExitStack()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self._timed(func.overloadpacket.__name__.lstrip("_")):
            return func(*args, **(kwargs or {}))

    def __enter__(self) -> Breakdown:
        super().__enter__()
        self._wrap("dgl._sparse_ops", "_CAPI_DGLKernelSpMM", "SpMM")
        self._wrap("sar.kernels.spmm", "_sum_rows", "sum_rows")
        self._wrap("sar.kernels.rows", "_add", "add_rows")
        self._wrap("sar.comm.process", "ProcessGroup._exchange", "post")
        self._wrap("sar.comm.process", "_Watched.wait", "wait")
        self._watch, self._thread = measure.Stopwatch(), time.thread_time()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.used, self.main = self._watch.read(), time.thread_time() - self._thread
        self._stack.close()
        super().__exit__(kind, error, trace)

    def seconds(self) -> dict[str, float]:
        """Groups of operators first, then the ten costliest operators by name, ``op:`` before."""
        groups = {
            group: sum(self.cpu[name] for name in names if name in self.cpu)
            for group, names in _GROUPS.items()
        }
        top = sorted(self.cpu.items(), key=lambda item: -item[1])[:12]
        return {
            "cpu": self.used.cpu,
            "user": self.used.user,
            "system": self.used.system,
            "wall": self.used.wall,
            "faults": self.used.faults,
            "wait wall": self.wait_wall,
            "other threads": self.used.cpu - self.main,
            **groups,
            "other operators": sum(self.cpu.values()) - sum(groups.values()),
            "python": self.main - sum(self.cpu.values()),
            **{f"op: {name}": value for name, value in top},
        }

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        before, inner, wall = time.thread_time(), sum(self.cpu.values()), time.perf_counter()
        try:
            yield
        finally:
            # what nested calls have booked already is not booked twice
            nested = sum(self.cpu.values()) - inner
            self.cpu[name] += time.thread_time() - before - nested
            if name == "wait":
                self.wait_wall += time.perf_counter() - wall

    def _wrap(self, module: str, path: str, name: str) -> None:
        try:
            target = mock.patch(f"{module}.{path}", self._wrapped(module, path, name))
            self._stack.enter_context(target)
        except (ImportError, AttributeError):  # not part of what is measured here
            return

    def _wrapped(self, module: str, path: str, name: str) -> Callable[..., Any]:
        import importlib

        original: Any = importlib.import_module(module)
        for part in path.split("."):
            original = getattr(original, part)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._timed(name):
                return original(*args, **kwargs)

        return timed
