"""The measurements behind each table of `sar bench`, as plain rows."""

from __future__ import annotations

from argparse import Namespace
from statistics import median
from typing import Any

from benchmarks import graphs, hosts
from benchmarks.cluster import ONE_THREAD
from benchmarks.contenders import DGL, ONE_SHOT, ORIGINAL, STRICT, Start, dgl, original, ours
from benchmarks.race import MB, epoch, race
from benchmarks.registry import Options
from sar.cli.options import parse_rate

Row = dict[str, Any]


def graph_of(args: Namespace) -> graphs.Prepared:
    """The generated graph with the cuts that are measured; kept in the cache."""
    cuts = [(args.method, size) for size in args.ranks]
    return graphs.rmat(Options(cache=args.cache), cuts, args.scale)


def compare(args: Namespace) -> dict[str, list[Row]]:
    """Every contender in turn, so that a busy machine slows all of them. Tables:

    * ``memory``: activation MB of the largest rank against the number of ranks, strict rounds;
    * ``speed``: seconds of an epoch, the slowest rank's wall, the sum of the rest;
    * ``traffic``: MB that all ranks send in an epoch, by layer and pass, where there are most.
    """
    graph, start = graph_of(args), dict[tuple[str, int], Start]()
    start[DGL, 1] = dgl(graph, args.model)
    for size in args.ranks:
        cut = (args.method, size)
        start[STRICT, size] = ours(graph, cut, args.model)
        start[ONE_SHOT, size] = ours(graph, cut, args.model, rounds=1)
        if args.sar_path is not None and args.model == "sage":  # its attention is of another commit
            checkout = args.sar_path.resolve()
            start[ORIGINAL, size] = original(graph, cut, checkout, environment=ONE_THREAD)
    largest = STRICT, max(args.ranks)

    def epochs(name: tuple[str, int]) -> int:
        return 1 if name[0] == DGL else 2  # more would fragment its heap

    found = race(start, args.epochs, memory=epochs, then_ask={largest: "traffic"})
    single = found.middle((DGL, 1), "activation") / MB
    tables: dict[str, list[Row]] = {"memory": [], "speed": []}
    for name, size in start:
        row = {"contender": name, "ranks": size}
        if name != ONE_SHOT:
            largest_rank = found.middle((name, size), "activation") / MB
            tables["memory"].append({**row, "mb": largest_rank, "even_share": single / size})
        wall, cpu, sent, busiest = (
            found.middle((name, size), key) for key in ("wall", "cpu", "sent", "busiest sent")
        )
        row |= {"wall_s": wall, "cpu": cpu, "sent_mb": sent / MB, "busiest_mb": busiest / MB}
        tables["speed"].append({**row, "cpu_over_dgl": found.ratio((name, size), (DGL, 1))})
    total: dict[tuple[str, str], float] = {}
    for rank in found.asked[largest]:
        for layer, work, nbytes in rank:
            total[layer, work] = total.get((layer, work), 0.0) + nbytes / MB
    tables["traffic"] = [
        {"layer": layer or "other", "pass": work, "sent_mb": mb}
        for (layer, work), mb in total.items()
        if mb
    ]
    return tables


def bandwidth(args: Namespace) -> tuple[list[Row], str | None]:
    """Seconds of an epoch against the rate of the hosts' links; or why it was not measured.

    Each rank has a network namespace of its own. ``compute`` is the epoch without a limit, ``wire``
    the busiest host's bytes over the rate: no epoch takes less than the longer of the two.
    """
    reason = hosts.missing() if args.bandwidth else "no rate was asked for"
    size = max(args.ranks)
    if size == 1:
        reason = "one rank sends nothing"
    if reason is not None:
        return [], reason
    start, rows = ours(graph_of(args), (args.method, size), args.model), []
    with hosts.Hosts(size) as several, start(hosts=several) as cluster:

        def seconds() -> float:
            cluster.call("epoch")
            return median(epoch(cluster)["wall"] for _ in range(args.epochs))

        compute = seconds()
        for rate in args.bandwidth:
            several.set_rate(rate)
            before, wall = several.sent_bytes(), seconds()
            sent = [b - a for a, b in zip(before, several.sent_bytes())]
            bits = parse_rate(rate)
            wire = max(sent) / (args.epochs + 1) * 8 / bits
            rows.append(
                {"rate": rate, "bits": bits, "wall_s": wall, "compute_s": compute, "wire_s": wire}
                | {"over_bound": wall / max(compute, wire)}
            )
    return rows, None
