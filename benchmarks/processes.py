"""Other processes, read from the kernel (Linux): who is below whom, what they hold, and groups that
bound it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup/memory")


def send(pid: int, number: signal.Signals) -> bool:
    """Signal a process; whether it was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def is_alive(pid: int) -> bool:
    """A process that has ended, but was not waited for, is not."""
    return (_text(pid, "stat").rpartition(")")[2].split() or ["X"])[0] not in "ZX"


def children(pid: int) -> list[int]:
    """All processes below one, those that its threads started as well."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in path.read_text().split()]
        except OSError:  # the thread has ended
            continue
    return found + [one for child in found for one in children(child)]


def variable(pid: int, name: str) -> str:
    """Of a process' environment; empty where there is none."""
    entries = _text(pid, "environ").split("\0")
    return next((one.partition("=")[2] for one in entries if one.startswith(f"{name}=")), "")


def rank_of(pid: int) -> int | None:
    """Which rank a process is, by its name where a launcher of ours forked it, or its environment;
    ``None`` for what is no rank."""
    name = _text(pid, "comm").strip()
    number = (
        name.removeprefix("sar rank ") if name.startswith("sar rank ") else variable(pid, "RANK")
    )
    return int(number) if number.isdigit() else None


def command_line(pid: int) -> str:
    """Empty when it has ended."""
    return _text(pid, "cmdline")


def anonymous_bytes(pid: int) -> int:
    """Resident anonymous memory; 0 when it has ended."""
    lines = _text(pid, "status").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def no_memory_groups() -> str:
    """Why there is no :func:`memory_group` to be had here, "" where there is."""
    if not (_GROUPS / "memory.limit_in_bytes").exists():
        return f"no control groups of memory, version 1, in {_GROUPS}"
    if not os.access(_GROUPS, os.W_OK):
        return f"control groups cannot be made in {_GROUPS}; expected to be root"
    return ""


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A new control group of so many bytes, page cache included; -1: of any. It has to be empty at
    the end."""
    group = _GROUPS / f"sar-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        (group / "memory.force_empty").write_text("0")
        group.rmdir()


def joining(group: Path, command: list[str]) -> list[str]:
    """A command that runs in a group."""
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *command]


def most_bytes(group: Path) -> int:
    """The most that a group had."""
    return int((group / "memory.max_usage_in_bytes").read_text())


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
