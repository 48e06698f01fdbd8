"""The options of `sar train`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from sar.cli.arguments.inputs import add_input
from sar.cli.arguments.model import add_model_arguments, check_model
from sar.cli.arguments.pictures import add_run_arguments
from sar.cli.arguments.ranks import add_rank_arguments, check_ranks
from sar.cli.parser import Parser, closest
from sar.cli.values import Value, above_zero, fanouts, positive, whole, zero_or_more
from sar.words import ACTIVATIONS, METRICS, MFGS, MODELS, SCHEDULES


def add_parser(subparsers: Any) -> Parser:
    parser = subparsers.add_parser(
        "train",
        help="train a model on a partitioned graph",
        description="Train a model full-batch and exactly, one rank for each part of the graph. "
        "Starts the ranks on this machine, or is one of those that torchrun started.",
    )
    _add_data_arguments(add_input(parser))
    add_model_arguments(parser.add_argument_group("model"))
    training = parser.add_argument_group("training")
    _add_loop_arguments(training)
    _add_sampling_arguments(training)
    _add_result_arguments(parser.add_argument_group("results"))
    add_rank_arguments(parser)
    parser.for_experts(
        "--heads", "--multilabel", "--normalize-features", "--schedule", "--weight-decay",
        "--clip-norm", "--eval-every", "--mfgs", "--activations-directory", "--sampled-epochs",
        "--checkpoint-steps", "--activations", "--checkpoint-every", "--trace", "--no-progress",
        "--explain", "--dark", "--warmup", "--call", "--front-end", "--log-every", "--metric",
        "--batch-size",
    )  # fmt: skip
    return parser


def _add_data_arguments(group: Any) -> None:
    group.add_argument("--features", default="feat", metavar="NAME", help="field of the input rows")
    group.add_argument("--labels", default="label", metavar="NAME", help="field of the labels")
    group.add_argument(
        "--target-type", metavar="TYPE",
        help="node type to predict; default: the one with labels",
    )  # fmt: skip
    group.add_argument("--multilabel", action="store_true", help="labels are a 0/1 matrix")
    group.add_argument("--normalize-features", action="store_true", help="rows sum to 1")


def _add_loop_arguments(group: Any) -> None:
    group.add_argument("--epochs", type=positive, default=100, help="in all, also when resumed")
    group.add_argument("--lr", type=above_zero, default=0.01, help="learning rate, Adam's")
    group.add_argument(
        "--early-stop", type=whole(0), default=0,
        help="end after N epochs that brought nothing better, 0: never",
    )  # fmt: skip
    group.add_argument("--seed", type=whole(0), default=0, help="of parameters and dropout")
    group.add_argument(
        "--metric", type=Value("WORD", _metric),
        help=f"{', '.join(METRICS)}; default: accuracy, or f1-micro with --multilabel",
    )  # fmt: skip
    group.add_argument(
        "--activations", choices=ACTIVATIONS, default="keep",
        help="what layers do with what backward needs",
    )  # fmt: skip
    group.add_argument(
        "--activations-directory", metavar="DIR", help="folder on a disk, for --activations offload"
    )
    group.add_argument("--weight-decay", type=zero_or_more, default=0.0, help="Adam's")
    group.add_argument("--schedule", choices=SCHEDULES, default="constant", help="of --lr")
    group.add_argument(
        "--warmup", type=whole(0), default=0, help="epochs in which the learning rate rises first"
    )
    group.add_argument("--clip-norm", type=above_zero, help="largest gradient norm")
    group.add_argument("--eval-every", type=positive, default=1, help="epochs between evaluations")
    group.add_argument(
        "--mfgs", choices=MFGS, default="auto",
        help="train on the rows alone that reach the loss; auto: when that saves a fifth",
    )  # fmt: skip


def _metric(text: str) -> str:
    if text not in METRICS:
        known = ", ".join(METRICS)
        raise ValueError(f"got {text!r}, expected one of {known}{closest(text, METRICS)}")
    return text


def _add_sampling_arguments(group: Any) -> None:
    group.add_argument(
        "--sampled", action="store_true", help="train on mini-batches, not on the whole graph"
    )
    group.add_argument(
        "--fanouts", type=fanouts,
        help="in-edges drawn a layer, seeds' first; default: 15,10,5",
    )  # fmt: skip
    group.add_argument(
        "--batch-size", type=positive, help="seeds of a rank and step; default: 1024"
    )
    group.add_argument(
        "--sampled-epochs", type=positive,
        help="sample the first N epochs, the others are full-batch; default: all",
    )  # fmt: skip
    group.add_argument(
        "--checkpoint-steps", type=whole(0),
        help="steps between checkpoints inside of an epoch; default: none",
    )  # fmt: skip


def _add_result_arguments(group: Any) -> None:
    group.add_argument("--checkpoint", metavar="DIR", help="folder to save the run in")
    group.add_argument("--resume", action="store_true", help="continue from --checkpoint")
    group.add_argument(
        "--json", metavar="OUT.json", help="write all at the end, and epochs at once in OUT.jsonl"
    )
    group.add_argument(
        "--logger", action="append", default=[], metavar="TO:WHERE",
        help="write epochs to jsonl:, csv:, tensorboard: or wandb:",
    )  # fmt: skip
    group.add_argument(
        "--log-every", type=positive, default=1,
        help="epochs from one line to the next where there is no terminal",
    )  # fmt: skip
    add_run_arguments(group)
    group.add_argument("--explain", action="store_true", help="show first what computes each layer")
    group.add_argument(
        "--checkpoint-every", type=positive, default=10, help="epochs between checkpoints"
    )
    group.add_argument(
        "--trace", metavar="OUT.json", help="write what every rank did when, in Chrome's format"
    )
    group.add_argument(
        "--no-progress", action="store_true", help="show no bar and no lines of epochs"
    )


def check(args: argparse.Namespace) -> Iterator[str]:
    """What options say together."""
    yield from check_model(args)
    yield from check_ranks(args)
    yield from _check_sampling(args)
    if args.resume and args.checkpoint is None:
        yield "--resume: got no --checkpoint, expected the folder to continue from"
    if args.activations_directory is not None and args.activations != "offload":
        yield "--activations-directory: expected --activations offload with it"


def _check_sampling(args: argparse.Namespace) -> Iterator[str]:
    if not args.sampled:
        for name in ("fanouts", "batch_size", "sampled_epochs", "checkpoint_steps"):
            if getattr(args, name) is not None:
                yield f"--{name.replace('_', '-')}: got one, expected --sampled as well"
        return
    count = 3 if args.fanouts is None else len(args.fanouts)
    if args.model in MODELS and count != args.layers:
        yield f"--fanouts: got {count}, expected one for each of {args.layers} layers"
    if args.model == "gcn":
        yield (
            "--model: got 'gcn', which normalizes by degrees of the whole graph, and mini-batches "
            "do not hold them; expected sage, gin or gat"
        )
