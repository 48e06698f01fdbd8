"""One fixed-size status per rank, so that a local failure is raised by all ranks alike."""

from __future__ import annotations

import builtins
import json
from typing import TYPE_CHECKING

import torch

from sar import errors

if TYPE_CHECKING:
    from sar.comm.group import Group

_STATUS_BYTES = 1024


def agree(group: Group, error: Exception | None, what: str = "", alike: object = None) -> None:
    """Collective: return when no rank passes an error, else raise the lowest rank's on all ranks.

    The class survives when it is a builtin or one of :mod:`sar.errors`; others become ``SarError``.

    Args:
        what: the call, for the message; a ``CommError`` on every rank where ranks call another.
        alike: options that have to be the same on all ranks, compared as they print, to within the
            first few hundred characters; else a ``ValueError`` on every rank.
    """
    if group.size == 1:
        if error is not None:
            raise error
        return
    statuses = group.all_gather(_encode(error, what, alike))
    failed = [rank for rank, status in enumerate(statuses) if status[0]]
    if failed:
        agreed = _decode(statuses[failed[0]], failed[0])
        if failed[0] == group.rank:
            raise agreed from error
        raise agreed
    texts = [_text(status) for status in statuses]
    if any(text[0] != what for text in texts):
        raise group._apart(", ".join(f"{r}: {text[0] or 'other'}" for r, text in enumerate(texts)))
    options = [text[2] for text in texts]
    other = next((rank for rank, option in enumerate(options) if option != options[0]), None)
    if other is not None:
        raise ValueError(
            f"{what}: rank {other} got {options[other]}, rank 0 got {options[0]}; expected the "
            "same on all ranks"
        )


def _encode(error: Exception | None, what: str, alike: object) -> torch.Tensor:
    kind, text = ("", repr(alike)) if error is None else (type(error).__name__, str(error))
    while len(body := json.dumps([what, kind, text]).encode()) > _STATUS_BYTES - 1:
        text = text[: len(text) * 3 // 4]
    status = torch.zeros(_STATUS_BYTES, dtype=torch.uint8)
    status[0] = error is not None
    status[1 : 1 + len(body)] = torch.tensor(list(body), dtype=torch.uint8)
    return status


def _text(status: torch.Tensor) -> tuple[str, str, str]:
    """(the call, class of the error, its text or that of the options)."""
    what, kind, text = json.loads(bytes(status[1:].tolist()).rstrip(b"\0"))
    return what, kind, text


def _decode(status: torch.Tensor, rank: int) -> Exception:
    what, name, text = _text(status)
    message = f"rank {rank}: {what + ': ' if what else ''}{text}"
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # a class that wants more arguments than a message
            pass
    return errors.SarError(f"{name}: {message}")
