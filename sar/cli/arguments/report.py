"""The options of `sar report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sar.cli.parser import Parser


def add_parser(subparsers: Any) -> Parser:
    parser = subparsers.add_parser(
        "report",
        help="write a page about a training run",
        description="Write one HTML page, or a picture, of what sar train --json wrote.",
    )
    report = parser.add_argument_group("report")
    report.add_argument("result", type=Path, metavar="RUN.json", help="of sar train --json")
    report.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="a page, .html, or .png or .svg"
    )
    report.add_argument(
        "--cut", metavar="PARTS.json", help="partitions, whose cut is drawn on the page"
    )
    report.add_argument("--dark", action="store_true", help="draw a picture on a dark ground")
    return parser
