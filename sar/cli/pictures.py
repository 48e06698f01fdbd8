"""Pictures of commands, checked before the work; `sar report`, which draws a training run's."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from sar.cli.outputs import check_file
from sar.errors import MissingDependencyError
from sar.partition.summary import summarize
from sar.pictures import SUFFIXES, draw_cut, draw_run, read_run, save, write_report
from sar.pictures.cut import SIZE as CUT_SIZE
from sar.pictures.run import SIZE as RUN_SIZE

PAGE = (".html",)


def check_pictures(args: argparse.Namespace) -> None:
    for name, suffixes in (("plot", SUFFIXES), ("report", PAGE)):
        if (path := vars(args).get(name)) is not None:
            check_picture(Path(path), f"--{name}", suffixes)


def check_picture(path: Path, option: str, suffixes: tuple[str, ...]) -> None:
    """Raise ``ValueError`` naming ``option`` for a name or folder that cannot be written,
    ``MissingDependencyError`` without matplotlib."""
    if path.suffix.lower() not in suffixes:
        raise ValueError(
            f"{option}: got {str(path)!r}, expected a name that ends in {' or '.join(suffixes)}"
        )
    check_file(path, option)
    need_matplotlib(option)


def need_matplotlib(who: str) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"{who} draws with matplotlib: pip install 'sar-gnn[plot]'"
        ) from error


def plot_cut(args: argparse.Namespace, found: dict[str, Any]) -> None:
    if args.plot is not None:
        save(Path(args.plot), partial(draw_cut, found), CUT_SIZE, args.dark)


def draw_result(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Draw what `--plot` and `--report` ask for, of what `--json` writes."""
    if args.plot is not None:
        draw = partial(draw_run, read_run(result))
        save(Path(args.plot), draw, RUN_SIZE, args.dark)
    if args.report is not None:
        write_report(read_run(result), Path(args.report))


def run(args: argparse.Namespace) -> int:
    check_picture(args.out, "--out", (*PAGE, *SUFFIXES))
    found = read_run(_read(args.result))
    cut = None if args.cut is None else summarize(args.cut)
    if args.out.suffix.lower() in PAGE:
        write_report(found, args.out, cut)
    else:
        save(args.out, partial(draw_run, found), RUN_SIZE, args.dark)
    print(f"written to {args.out}")
    return 0


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"RUN.json: {str(path)!r} is no JSON: {error}") from error
