"""The options of `sar evaluate`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from sar.cli.arguments.inputs import add_input
from sar.cli.arguments.model import check_own
from sar.cli.arguments.ranks import add_rank_arguments, check_ranks
from sar.cli.parser import Parser


def add_parser(subparsers: Any) -> Parser:
    parser = subparsers.add_parser(
        "evaluate",
        help="predict every node from a checkpoint",
        description="Run a checkpoint's model over the whole graph and write a prediction for "
        "every node, by its original id where the partitions hold orig_id.",
    )
    add_input(parser)
    group = parser.add_argument_group("predictions")
    group.add_argument("--checkpoint", required=True, metavar="DIR", help="of `sar train`")
    group.add_argument("--out", required=True, metavar="DIR", help="folder to write in")
    group.add_argument(
        "--gather", action="store_true", help="one predictions.npz instead of one file a rank"
    )
    group.add_argument("--logits", action="store_true", help="write the logits as well")
    group.add_argument(
        "--which", choices=("last", "best"), default="last",
        help="the model of the last epoch, or of the best validation metric",
    )  # fmt: skip
    group.add_argument(
        "--features", metavar="NAME", help="field of the input rows; default: as in training"
    )
    group.add_argument(
        "--labels", metavar="NAME", help="field of the labels; default: as in training"
    )
    group.add_argument(
        "--model", metavar="NAME",
        help="where your own model is now, as module:Class or file.py:Class; default: as in "
        "training",
    )  # fmt: skip
    add_rank_arguments(parser)
    return parser


def check(args: argparse.Namespace) -> Iterator[str]:
    """What options say together."""
    yield from check_ranks(args)
    if args.model is not None:
        if all(args.model.rpartition(":")):
            yield from check_own(args.model)
        else:
            yield f"--model: got {args.model!r}, expected module:Class or file.py:Class"
