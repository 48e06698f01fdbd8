"""The options of `sar inspect`."""

from __future__ import annotations

from typing import Any

from sar.cli.arguments.cut_model import add_cut_model
from sar.cli.arguments.pictures import add_plot_arguments
from sar.cli.parser import Parser


def add_parser(subparsers: Any) -> Parser:
    parser = subparsers.add_parser(
        "inspect",
        help="show what partitions hold",
        description="Show nodes, edges, halo, cut, balance and features of a partitioned graph; "
        "with --model, --layers or --hidden also what training such a model would take.",
    )
    parser.add_argument_group("input").add_argument(
        "parts",
        metavar="PARTS.json",
        help="the JSON file of the partitions, or a folder that PyG or GraphLearn wrote",
    )
    report = parser.add_argument_group("report")
    report.add_argument("--json", action="store_true", help="print one JSON object")
    report.add_argument(
        "--verify", "--check", dest="check", action="store_true",
        help="compare all files with the digests in the JSON; status 1 where one differs",
    )  # fmt: skip
    add_plot_arguments(report, "sizes of parts and rows between them")
    add_cut_model(parser)
    return parser
