"""Other processes, read from the kernel (Linux): who is below whom, and what they hold."""

from __future__ import annotations

import os
import signal
from pathlib import Path


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


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
