"""The options of `sar sample-server`."""

from __future__ import annotations

import argparse
from typing import Any

from sar.cli.arguments.inputs import add_input
from sar.cli.arguments.ranks import add_timeout
from sar.cli.parser import Parser
from sar.cli.values import Value, positive

_HERE = "127.0.0.1"


def add_parser(subparsers: Any) -> Parser:
    parser = subparsers.add_parser(
        "sample-server",
        help="make mini-batches of a partitioned graph for ranks that train",
        description="Hold the partitions, one rank for each, and make mini-batches for trainers: "
        "scripts that call sar.sampling.connect. Ends when they have left.",
    )
    add_input(parser)
    group = parser.add_argument_group("servers")
    group.add_argument(
        "--trainers", type=positive, required=True, metavar="T", help="ranks that will train"
    )
    group.add_argument(
        "--address", type=Value("HOST:PORT", _address), default=f"{_HERE}:0",
        help="where they and the servers meet, an address of this host; port 0 is any free one, "
        "which is printed",
    )  # fmt: skip
    group.add_argument(
        "--nproc", type=positive, metavar="P",
        help="servers to start here; default: one for each part",
    )  # fmt: skip
    group.add_argument(
        "--threads", type=positive, help="threads of a server; default: its share of the cores"
    )
    add_timeout(group)
    # What ranks start with where the command does not ask.
    parser.set_defaults(device="cpu", backend="gloo", allocator="system")
    return parser


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected HOST:PORT, such as 10.0.0.1:29500"
        )
    return text
