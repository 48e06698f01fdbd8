"""Options of `sar train` that say what a run shows and writes, and when it ends."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from sar.cli.outputs import check_file, check_writable
from sar.train.callbacks import Callback
from sar.train.lock import check_free
from sar.train.loggers import JsonLines, LineFile, TensorBoard, make_logger
from sar.train.metrics import metric_of_dataset
from sar.train.options import TrainOptions

RESULT_FIELDS = ("warmup", "early_stop", "log_every")  # of the trainer's options


def result_options(args: argparse.Namespace) -> dict[str, int]:
    """Fields of :class:`TrainOptions`."""
    return {name: getattr(args, name) for name in RESULT_FIELDS}


def with_metric_of(name: str, options: TrainOptions) -> TrainOptions:
    """The options of a run on the graph of that name: OGB's data sets have their own metric."""
    return replace(options, metric=options.metric or metric_of_dataset(name))


def lines_of(out: str) -> Path:
    """The JSON lines beside ``--json``."""
    return Path(out).with_suffix(".jsonl")


def callbacks_of(args: argparse.Namespace, config: dict[str, Any]) -> list[Callback]:
    """The loggers that ``--json`` and ``--logger`` ask for.

    Args:
        config: the options of the run, for the header of JSON lines.
    """
    callbacks = [make_logger(text) for text in args.logger]
    if args.json is not None:
        callbacks.append(JsonLines(lines_of(args.json), {"config": config}))
    return callbacks


def check_results(args: argparse.Namespace) -> None:
    """Raise now what would be raised later: unknown loggers, packages that are absent, files that
    cannot be written, a folder that another run saves in."""
    loggers = [make_logger(text) for text in args.logger]
    if args.json is not None and lines_of(args.json) == Path(args.json):
        raise ValueError(
            f"--json: got {args.json!r}, expected another ending than .jsonl: the epochs are "
            "written to that file, line by line"
        )
    if os.environ.get("RANK", "0") != "0":  # only the first rank writes
        return
    for logger in loggers:
        if isinstance(logger, LineFile):
            check_file(logger.path, "--logger")
        elif isinstance(logger, TensorBoard):
            check_writable(logger.folder, "--logger")
    if args.json is not None:
        check_file(lines_of(args.json), "--json")
    if args.checkpoint is not None:
        check_free(Path(args.checkpoint))
