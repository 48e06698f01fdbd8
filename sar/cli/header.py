"""What a run of `sar train` shows before its first epoch."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sar.cli.launch import backend_of
from sar.cli.ranks import LAUNCHER_PID
from sar.comm import Group
from sar.partition.book import PartitionBook
from sar.train.data import SPLITS
from sar.train.trainer import Trainer


def tell_ranks(args: argparse.Namespace, book: PartitionBook, size: int, threads: int) -> None:
    """The graph and the ranks: known before any of them has started."""
    nodes, edges = f"{book.num_nodes():,} nodes", f"{book.num_edges():,} edges"
    _tell("graph", f"{book.graph_name}: {nodes}, {edges}, {_count(book.num_parts, 'part')}")
    each = f"{_count(threads, 'thread')} each"
    _tell("ranks", f"{size} on {args.device}, {backend_of(args)}, {each}")


def tell_ranks_joined(args: argparse.Namespace, book: PartitionBook, group: Group) -> None:
    """The same by rank 0, where something else than this command started the ranks."""
    if group.rank == 0 and LAUNCHER_PID not in os.environ:
        tell_ranks(args, book, group.size, torch.get_num_threads())


def tell_model(args: argparse.Namespace, trainer: Trainer) -> None:
    """The data and the model; collective."""
    data, group = trainer.data, trainer.group
    counts = torch.tensor([len(data.rows.get(split, ())) for split in SPLITS])
    total = group.all_reduce(counts).tolist()
    if group.rank != 0:
        return
    nodes = ", ".join(f"{count:,} {split}" for split, count in zip(SPLITS, total, strict=True))
    kind = "labels a node" if data.multilabel else "classes"
    widths = data.widths if isinstance(data.widths, dict) else {"": data.widths}
    width = " and ".join(f"{one:,} features {of}".rstrip() for of, one in widths.items())
    _tell("data", f"{width}, {data.num_classes:,} {kind}; nodes: {nodes}")
    parameters = sum(param.numel() for param in trainer.model.parameters())
    epochs = _count(trainer.options.epochs, "epoch")
    done = f", {trainer.epoch:,} of them done" if trainer.epoch else ""
    _tell("model", f"{args.model}, {parameters:,} parameters; {epochs}{done}")
    if ":" in args.model:
        _tell("called", f"{trainer.call}, front end {trainer.call.front_end}")
    _tell("metric", f"{trainer.metric}; blocks of the training nodes: {trainer.mfgs}")


@contextmanager
def layers_told(group: Group) -> Iterator[None]:
    """Inside, rank 0 shows what computes the layers, which the first forward pass tells."""
    logger = logging.getLogger("sar")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"{'layers':<8} %(message)s"))
    level = logger.level
    if group.rank == 0:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _tell(what: str, text: str) -> None:
    print(f"{what:<8} {text}", flush=True)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
