"""What a training run tells when it ends: a few lines, and a JSON of every epoch and rank."""

from __future__ import annotations

import json
import platform
import statistics
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import sar
from sar.cli.outputs import write_whole
from sar.comm import Group
from sar.train import memory
from sar.train.trainer import Record


def gather_ranks(baseline: float, group: Group) -> list[dict[str, Any]]:
    """A row of numbers for each rank; collective."""
    counters = group.counters
    traffic = [counters.sent_bytes, counters.received_bytes, counters.avoided_bytes]
    mine = torch.tensor([memory.peak_mb(), baseline, *traffic], dtype=torch.float64)
    rows = [row.tolist() for row in group.all_gather(mine)]
    return [
        {
            "rank": rank,
            "peak_rss_mb": peak,
            "baseline_rss_mb": base,
            "sent_bytes": int(sent),
            "received_bytes": int(received),
            "avoided_bytes": int(avoided),
        }
        for rank, (peak, base, sent, received, avoided) in enumerate(rows)
    ]


def _versions() -> dict[str, str]:
    found = {"sar": sar.__version__, "python": platform.python_version()}
    for package in ("torch", "dgl", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def report(
    path: str | None, epochs: list[Record], ranks: list[dict[str, Any]], config: dict[str, Any]
) -> None:
    """Print the last epoch and the ranks' numbers; write everything to ``path`` as JSON."""
    if path is not None:
        content = {"epochs": epochs, "ranks": ranks, "config": config, "versions": _versions()}
        text = json.dumps(content, indent=1, allow_nan=False)
        write_whole(Path(path), lambda file: file.write(text.encode()))
    last = epochs[-1]
    scores = ", ".join(
        f"{split} {last[split + '_acc']:.4f}"
        for split in ("train", "val", "test")
        if last[split + "_acc"] is not None
    )
    print(f"epoch {last['epoch']}: loss {last['loss']:.4f}; {config['metric']}: {scores}")
    print(f"seconds per epoch: {statistics.median(epoch['seconds'] for epoch in epochs):.3f}")
    print("rank  peak MB  above start MB   sent MB")
    for row in ranks:
        above = row["peak_rss_mb"] - row["baseline_rss_mb"]
        sent = row["sent_bytes"] / 2**20
        print(f"{row['rank']:>4} {row['peak_rss_mb']:>8.0f} {above:>15.0f} {sent:>9.1f}")
    avoided = sum(row["avoided_bytes"] for row in ranks) / 2**20
    print(f"constant inputs: {config['constant_inputs']}; {avoided:.1f} MB not sent again")
