"""What commands write: checked before the work, cleared of what a killed run left."""

from __future__ import annotations

import argparse
import glob
import os
from pathlib import Path
from typing import Any

from sar.files import remove_left_over, scratch_folder
from sar.train.callbacks import Callback
from sar.train.folder import check_free
from sar.train.loggers import JsonLines, LineFile, TensorBoard, make_logger


def check_writable(folder: Path, option: str) -> None:
    """Try to write in ``folder``, or where it would be made; nothing is left behind.

    Raises ``ValueError`` naming ``option``.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with scratch_folder(there):
            pass
    except OSError as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        reason = cause.strerror or cause
        raise ValueError(f"{option}: cannot write in {str(folder)!r}: {reason}") from error


def check_file(path: Path, option: str) -> None:
    """The same for the file ``path``, whose old partial file goes.

    Raises ``ValueError`` naming ``option``, also for a folder.
    """
    check_writable(path.absolute().parent, option)
    if path.is_dir():
        raise ValueError(f"{option}: {str(path)!r} is a folder, expected a file name")
    remove_left_over(path.absolute().parent, [glob.escape(path.name)])


def lines_of(out: str) -> Path:
    """The JSON lines beside ``--json``."""
    return Path(out).with_suffix(".jsonl")


def callbacks_of(args: argparse.Namespace, config: dict[str, Any]) -> list[Callback]:
    """The loggers that ``--json`` and ``--logger`` ask for.

    Args:
        config: the options of the run, for the header of JSON lines.
    """
    callbacks = [make_logger(text) for text in args.logger]
    if args.json is not None:
        callbacks.append(JsonLines(lines_of(args.json), {"config": config}))
    return callbacks


def check_results(args: argparse.Namespace) -> None:
    """Raise now what would be raised later: unknown loggers, packages that are absent, files that
    cannot be written, a folder that another run saves in."""
    loggers = [make_logger(text) for text in args.logger]
    if args.json is not None and lines_of(args.json) == Path(args.json):
        raise ValueError(
            f"--json: got {args.json!r}, expected another ending than .jsonl: the epochs are "
            "written to that file, line by line"
        )
    if os.environ.get("RANK", "0") != "0":  # only the first rank writes
        return
    for logger in loggers:
        if isinstance(logger, LineFile):
            check_file(logger.path, "--logger")
        elif isinstance(logger, TensorBoard):
            check_writable(logger.folder, "--logger")
    if args.json is not None:
        check_file(lines_of(args.json), "--json")
    if args.checkpoint is not None:
        check_free(Path(args.checkpoint))
