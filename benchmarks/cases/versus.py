"""Beside IntelLabs SAR: same partitions, first parameters and seeds, taking turns."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import graphs, hosts
from benchmarks.cluster import LAUNCH, ONE_THREAD, Cluster, launch_environment
from benchmarks.contenders import ONE_SHOT, ORIGINAL, STRICT, Start, original, ours
from benchmarks.hosts import Hosts
from benchmarks.race import MB, Epoch, epoch, race
from benchmarks.registry import Figure, Options, Report, Table, benchmark
from sar.comm.one_host import SWITCH
from sar.words import ALLOCATORS

SOCKETS = f"{ONE_SHOT}, sockets"  # as theirs travel, on one machine too
NO_ZEROS = f"{STRICT}, zeros skipped"  # exact as well; worth it where links are slow
SKIPPED = "pass --sar-path with a checkout of IntelLabs SAR"


def checkout_for(kind: str, options: Options) -> Path | None:
    """The checkout whose layers of that kind run."""
    return options.sar_path if kind == "sage" else options.sar_path_gat or options.sar_path


def speed(
    kind: str,
    ranks: int,
    at_least: float,
    options: Options,
    rate: str | None = None,
    contenders: tuple[str, ...] = (SOCKETS, STRICT, ONE_SHOT),
    allocator: str = "system",
) -> Report:
    """Wall seconds of epochs, interleaved; with a rate, on hosts that are network namespaces.

    The last contender has to be ``at_least`` as many times faster. All run with that allocator.
    """
    checkout = checkout_for(kind, options)
    if checkout is None:
        return Report(skipped=SKIPPED)
    reason = hosts.missing() if rate is not None else None
    if reason is not None:
        return Report(skipped=reason)
    cut, environment = ("metis", ranks), launch_environment(allocator)
    graph = graphs.rmat(options, [cut])
    known: dict[str, Start] = {
        ORIGINAL: original(graph, cut, checkout, kind, environment),
        SOCKETS: ours(graph, cut, kind, {**environment, SWITCH: "0"}, rounds=1),
        STRICT: ours(graph, cut, kind, environment),
        ONE_SHOT: ours(graph, cut, kind, environment, rounds=1),
        NO_ZEROS: ours(graph, cut, kind, environment, zeros="skip"),
    }
    with Hosts(ranks) if rate is not None else nullcontext() as links:
        chosen = {name: partial(known[name], hosts=links) for name in (ORIGINAL, *contenders)}
        slow = partial(links.set_rate, rate) if links else lambda: None
        found = race(chosen, options.repeats, ready=slow, turn=partial(_turn, links))
    what = f"{kind}, P={ranks}, {rate or 'unthrottled'}, allocator {allocator}: medians of turns"
    report = Report(tables=[found.table(what, ["wall", "cpu", "sent"])])
    for name in contenders:
        times, share = 1 / found.ratio(name, ORIGINAL, "wall"), found.ratio(name, ORIGINAL, "sent")
        bound = at_least if name == contenders[-1] else None
        report.figures.append(Figure(f"{name}: times faster", times, at_least=bound))
        report.figures.append(Figure(f"{name}: bytes / theirs", share))
    report.figures += found.losses(ORIGINAL)
    return report


def _turn(links: Hosts | None, cluster: Cluster) -> Epoch:
    """An epoch; between hosts, with the bytes that their interfaces sent."""
    if links is None:
        return epoch(cluster)
    before = sum(links.sent_bytes())
    return {**epoch(cluster), "sent": sum(links.sent_bytes()) - before}


@benchmark("versus-sage-slow", "versus")
def sage_slow(options: Options) -> Report:
    """SAGE on 8 hosts with links of 200 Mbit/s, against IntelLabs SAR."""
    contenders = STRICT, ONE_SHOT, NO_ZEROS
    return speed("sage", 8, 2.5, options, "200mbit", contenders)


@benchmark("versus-gat-fast", "versus")
def gat_fast(options: Options) -> Report:
    """GAT on 8 hosts with links of 1 Gbit/s, against IntelLabs SAR, once with each allocator."""
    both = Report()
    for allocator in ALLOCATORS:
        contenders = ONE_SHOT, STRICT
        one = speed("gat", 8, 4.0, options, "1gbit", contenders, allocator)
        if one.skipped:
            return one
        both.tables += one.tables
        both.figures += [
            replace(figure, name=f"{allocator}: {figure.name}") for figure in one.figures
        ]
    return both


@benchmark("versus-sage-4", "versus")
def sage_4(options: Options) -> Report:
    """SAGE on 4 ranks of this machine, against IntelLabs SAR."""
    return speed("sage", 4, 1.35, options)


@benchmark("versus-sage-8", "versus")
def sage_8(options: Options) -> Report:
    """SAGE on 8 ranks of this machine, against IntelLabs SAR."""
    return speed("sage", 8, 1.6, options)


@benchmark("versus-gat-4", "versus")
def gat_4(options: Options) -> Report:
    """GAT on 4 ranks of this machine, against IntelLabs SAR."""
    return speed("gat", 4, 3.3, options)


@benchmark("versus-memory", "versus")
def memory(options: Options) -> Report:
    """Activation memory of the largest of 8 ranks, strict rounds, against IntelLabs SAR.

    Each launched as its own documents say (the allocator as it comes for theirs), and both in the
    environment that this library's launcher sets. Bounds are those of kept activations.
    """
    if options.sar_path is None:
        return Report(skipped=SKIPPED)
    table = Table("Activation MB, largest rank", ["model", "contender", "environment", "MB"])
    report, cut = Report(tables=[table]), ("metis", 8)
    graph = graphs.rmat(options, [cut])
    environments = {"own": ("as it comes", ONE_THREAD), "same": ("launcher's", LAUNCH)}
    bounds = {("sage", "own"): 3.0, ("gat", "own"): 5.0, ("sage", "same"): 1.4}
    for model in ("sage", "gat"):
        mine = {
            mode: _activation(ours(graph, cut, model, activations=mode))
            for mode in ("keep", "recompute")
        }
        for mode, size in mine.items():
            table.rows.append([model, f"{STRICT}, {mode}", "launcher's", size / MB])
        for way, (shown, environment) in environments.items():
            checkout = checkout_for(model, options)
            theirs = _activation(original(graph, cut, checkout, model, environment))
            table.rows.append([model, ORIGINAL, shown, theirs / MB])
            name, bound = f"{model}, {way} environment", bounds.get((model, way))
            times = {mode: theirs / size for mode, size in mine.items()}
            figure = Figure(f"{name}: times smaller", times["keep"], at_least=bound)
            again = Figure(f"{name}, recomputed: times smaller", times["recompute"])
            report.figures += [figure, again]
    return report


def _activation(start: Start) -> int:
    with start() as cluster:
        return max(one["activation"] for one in cluster.call("memory", epochs=3))
