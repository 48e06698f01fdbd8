"""The options of `sar plan`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from sar.cli.arguments.model import add_model_arguments, check_model
from sar.cli.arguments.pictures import add_plot_arguments
from sar.cli.parser import Parser
from sar.cli.values import positive, rate, size, zero_or_more
from sar.words import ACTIVATIONS, CONSTANT_INPUTS


def add_parser(subparsers: Any) -> Parser:
    parser = subparsers.add_parser(
        "plan",
        help="predict memory, traffic and time of a run",
        description="Predict peak memory, bytes an epoch and time of an epoch from counted rows, "
        "and from costs of the model that are measured on small graphs on this machine.",
    )
    graph = parser.add_argument_group("input")
    graph.add_argument(
        "graph", metavar="PARTS.json|NAME",
        help="partitions, or the name of a known graph such as ogbn-products",
    )  # fmt: skip
    model = parser.add_argument_group("model")
    add_model_arguments(model)
    model.add_argument(
        "--feature-width", type=positive, metavar="F", help="of the input; default: the graph's"
    )
    model.add_argument(
        "--classes", type=positive, metavar="C", help="of the output; default: the graph's, or 16"
    )
    model.add_argument(
        "--activations", nargs="+", choices=ACTIVATIONS, default=["keep", "recompute"],
        metavar="HOW", help="what is compared",
    )  # fmt: skip
    model.add_argument(
        "--constant-inputs", choices=CONSTANT_INPUTS, default="memory", help="as of sar train"
    )
    machines = parser.add_argument_group("machines")
    machines.add_argument("--hosts", type=positive, help="default: one for each part")
    machines.add_argument(
        "--ranks-per-host", type=positive, default=1, metavar="R", help="that share its link"
    )
    machines.add_argument(
        "--cores", type=positive, metavar="C", help="of a host; default: one for each thread"
    )
    machines.add_argument("--threads", type=positive, default=1, help="of a rank")
    machines.add_argument("--bandwidth", type=rate, default="25Gbit", help="of a host")
    machines.add_argument("--memory", type=size, help="of a host, like 256GiB")
    graph.add_argument(
        "--halo-share", type=zero_or_more,
        help="rows a rank receives over rows it owns; default: what a random cut gives",
    )  # fmt: skip
    graph.add_argument(
        "--as-stored", action="store_true", help="do not add the reverse of every directed edge"
    )
    report = parser.add_argument_group("report")
    report.add_argument("--json", action="store_true", help="print one JSON object")
    add_plot_arguments(report, "memory and time against the number of ranks")
    parser.for_experts(
        "--heads", "--call", "--front-end", "--constant-inputs", "--halo-share", "--as-stored"
    )  # fmt: skip
    return parser


def check(args: argparse.Namespace) -> Iterator[str]:
    """What options say together."""
    yield from check_model(args)
    if args.model == "rgcn":
        yield "--model: got rgcn, which is for several node types; those are not planned"
