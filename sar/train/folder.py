"""The folder that a run saves in: one run at a time, continued on the same graph and options."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sar.comm import Group
from sar.errors import SarError
from sar.files import naming, open_own, remove_left_over
from sar.graph import GraphView

LOCK_NAME = "run.lock"
_WRITTEN = ("checkpoint.pt", "checkpoint.*.*.*.pt")  # see `sar.train.embedding`

# The file says who owns it, and is locked (`flock`) for as long as its owner lives. So a file that
# nobody has locked is that of a process that was killed. Where a shared file system has no locks,
# the words in it decide.


@contextmanager
def own_folder(folder: Path | None, group: Group) -> Iterator[None]:
    """Lock ``folder`` for this run on rank 0, and remove what a killed run was writing; ``None``
    locks nothing. Collective at the start. Warns where a killed run had the lock. Raises
    ``SarError`` that names the owner on every rank where another run has it."""
    if folder is None:
        yield
        return
    number = None
    with group.agreed():
        if group.rank == 0:
            number = _take(folder)
            remove_left_over(folder, _WRITTEN)
    try:
        yield
    finally:
        if number is not None:
            (folder / LOCK_NAME).unlink(missing_ok=True)
            os.close(number)


def check_free(folder: Path) -> None:
    """Raise ``SarError`` that names the owner if a run saves in ``folder`` now."""
    if (folder / LOCK_NAME).exists():
        with naming(folder / LOCK_NAME):
            number = open_own(folder / LOCK_NAME, os.O_RDONLY | os.O_NONBLOCK)
        try:
            _lock(number, folder)
        finally:
            os.close(number)


def _take(folder: Path) -> int:
    path = folder / LOCK_NAME
    with naming(path):
        folder.mkdir(parents=True, exist_ok=True)
    while True:
        with naming(path):
            number = open_own(path)
        try:
            before = _lock(number, folder)
            if path.exists() and os.path.samestat(os.fstat(number), os.stat(path)):
                mine = {"pid": os.getpid(), "host": socket.gethostname()}
                mine["since"] = time.strftime("%F %T")
                with naming(path):
                    os.ftruncate(number, 0)
                    os.pwrite(number, json.dumps(mine).encode(), 0)
                break
        except BaseException:
            os.close(number)
            raise
        os.close(number)  # its owner removed it just now
    if before:
        warnings.warn(
            f"{path}: of {_named(before)}, which has ended; this run takes the folder over",
            stacklevel=5,
        )
    return number


def _lock(number: int, folder: Path) -> dict[str, Any]:
    """Lock an open file; returns who had it before. Raises ``SarError`` where it is in use."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = False
    except BlockingIOError:
        held = True
    except OSError:  # no locks here
        held = _may_run(_owner(number))
    owner = _owner(number)
    if held:
        raise SarError(
            f"checkpoint: {str(folder)!r} is in use by {_named(owner)}; expected another folder, "
            "or one run after the other"
        )
    return owner


def _may_run(owner: dict[str, Any]) -> bool:
    """Whether the owner may still run, as far as that is known on this host."""
    if not owner or owner.get("host") != socket.gethostname():
        return bool(owner)
    return Path(f"/proc/{owner.get('pid')}").exists()


def _owner(number: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(number, 4096, 0) or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _named(owner: dict[str, Any]) -> str:
    words = [f"process {owner.get('pid', '?')}", f"on {owner.get('host', '?')}"]
    return " ".join(words) + f" since {owner.get('since', '?')}"


def graph_identity(graph: Any) -> dict[str, Any]:
    """Digests of the graph and of its cut; empty for no graph of the library's."""
    if not isinstance(graph, GraphView):
        return {}
    book = graph._store.book
    return {"graph": book.graph_digest, "cut": book.digest(), "num_parts": book.num_parts}


def check_graph(saved: dict[str, Any] | None, mine: dict[str, Any], group: Group) -> None:
    """Raise ``ValueError``, on all ranks, for another graph, as far as partitions tell."""
    if not mine or not saved:
        return
    same_cut = saved["cut"] == mine["cut"]
    known = saved["graph"] is not None and mine["graph"] is not None
    same_graph = saved["graph"] == mine["graph"] if known else same_cut
    if same_graph or same_cut:
        return
    if known or saved["num_parts"] == mine["num_parts"]:
        raise ValueError(
            "the checkpoint was made with another graph, or another cut of partitions that do "
            "not tell what they are cuts of; train on the same one, or start anew"
        )
    if group.rank == 0:
        warnings.warn(
            "the checkpoint was made with another number of parts, and the partitions hold no "
            "digest of the graph: that it is the same one cannot be told",
            stacklevel=4,
        )


def check_config(saved: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raise ``ValueError`` that names the options in which the run differs from its checkpoint."""
    names = [name for name in {**saved, **mine} if saved.get(name) != mine.get(name)]
    if names:
        parts = [f"{name} {saved.get(name)!r}, now {mine.get(name)!r}" for name in names]
        raise ValueError(
            f"the checkpoint was made with other options: {'; '.join(parts)}. Give the same ones, "
            "or start anew in another folder"
        )
