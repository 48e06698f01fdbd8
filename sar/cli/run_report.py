"""`sar report`: a page or a picture of a training run, from the JSON that it wrote."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from sar.cli.pictures import PAGE, check_picture
from sar.partition.summary import summarize
from sar.pictures import SUFFIXES, draw_run, palette, read_run, save, write_report
from sar.pictures.training import SIZE


def run(args: argparse.Namespace) -> int:
    check_picture(args.out, "--out", (*PAGE, *SUFFIXES))
    found = read_run(_read(args.result))
    cut = None if args.cut is None else summarize(args.cut)
    if args.out.suffix.lower() in PAGE:
        write_report(found, args.out, cut)
    else:
        save(args.out, partial(draw_run, found), SIZE, palette(args.dark))
    print(f"written to {args.out}")
    return 0


def _read(path: Path) -> Any:
    """The JSON in a file; raises ``ValueError``."""
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"RUN.json: {str(path)!r} is no JSON: {error}") from error
