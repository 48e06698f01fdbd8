"""Checks of outputs before the work; they remove what a killed run left."""

from __future__ import annotations

import glob
from pathlib import Path

from sar.files import remove_left_over, scratch_folder


def check_writable(folder: Path, option: str) -> None:
    """Try to write in ``folder``, or where it would be made; ``ValueError`` naming ``option`` if
    not."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with scratch_folder(there):
            pass
    except OSError as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        reason = cause.strerror or cause
        raise ValueError(f"{option}: cannot write in {str(folder)!r}: {reason}") from error


def check_file(path: Path, option: str) -> None:
    """:func:`check_writable` for the file ``path``, no folder; its old partial file goes."""
    check_writable(path.absolute().parent, option)
    if path.is_dir():
        raise ValueError(f"{option}: {str(path)!r} is a folder, expected a file name")
    remove_left_over(path.absolute().parent, [glob.escape(path.name)])
