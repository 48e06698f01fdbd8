"""The measurements behind each table of `sar bench`, as plain rows."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks import hosts
from benchmarks.cluster import Cluster
from benchmarks.race import MB, WARM_UP, race
from benchmarks.tables.contenders import Request

Row = dict[str, Any]


def memory(request: Request) -> list[Row]:
    """Activation MB of the largest rank against the number of ranks, strict rounds."""
    graph = request.graph()
    with request.dgl(graph) as cluster:
        single = cluster.call("memory", epochs=1)[0]["activation"] / MB
    rows: list[Row] = [{"contender": "DGL", "ranks": 1, "mb": single, "even_share": single}]
    for size in request.ranks:
        with request.sar(graph, size, None) as cluster:
            rows.append(_memory_row("sar, strict", size, cluster, single))
        if request.compares_original:
            with request.original(graph, size) as cluster:
                rows.append(_memory_row("IntelLabs SAR", size, cluster, single))
    return rows


def _memory_row(name: str, size: int, cluster: Cluster, single: float) -> Row:
    largest = max(rank["activation"] for rank in cluster.call("memory", epochs=2)) / MB
    return {"contender": name, "ranks": size, "mb": largest, "even_share": single / size}


def speed(request: Request) -> list[Row]:
    """Seconds of an epoch, every contender in turn, so that a busy machine slows all of them."""
    graph = request.graph()
    start: dict[tuple[str, int], Callable[[], Cluster]] = {("DGL", 1): lambda: request.dgl(graph)}
    for size in request.ranks:
        for name, rounds in (("sar, strict", None), ("sar, one-shot", 1)):
            start[name, size] = lambda size=size, rounds=rounds: request.sar(graph, size, rounds)
        if request.compares_original:
            start["IntelLabs SAR", size] = lambda size=size: request.original(graph, size)
    found = race(start, request.epochs, turn=_epoch)
    rows = []
    for name, size in start:
        middle = {key: found.middle((name, size), key) for key in found.turns[name, size][0]}
        ratio = found.ratio((name, size), ("DGL", 1))
        rows.append({"contender": name, "ranks": size, **middle, "cpu_over_dgl": ratio})
    return rows


def _epoch(cluster: Cluster) -> Row:
    """One epoch of all ranks: the slowest rank's wall, the sum of the rest."""
    ranks = cluster.call("epoch")
    return {
        "wall_s": max(rank["wall"] for rank in ranks),
        "cpu": sum(rank["cpu"] for rank in ranks),
        "sent_mb": sum(rank["sent"] for rank in ranks) / MB,
        "busiest_mb": max(rank["sent"] for rank in ranks) / MB,
    }


def bandwidth(request: Request) -> tuple[list[Row], str | None]:
    """Seconds of an epoch against the rate of the hosts' links; or why it was not measured.

    Each rank has a network namespace of its own. ``compute`` is the epoch without a limit, ``wire``
    the busiest host's bytes over the rate: no epoch takes less than the longer of the two.
    """
    reason = hosts.missing() if request.rates else "no rate was asked for"
    size = max(request.ranks)
    if size == 1:
        reason = "one rank sends nothing"
    if reason is not None:
        return [], reason
    graph, rows = request.graph(), []
    with hosts.Hosts(size) as several, request.sar(graph, size, None, several) as cluster:
        cluster.call("epoch")
        compute = _median_epoch(cluster, request.epochs)["wall_s"]
        for rate in request.rates:
            several.set_rate(rate)
            cluster.call("epoch")
            before = several.sent_bytes()
            epoch = _median_epoch(cluster, request.epochs)
            sent = [b - a for a, b in zip(before, several.sent_bytes())]
            wire = max(sent) / request.epochs * 8 / bits(rate)
            bound = max(compute, wire)
            rows.append(
                {"rate": rate, "bits": bits(rate), "wall_s": epoch["wall_s"], "compute_s": compute}
                | {"wire_s": wire, "over_bound": epoch["wall_s"] / bound}
            )
    return rows, None


def _median_epoch(cluster: Cluster, epochs: int) -> Row:
    found = [_epoch(cluster) for _ in range(epochs)]
    return {name: median(one[name] for one in found) for name in found[0]}


def bits(rate: str) -> float:
    """Bits a second of a rate as tc writes it; raises ``ValueError``."""
    from sar.cli.options import parse_rate

    return parse_rate(rate)


def traffic(request: Request) -> list[Row]:
    """MB that all ranks send in an epoch, by layer and pass, at the largest number of ranks."""
    graph, size = request.graph(), max(request.ranks)
    with request.sar(graph, size, None) as cluster:
        for _ in range(WARM_UP):  # what is sent once, for constant rows, is sent in these
            cluster.call("epoch")
        found = cluster.call("traffic")
    total: dict[tuple[str, str], float] = {}
    for rank in found:
        for layer, work, sent in rank:
            total[layer, work] = total.get((layer, work), 0.0) + sent / MB
    return [{"layer": a or "other", "pass": b, "sent_mb": mb} for (a, b), mb in total.items() if mb]
