"""One fixed-size status per rank, so that a local failure is raised by all ranks alike."""

from __future__ import annotations

import builtins
import json

import torch

from sar import errors
from sar.comm.group import Group

_STATUS_BYTES = 1024


def agree(group: Group, error: Exception | None, what: str = "") -> None:
    """Collective: return when no rank passes an error, else raise the lowest rank's on all ranks.

    The class survives when it is a builtin or one of :mod:`sar.errors`; others become ``SarError``.
    """
    if group.size == 1:
        if error is not None:
            raise error
        return
    statuses = group.all_gather(_encode(error))
    failed = [rank for rank, status in enumerate(statuses) if status[0]]
    if failed:
        agreed = _decode(bytes(statuses[failed[0]][1:].tolist()), failed[0], what)
        if failed[0] == group.rank:
            raise agreed from error
        raise agreed


def _encode(error: Exception | None) -> torch.Tensor:
    status = torch.zeros(_STATUS_BYTES, dtype=torch.uint8)
    if error is not None:
        text = str(error)
        while len(body := json.dumps([type(error).__name__, text]).encode()) > _STATUS_BYTES - 1:
            text = text[: len(text) * 3 // 4]
        status[0] = 1
        status[1 : 1 + len(body)] = torch.tensor(list(body), dtype=torch.uint8)
    return status


def _decode(body: bytes, rank: int, what: str) -> Exception:
    name, text = json.loads(body.rstrip(b"\0"))
    message = f"rank {rank}: {what + ': ' if what else ''}{text}"
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # a class that wants more arguments than a message
            pass
    return errors.SarError(f"{name}: {message}")
