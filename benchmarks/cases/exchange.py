"""Rows on the wire for sums: every source row, or the fewest with partial sums among them."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks import graphs
from benchmarks.contenders import ours
from benchmarks.race import race
from benchmarks.registry import Figure, Options, Report, Table, benchmark

CUTS = [(method, ranks) for method in ("metis", "random") for ranks in (4, 8)]
SHARE = 0.6  # of the bytes of fetching every halo row in every layer and sending its gradient home
SLOWER = 1.02


@benchmark("exchange", "limits")
def exchange(options: Options) -> Report:
    """Rows by pull and by minimum vertex cover on each cut; SAGE's bytes and processor seconds
    with either, taking turns: R-MAT, METIS."""
    graph = graphs.rmat(options, CUTS)
    columns = ["cut", "pulled", "fewest", "share", "s to find, all ranks"]
    rows = Table("Rows that travel for one sum over all edges", columns)
    report = Report(tables=[rows])
    for (method, ranks), path in graph.parts.items():
        pulled, fewest, seconds = _count(path)
        rows.rows.append([f"{method}, {ranks} ranks", pulled, fewest, fewest / pulled, seconds])
        if method == "metis":
            _train(graph, (method, ranks), pulled, options, report)
    return report


def _count(path: Path) -> tuple[int, int, float]:
    from sar.partition.cover import count_fewest
    from sar.partition.load import load_partition, read_book

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


def _train(
    graph: graphs.Prepared, cut: graphs.Cut, pulled: int, options: Options, report: Report
) -> None:
    both = {name: ours(graph, cut, exchange=name) for name in ("pull", "auto")}
    found, ranks = race(both, options.repeats, memory=2), cut[1]
    title = f"One epoch of SAGE, {ranks} ranks, strict rounds, medians of {options.repeats} turns"
    report.tables.append(found.table(title, ["sent", "cpu", "activation"]))
    ratio = found.ratio("auto", "pull")
    report.figures.append(Figure(f"{ranks} ranks: cpu / that of pull", ratio, at_most=SLOWER))
    every = pulled * 4 * (128 + 2 * 256 + 2 * 16)  # each layer's row there and, but one, back
    share = found.middle("auto", "sent") / every
    report.figures.append(Figure(f"{ranks} ranks: sent / every row", share, at_most=SHARE))
