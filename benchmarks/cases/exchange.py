"""Rows on the wire for sums: every source row, or the fewest with partial sums among them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

CUTS = [(method, ranks) for method in ("metis", "random") for ranks in (4, 8)]
MB = 1e6
SHARE = 0.6  # of the bytes of fetching every halo row in every layer and sending its gradient home
SLOWER = 1.02


@benchmark("exchange", "limits")
def exchange(options: Options) -> Report:
    """Rows by pull and by minimum vertex cover on each cut; SAGE's bytes and processor seconds
    with either, taking turns: R-MAT, METIS."""
    graph = graphs.rmat(options, CUTS)
    rows = Table(
        "Rows that travel for one sum over all edges",
        ["cut", "pulled", "fewest", "share", "s to find, all ranks"],
    )
    report = Report(tables=[rows])
    pulled = {}
    for cut, path in graph.parts.items():
        pulled[cut], fewest, seconds = _count(path)
        name = f"{cut[0]}, {cut[1]} ranks"
        rows.rows.append([name, pulled[cut], fewest, fewest / pulled[cut], seconds])
    for ranks in (4, 8):
        cut = ("metis", ranks)
        report.tables.append(_train(graph.parts[cut], pulled[cut], ranks, options, report))
    return report


def _count(path: Path) -> tuple[int, int, float]:
    from sar.partition.book_file import read_book
    from sar.partition.cover import count_fewest
    from sar.partition.load import load_partition

    book = read_book(path)
    pulled = fewest = 0
    seconds = 0.0
    sizes = [end - start for start, end in book.part_ranges]
    for part in range(book.num_parts):
        (shard,) = load_partition(path, part).edges.values()
        begin = time.process_time()
        ends = (shard.src.numpy(), shard.dst.numpy())
        fewest += int(count_fewest(*ends, shard.offsets, sizes, part).sum())
        seconds += time.process_time() - begin
        for peer in range(book.num_parts):
            if peer != part:
                span = slice(shard.offsets[peer], shard.offsets[peer + 1])
                pulled += len(shard.src[span].unique())
    return pulled, fewest, seconds


def _train(path: Path, pulled: int, ranks: int, options: Options, report: Report) -> Table:
    from benchmarks.tasks.sage import HIDDEN

    table = Table(
        f"One epoch of SAGE, {ranks} ranks, strict rounds, medians of {options.repeats} turns",
        ["exchange", "sent MB", "cpu s", "activation MB"],
    )
    with ExitStack() as stack:
        clusters = {
            name: stack.enter_context(
                Cluster(
                    "benchmarks.tasks.sage:Sar", ranks, environment=LAUNCH,
                    parts=str(path), rounds=None, exchange=name,
                )
            )
            for name in ("pull", "auto")
        }  # fmt: skip
        memory = {name: cluster.call("memory", epochs=2) for name, cluster in clusters.items()}
        turns = {name: [] for name in clusters}
        for turn in range(options.repeats):
            for name in list(clusters)[:: 1 if turn % 2 else -1]:
                turns[name].append(clusters[name].call("epoch"))
    cpu = {n: [sum(r["cpu"] for r in epoch) for epoch in epochs] for n, epochs in turns.items()}
    for name, epochs in turns.items():
        sent = sum(rank["sent"] for rank in epochs[-1]) / MB
        activation = max(rank["activation"] for rank in memory[name]) / MB
        table.rows.append([name, sent, median(cpu[name]), activation])
    ratio = median(a / b for a, b in zip(cpu["auto"], cpu["pull"]))
    report.figures.append(Figure(f"{ranks} ranks: cpu / that of pull", ratio, at_most=SLOWER))
    every = pulled * 4 * (128 + 2 * HIDDEN + 2 * 16)  # each layer's row there and, but one, back
    share = sent * MB / every
    report.figures.append(Figure(f"{ranks} ranks: sent / every row", share, at_most=SHARE))
    return table
