"""Output of a training run: lines before its first epoch and at its end, and its JSON."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import sar
from sar.cli.fork_server import REPORT
from sar.cli.launch import backend_of
from sar.cli.turns import told
from sar.comm import Group
from sar.comm.collectives import gather_json
from sar.files import write_whole
from sar.kernels.device import is_host, peak_bytes
from sar.memory.parts import summary_text
from sar.partition.book import PartitionBook
from sar.train import memory
from sar.train.callbacks import Record, without_old_names
from sar.train.data import SPLITS
from sar.train.trainer import Trainer


def print_ranks(args: argparse.Namespace, book: PartitionBook, size: int, threads: int) -> None:
    """Print the graph and the ranks, known before any of them has started."""
    nodes, edges = f"{book.num_nodes():,} nodes", f"{book.num_edges():,} edges"
    _print("graph", f"{book.graph_name}: {nodes}, {edges}, {_count(book.num_parts, 'part')}")
    each = f"{_count(threads, 'thread')} each"
    how = backend_of(args) if args.out_of_core is None else "in turns in one process"
    _print("ranks", f"{size} on {args.device}, {how}, {each}")


def print_ranks_joined(args: argparse.Namespace, book: PartitionBook, group: Group) -> None:
    """:func:`print_ranks` by rank 0, where something else than this command started the ranks."""
    if group.rank == 0 and REPORT not in os.environ:
        print_ranks(args, book, group.size, torch.get_num_threads())


def print_model(args: argparse.Namespace, trainer: Trainer) -> None:
    data, group = trainer.data, trainer.group
    counts = torch.tensor([len(data.rows.get(split, ())) for split in SPLITS])
    total = group.all_reduce(counts).tolist()
    if group.rank != 0:
        return
    nodes = ", ".join(f"{count:,} {split}" for split, count in zip(SPLITS, total, strict=True))
    kind = "labels a node" if data.multilabel else "classes"
    widths = data.widths if isinstance(data.widths, dict) else {"": data.widths}
    width = " and ".join(f"{one:,} features {of}".rstrip() for of, one in widths.items())
    _print("data", f"{width}, {data.num_classes:,} {kind}; nodes: {nodes}")
    parameters = sum(param.numel() for param in trainer.model.parameters())
    epochs = _count(trainer.options.epochs, "epoch")
    done = f", {trainer.epoch:,} of them done" if trainer.epoch else ""
    _print("model", f"{args.model}, {parameters:,} parameters; {epochs}{done}")
    if ":" in args.model:
        _print("called", f"{trainer.call}, front end {trainer.call.front_end}")
    _print("metric", f"{trainer.metric}; blocks of the training nodes: {trainer.mfgs}")


@contextmanager
def log_layers(group: Group) -> Iterator[None]:
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


def _print(what: str, text: str) -> None:
    print(f"{what:<8} {text}", flush=True)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def gather_ranks(baseline: float, group: Group, device: torch.device) -> list[dict[str, Any]]:
    """Memory and traffic of each rank, a device's memory where there is one; collective."""
    counters = group.counters
    numbers = [counters.sent_bytes, counters.received_bytes, counters.avoided_bytes]
    numbers.append(peak_bytes(device))
    mine = torch.tensor([memory.peak_mb(), baseline, *numbers], dtype=torch.float64)
    rows = [row.tolist() for row in group.all_gather(mine)]
    return [
        {
            "rank": rank,
            "peak_rss_mb": peak,
            "baseline_rss_mb": base,
            "sent_bytes": int(sent),
            "received_bytes": int(received),
            "avoided_bytes": int(avoided),
            **({} if is_host(device) else {"peak_device_mb": on_device / 2**20}),
        }
        for rank, (peak, base, sent, received, avoided, on_device) in enumerate(rows)
    ]


def gather_layers(rows: list[dict[str, Any]], group: Group) -> list[dict[str, Any]]:
    """Rows of :meth:`sar.models.tracing.Trace.summary` over all ranks, on rank 0; collective.
    Seconds are means over ranks, with the longest ``compute`` and ``wait``; bytes and exchanges are
    sums."""
    layers: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in [row for rows in gather_json(rows, group) for row in rows]:
        layers.setdefault((row["layer"], row["pass"]), []).append(row)
    merged = []
    for (layer, work), same in layers.items():
        total: dict[str, Any] = {"layer": layer, "pass": work}
        for name in ("compute", "wait"):
            seconds = [row[name] for row in same]
            total[name] = sum(seconds) / group.size
            total[f"longest_{name}"] = max(seconds)
        for name in ("sent", "received", "exchanges"):
            total[name] = sum(row[name] for row in same)
        merged.append(total)
    return merged


def _versions() -> dict[str, str]:
    found = {"sar": sar.__version__, "python": platform.python_version()}
    for package in ("torch", "dgl", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _line_of(record: Record, metric: str) -> str:
    scores = ", ".join(
        f"{split} {record[split + '_acc']:.4f}"
        for split in SPLITS
        if record[split + "_acc"] is not None
    )
    return f"{record['epoch']}: loss {record['loss']:.4f}; {metric}: {scores}"


def report(
    args: argparse.Namespace,
    trainer: Trainer,
    ranks: list[dict[str, Any]],
    config: dict[str, Any],
    layers: list[dict[str, Any]],
    timed_epochs: int,
) -> dict[str, Any]:
    """Print the last and the best epoch, the layers' and the ranks' numbers; write all as JSON,
    which is returned. ``layers`` are sums over ``timed_epochs``."""
    epochs, best = trainer.history, trainer.best
    content: dict[str, Any] = {
        "began": datetime.fromtimestamp(args.began).astimezone().isoformat(timespec="seconds"),
        "command": args.typed,
        "seconds": time.time() - args.began,
        "epochs": epochs,
        "ranks": ranks,
        "timed_epochs": timed_epochs,
        "layers": layers,
        "config": config,
        "versions": _versions(),
        "metric": trainer.metric,
        "best": best and without_old_names(best, trainer.metric),
        "stopped_early": trainer.stopped_early,
        **told(trainer.group),
    }
    if args.json is not None:
        text = json.dumps(content, indent=1, allow_nan=False)
        write_whole(Path(args.json), lambda file: file.write(text.encode()), durable=True)
    print(f"epoch {_line_of(epochs[-1], trainer.metric)}")
    if best is not None:
        print(f"best by validation: epoch {_line_of(best, trainer.metric)}")
    if trainer.stopped_early:
        print(f"stopped early: {trainer.options.early_stop} epochs brought nothing better")
    print(f"seconds per epoch: {statistics.median(epoch['seconds'] for epoch in epochs):.3f}")
    print(f"{'layer':<16} {'pass':<8}  compute s    wait s   sent MB, per epoch and rank")
    for row in layers:
        share = 1e6 * timed_epochs * len(ranks)
        seconds = [row[name] / timed_epochs for name in ("compute", "wait")]
        times = " ".join(f"{value:>9.4f}" for value in seconds)
        print(f"{row['layer']:<16} {row['pass']:<8}  {times} {row['sent'] / share:>9.2f}")
    on_device = "peak_device_mb" in ranks[0]
    print("rank  peak MiB  above start MiB   sent MB" + "  device peak MiB" * on_device)
    for row in ranks:
        above = row["peak_rss_mb"] - row["baseline_rss_mb"]
        sent = row["sent_bytes"] / 1e6
        print(
            f"{row['rank']:>4} {row['peak_rss_mb']:>9.0f} {above:>16.0f} {sent:>9.1f}"
            + (f" {row['peak_device_mb']:>16.0f}" if on_device else "")
        )
    print(f"blocks of the training nodes: {config['mfgs']}")
    avoided = sum(row["avoided_bytes"] for row in ranks) / 1e6
    if (file := content.get("out_of_core")) is not None:
        print(summary_text(file))
    print(f"constant inputs: {config['constant_inputs']}; {avoided:.1f} MB not sent again")
    return content
