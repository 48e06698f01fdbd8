"""Whether computing and sending happen at the same time, on hosts with links of several rates."""

from __future__ import annotations

from statistics import median

from benchmarks import graphs, hosts, measure
from benchmarks.cluster import Cluster
from benchmarks.contenders import ours
from benchmarks.hosts import Hosts
from benchmarks.race import MB
from benchmarks.registry import Figure, Options, Report, Table, benchmark

RANKS = 4
CUT = ("metis", RANKS)
RATES = ("50mbit", "100mbit", "200mbit", "300mbit", "1gbit")
BOUND = 1.15
BOUND_RATES = ("100mbit", "300mbit", "1gbit")
WIRE_BOUND = 1.02
WARM_UP = 3  # epochs: what is sent once, for constant rows, is sent in these
TASK = "benchmarks.tasks.overlap:Overlap"


@benchmark("overlap", "wire")
def overlap(options: Options) -> Report:
    """Epochs at several rates against the longer of compute alone and wire alone; 4 hosts, SAGE.

    Hosts are network namespaces on this machine (root needed); R-MAT, METIS, one-shot and strict
    rounds. Compute alone is the epoch with exchanges that return at once, wire alone its exchanges
    without anything computed; the three take turns, an epoch behind one that is not timed. Bytes
    are counted at the hosts' interfaces.
    Busy is what the machine's processors worked in an epoch, on the mean of them: no order of the
    same work is quicker, and no ratio smaller.
    """
    reason = hosts.missing()
    if reason is not None:
        return Report(skipped=reason)
    graph = graphs.rmat(options, [CUT])
    table = Table(
        f"One epoch in wall seconds, medians of {options.repeats} turns; MB sent by all hosts.",
        ["rate", "rounds", "epoch", "compute alone", "wire alone", "ratio", "busy", "busy ratio"]
        + ["MB at interfaces", "MB of rows", "MB of gradients"],
    )
    report = Report(tables=[table])
    for rounds in (1, None):
        with (
            Hosts(RANKS) as links,
            ours(graph, CUT, task=TASK, rounds=rounds)(hosts=links) as ranks,
        ):
            for _ in range(WARM_UP):
                ranks.call("overlapped_epoch")
            for rate in RATES:
                links.set_rate(rate)
                _measure(report, links, ranks, rate, rounds, options.repeats)
    return report


def _measure(
    report: Report, links: Hosts, ranks: Cluster, rate: str, rounds: int | None, repeats: int
) -> None:
    """One rate: a row of the table and its figures."""
    before = sum(links.sent_bytes())
    sent = ranks.call("watch")
    at_interfaces = sum(links.sent_bytes()) - before
    turns: dict[str, list[float]] = {"overlapped_epoch": [], "compute_alone": [], "wire_alone": []}
    busy = []
    for _ in range(repeats):
        ranks.call("overlapped_epoch")  # the system may have taken back memory meanwhile
        start = measure.busy_seconds()
        turns["overlapped_epoch"].append(max(ranks.call("overlapped_epoch")))
        busy.append(measure.busy_seconds() - start)
        for name in ("compute_alone", "wire_alone"):
            turns[name].append(max(ranks.call(name)))
    rows, sums = (sum(one[kind] for one in sent) for kind in ("rows", "sums"))
    epoch, compute, wire = (median(seconds) for seconds in turns.values())
    least = max(compute, wire)
    ratio = epoch / least
    kind = "one-shot" if rounds == 1 else "strict"
    report.tables[0].rows.append(
        [rate, kind, epoch, compute, wire, ratio, median(busy), median(busy) / least]
        + [at_interfaces / MB, rows / MB, sums / MB]
    )
    bound = BOUND if rate in BOUND_RATES else None
    name = f"{rate}, {kind}: epoch / max(compute alone, wire alone)"
    report.figures.append(Figure(name, ratio, at_most=bound))
    share = at_interfaces / (rows + sums)
    name = f"{rate}, {kind}: bytes at the interfaces / bytes of rows and gradients"
    report.figures.append(Figure(name, share, at_most=WIRE_BOUND))
