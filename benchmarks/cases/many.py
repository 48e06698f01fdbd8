"""What a rank holds and takes where there are many of them: starting, and training a tiny graph."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import graphs
from benchmarks.cluster import APART
from benchmarks.registry import Figure, Options, Report, Table, benchmark

RANKS, NODES, EDGES = (8, 16, 32, 64), 100, 800  # of a rank
EPOCHS, BATCH, FANOUTS = 3, "32", "5,5"
START_SECONDS = 60.0  # of a processor: 64 ranks, from the launcher's start to a model
KINDS = {"full-batch": [], "sampled": ["--sampled", "--fanouts", FANOUTS, "--batch-size", BATCH]}
COLUMNS = [
    "ranks", "training", "start: cpu s a rank", "all", "wall s", "sockets a rank", "threads",
    "MB of memory a rank, shared pages by users", "epoch: cpu s of all", "wall s",
    "KB sent a step and rank", "exchanges",
]  # fmt: skip


@benchmark("many-ranks", "limits")
def many_ranks(options: Options) -> Report:
    """8 to 64 ranks on this machine, over sockets: 100 nodes each, 2-layer SAGE, a random cut.

    Ranks are started as by `sar train`, from one process. Start is until the model is made; its
    processor seconds are of all ranks and of the process that they are forked from. An epoch is the
    mean of those after the first.
    """
    report = Report(tables=[Table("By ranks", COLUMNS)])
    for ranks in RANKS:
        cut = ("random", ranks)
        graph = graphs.community(options, [cut], ranks * NODES, ranks * EDGES)
        for kind, words in KINDS.items():
            row = _measured(str(graph.parts[cut]), ranks, words)
            report.tables[0].rows.append([ranks, kind, *row])
            if ranks == RANKS[-1] and not words:
                figure = Figure(f"{ranks} ranks: start", row[1], "cpu s", at_most=START_SECONDS)
                report.figures.append(figure)
    return report


def _measured(parts: str, ranks: int, words: list[str]) -> list[Any]:
    """A row of the table."""
    import sar

    kept = {name: os.environ.get(name) for name in APART}
    os.environ.update(APART)
    try:
        began = time.time()
        found = sar.launch(rank, ranks, (parts, words, began), timeout=600)
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    each = {name: [one[name] for one in found] for name in found[0]}
    return [
        mean(each["start_cpu"]),
        sum(each["start_cpu"]) + each["parent_cpu"][0],
        max(each["start_wall"]),
        max(each["sockets"]),
        max(each["threads"]),
        mean(each["memory"]) / 1e6,
        sum(each["cpu"]),
        max(each["wall"]),
        mean(each["bytes"]) / 1e3,
        mean(each["exchanges"]),
    ]


def rank(parts: str, words: list[str], began: float) -> list[dict[str, float]] | None:
    """Train as `sar train` does; what each rank took, on rank 0."""
    import torch

    import sar
    from sar.__main__ import read_words
    from sar.cli.train import make_trainer
    from sar.comm.collectives import gather_json

    group = sar.initialize_comms(timeout=600)
    more = ["--model", "sage", "--layers", "2", "--hidden", "16", "--no-progress", *words]
    trainer = make_trainer(read_words(["train", parts, *more]), group, torch.device("cpu"))
    group.all_reduce(torch.zeros(1))
    took: dict[str, float] = {
        "start_cpu": time.process_time(),
        "start_wall": time.time() - began,
        "parent_cpu": _cpu_seconds(os.getppid()),
    }
    groups = [group]
    if trainer.batches is not None:
        groups.append(trainer.batches.loader._exchange.group)
    trainer.train_epoch()
    trainer.epoch = 1
    begin = time.process_time(), time.perf_counter(), *_sent(groups)
    for _ in range(EPOCHS):
        trainer.train_epoch()
        trainer.epoch += 1
    end = time.process_time(), time.perf_counter(), *_sent(groups)
    steps = EPOCHS * (1 if trainer.batches is None else len(trainer.batches))
    for name, before, after in zip(("cpu", "wall", "bytes", "exchanges"), begin, end, strict=True):
        took[name] = (after - before) / (EPOCHS if name in ("cpu", "wall") else steps)
    took |= _holds()
    group.all_reduce(torch.zeros(1))  # nobody leaves before all have looked
    found = gather_json(took, group)
    if trainer.batches is not None:
        trainer.batches.close()
    sar.shutdown()
    return found or None


def _sent(groups: list[Any]) -> tuple[int, int]:
    counters = [group.counters for group in groups]
    return sum(one.sent_bytes for one in counters), sum(one.collectives for one in counters)


def _cpu_seconds(pid: int) -> float:
    """User and system, of a process and none of its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _holds() -> dict[str, float]:
    """Sockets and threads of this process, and its share of memory in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    (memory,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")]
    ends = [one for one in Path("/proc/self/fd").iterdir() if one.is_socket()]
    threads = len(os.listdir("/proc/self/task"))
    return {"sockets": len(ends), "threads": threads, "memory": memory}
