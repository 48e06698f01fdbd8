"""What a test may not leave behind: processes, threads, settings, groups and files."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from multiprocessing import resource_tracker
from pathlib import Path

import torch
import torch.distributed as dist

from harness import pool
from sar.comm import is_initialized

_PATIENCE = 3.0  # seconds that something on its way out may take
_CACHES = {".pytest_cache", ".hypothesis", ".ruff_cache", ".mypy_cache", "__pycache__"}


@dataclass(frozen=True)
class State:
    """What is compared before and after a test."""

    children: frozenset[int]
    threads: frozenset[threading.Thread]
    environment: tuple[tuple[str, str], ...]
    process_group: bool
    torch_settings: tuple[object, ...]
    folder: str
    files: frozenset[str]

    @classmethod
    def now(cls) -> State:
        return cls(
            children=frozenset(_children() - pool.OWNED - {_tracker()}),
            threads=frozenset(t for t in threading.enumerate() if not _helper(t)),
            environment=tuple(sorted((k, v) for k, v in os.environ.items() if not _own(k))),
            process_group=dist.is_initialized() or is_initialized(),
            torch_settings=(
                torch.get_default_dtype(),
                torch.get_num_threads(),
                torch.is_grad_enabled(),
                torch.are_deterministic_algorithms_enabled(),
            ),
            folder=os.getcwd(),
            files=frozenset(os.listdir()) - _CACHES,
        )


def leaked(before: State) -> list[str]:
    """What differs from ``before`` for longer than a moment, in words; empty when nothing does."""
    end = time.monotonic() + _PATIENCE
    while True:
        found = _differences(before, State.now())
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.02)


def _differences(before: State, after: State) -> list[str]:
    found = []
    for name in (field.name for field in fields(State)):
        old, new = getattr(before, name), getattr(after, name)
        if isinstance(old, frozenset):
            if new - old:
                found.append(f"{name}: {sorted(map(str, new - old))} appeared")
        elif old != new:
            if name == "environment":
                old, new = sorted(set(old) - set(new)), sorted(set(new) - set(old))
            found.append(f"{name}: {old} became {new}")
    return found


def _own(variable: str) -> bool:
    """pytest's, and what dgl and torch's compiler set for themselves when they are imported."""
    return variable.startswith(("PYTEST_", "TORCHINDUCTOR_", "KMP_DUPLICATE_LIB_OK"))


def _helper(thread: threading.Thread) -> bool:
    """A progress bar's monitor lives on by design."""
    return type(thread).__name__ == "TMonitor"


def _tracker() -> int | None:
    """The helper process that Python starts once beside spawned workers."""
    return getattr(resource_tracker._resource_tracker, "_pid", None)


def _children() -> set[int]:
    """Process ids whose parent is this process; ended ones that nobody waited for count too."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # of a thread that has ended
            found.update(map(int, file.read_text().split()))
    return found
