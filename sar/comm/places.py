"""Where ranks stand in their users' programs: for messages, which decide nothing."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import torch

_MOST_LINES, _MOST_PLACES, _MOST_CHARACTERS = 3, 4, 100
_MOST_NAMED = 8
_SAR, _TORCH = (str(Path(one).parents[1]) for one in (__file__, torch.__file__))
_INSTALLED = (_SAR, _TORCH, *sysconfig.get_paths().values(), "<frozen", "<string>")


def place(thread: threading.Thread | None = None) -> str:
    """The innermost line of the user's that a thread is in, and what called it; "" for none.

    This thread's by default. Where it has none, as in the autograd engine's, the main thread's.
    """
    frames = _frames()
    for one in (thread or threading.current_thread(), threading.main_thread()):
        stack = traceback.extract_stack(frames[one.ident]) if one.ident in frames else []
        lines = [
            _line(step) for step in reversed(stack) if not step.filename.startswith(_INSTALLED)
        ]
        if lines:
            return ", called in ".join(lines[:_MOST_LINES])
    return ""


def _frames() -> dict[int, FrameType]:
    """Where all threads are, without the collector of garbage: what it finds may let another thread
    go on, which in Python before 3.11.9 then waits for this one for ever (gh-106883)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def told(places: Mapping[int, str]) -> str:
    """What to say of the :func:`place` of each rank, as far as it is known."""
    ranks: dict[str, list[int]] = {}
    for rank, where in sorted(places.items()):
        if where:
            ranks.setdefault(where, []).append(rank)
    stood = [f"{named(those)} stood in {where}" for where, those in ranks.items()][:_MOST_PLACES]
    if len(ranks) > 1:
        stood.append("is one of these lines run by some ranks only, as under `if rank == 0`?")
    return "".join(f"; {one}" for one in stood)


def named(ranks: list[int], names: Sequence[str] = ()) -> str:
    """ "rank 1" or "ranks 1, 2", or what they are called instead; the first of them."""
    shown = ", ".join(names[rank] if names else str(rank) for rank in ranks[:_MOST_NAMED])
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    noun = "" if names else "rank " if len(ranks) == 1 else "ranks "
    return f"{noun}{shown}{more}"


def _line(step: traceback.FrameSummary) -> str:
    here = os.path.relpath(step.filename)
    file = step.filename if here.startswith("..") else here
    text = f"{file}:{step.lineno}"
    return f"{text} `{step.line[:_MOST_CHARACTERS]}`" if step.line else text
