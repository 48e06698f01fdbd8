"""One fixed-size status per rank, so that a local failure is raised by all ranks alike."""

from __future__ import annotations

import builtins
import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

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
        alike: options that have to be the same on all ranks, compared as they print; else a
            ``ValueError`` on every rank. Of a mapping it names the option.
    """
    if group.size == 1:
        if error is not None:
            raise error
        return
    statuses = group.all_gather(_encode(error, what, alike))
    failed = [rank for rank, status in enumerate(statuses) if status[0]]
    if failed:
        agreed = _decode(statuses[failed[0]], group.title(failed[0]))
        if failed[0] == group.rank:
            raise agreed from error
        raise agreed
    texts = [_text(status) for status in statuses]
    if any(text[0] != what for text in texts):
        raise group._apart(", ".join(f"{r}: {text[0] or 'other'}" for r, text in enumerate(texts)))
    options = [text[2] for text in texts]
    other = next((rank for rank, option in enumerate(options) if option != options[0]), None)
    if other is not None:
        name, got, first = _different(options[other], options[0])
        raise ValueError(
            f"{what}: {name}{group.title(other)} got {got}, {group.title(0)} got {first}; expected "
            "the same on all ranks"
        )


def _different(one: Any, other: Any) -> tuple[str, Any, Any]:
    """What differs between two ranks' options: the name of the first, if they have names."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return "", one, other
    name = next(name for name in one | other if one.get(name) != other.get(name))
    return f"{name}: ", one.get(name), other.get(name)


def _encode(error: Exception | None, what: str, alike: object) -> torch.Tensor:
    most = _STATUS_BYTES
    while len(body := json.dumps([what, *_said(error, alike, most)]).encode()) > _STATUS_BYTES - 1:
        most = most * 3 // 4
    status = torch.zeros(_STATUS_BYTES, dtype=torch.uint8)
    status[0] = error is not None
    status[1 : 1 + len(body)] = torch.tensor(list(body), dtype=torch.uint8)
    return status


def _said(error: Exception | None, alike: object, most: int) -> tuple[str, Any]:
    """(class of the error, its text or those of the options), of so many characters."""
    if error is not None:
        return type(error).__name__, str(error)[:most]
    if isinstance(alike, Mapping):
        return "", {str(name): _short(repr(one), most) for name, one in alike.items()}
    return "", _short(repr(alike), most)


def _short(text: str, most: int) -> str:
    """Still another text for what differs behind the part that is kept."""
    digest = blake2b(text.encode(), digest_size=4).hexdigest()
    return text if len(text) <= most else f"{text[:most]}..({digest})"


def _text(status: torch.Tensor) -> tuple[str, str, Any]:
    """(the call, class of the error, its text or those of the options)."""
    what, kind, text = json.loads(bytes(status[1:].tolist()).rstrip(b"\0"))
    return what, kind, text


def _decode(status: torch.Tensor, title: str) -> Exception:
    what, name, text = _text(status)
    message = f"{title}: {what + ': ' if what else ''}{text}"
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # a class that wants more arguments than a message
            pass
    return errors.SarError(f"{name}: {message}")
