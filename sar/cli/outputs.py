"""Writing results: checked before the work, whole or not at all after it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def check_writable(folder: Path, option: str) -> None:
    """Try to write in ``folder``, or where it would be made; nothing is left behind.

    Raises ``ValueError`` naming ``option``.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".sar-"):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{option}: cannot write in {str(folder)!r}: {reason}") from error


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Call ``write`` on a new file that takes ``path``'s place when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            write(file)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
