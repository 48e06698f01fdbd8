"""INPUT of the commands that run on ranks, and how it is cut where it is not cut yet."""

from __future__ import annotations

from typing import Any

from sar.cli.parser import Parser
from sar.cli.values import whole
from sar.words import DEFAULT_METHOD, METHODS


def add_input(parser: Parser) -> Any:
    """INPUT, and for experts how it is read and cut. Returns the group that they are in."""
    group = parser.add_argument_group("input")
    group.add_argument(
        "input", metavar="INPUT", help="partitions (.json, folder), or a graph to cut first"
    )
    group.add_argument(
        "--method", choices=METHODS, default=DEFAULT_METHOD,
        help="of the cut, where INPUT is not cut yet",
    )  # fmt: skip
    group.add_argument("--cut-seed", type=whole(0), default=0, help="seed of that cut")
    group.add_argument(
        "--verify", action="store_true",
        help="compare features with the digests in the JSON at once, not when they are first read",
    )  # fmt: skip
    parser.for_experts("--method", "--cut-seed", "--verify")
    return group
