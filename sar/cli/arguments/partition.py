"""The options of `sar partition`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from sar.cli.arguments.cut_model import add_cut_model
from sar.cli.arguments.pictures import add_plot_arguments
from sar.cli.parser import Parser, closest
from sar.cli.values import Value, positive, size, whole
from sar.words import BALANCES, DEFAULT_METHOD, FORMATS, INPUTS, KEEP, METHODS, SELF_LOOPS


def add_parser(subparsers: Any) -> Parser:
    parser = subparsers.add_parser(
        "partition",
        help="cut a graph into partitions",
        description="Cut a graph into partitions, one per rank, in DGL's partition_graph layout. "
        "The graph may be larger than memory. An interrupted run goes on from its cut.",
        usage="%(prog)s INPUT --parts P --out DIR [options]",
        epilog=f"INPUT is one of: {INPUTS}.",
    )
    output = parser.add_argument_group("input and output")
    output.add_argument("input", metavar="INPUT", help="the graph, see below")
    output.add_argument("--parts", type=positive, metavar="P", help="number of partitions")
    output.add_argument("--out", metavar="DIR", help="folder to write into")
    output.add_argument("--name", metavar="NAME", help="of the graph and of its JSON file")
    output.add_argument("--format", choices=FORMATS, default="dgl", help="layout")
    output.add_argument(
        "--overwrite", action="store_true", help="replace partitions that are in DIR"
    )
    output.add_argument(
        "--add-digests", action="store_true",
        help="cut nothing; give partitions that have none, as DGL's own, digests of their files",
    )  # fmt: skip
    _add_cut(parser.add_argument_group("cut"))
    _add_edges(parser.add_argument_group("edges and data"))
    report = parser.add_argument_group("report")
    report.add_argument("--json", action="store_true", help="print it as one JSON object")
    add_plot_arguments(report, "sizes of parts and rows between them")
    add_cut_model(parser)
    return parser


def _add_cut(cut: Any) -> None:
    known = (*METHODS, KEEP)

    def method(text: str) -> str:
        if text not in known:
            raise ValueError(
                f"got {text!r}, expected one of {', '.join(known)}{closest(text, known)}"
            )
        return text

    cut.add_argument(
        "--method", type=Value("WORD", method),
        help=f"{', '.join(METHODS)}, or {KEEP}: the parts of partitions that are read; "
        f"default: {DEFAULT_METHOD}",
    )  # fmt: skip
    cut.add_argument(
        "--assignment", metavar="FILE",
        help="the part of each node instead: .npy, a text file, or a folder of one for each type",
    )  # fmt: skip
    cut.add_argument(
        "--balance", type=Value("WHAT", _balance),
        help=f"what parts share equally beside nodes: some of {','.join(BALANCES)}; "
        "nodes: nothing else",
    )  # fmt: skip
    cut.add_argument("--seed", type=whole(0), default=0, help="of the cut")
    cut.add_argument(
        "--memory", type=size, help="that the run may use, like 8GiB; default: no bound"
    )


def _balance(text: str) -> str:
    known = ("nodes", *BALANCES)
    for one in text.split(","):
        if one not in known:
            raise ValueError(
                f"got {one!r}, expected some of {','.join(known)}{closest(one, known)}"
            )
    return text


def _add_edges(edges: Any) -> None:
    edges.add_argument(
        "--symmetrise", action="store_true", help="every edge in both directions, once"
    )
    edges.add_argument(
        "--drop-duplicates", action="store_true", help="of equal edges keep the first"
    )
    edges.add_argument("--self-loops", choices=SELF_LOOPS, default="keep", help="at each node")
    edges.add_argument(
        "--allow-nan", action="store_true", help="take features that are no finite numbers"
    )


def check(args: argparse.Namespace) -> Iterator[str]:
    """What options say together."""
    missing = [f"--{name}" for name in ("parts", "out") if getattr(args, name) is None]
    if args.add_digests and len(missing) < 2:
        yield "--add-digests: expected INPUT alone, without --parts and --out"
    elif missing and not args.add_digests:
        yield f"the following arguments are required: {', '.join(missing)}"
    if args.method is not None and args.assignment is not None:
        yield f"--method {args.method} and --assignment: expected one of them"
