"""Processor seconds of training steps, taking turns with DGL and, if asked, IntelLabs SAR."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import graphs
from benchmarks.cases.memory import SLACK
from benchmarks.cluster import LAUNCH, ONE_THREAD, Cluster, launch_environment
from benchmarks.race import MB, SAME_LOSS, Race, race
from benchmarks.registry import Figure, Options, Report, benchmark

LIMIT = 0.85  # share of DGL's processor seconds
SAGE, ATTENTION = "benchmarks.tasks.sage", "benchmarks.tasks.attention"
OURS = ONE_SHOT, STRICT, ONE_SHOT_TBB, STRICT_TBB = (
    "sar, one-shot", "sar, strict", "sar, one-shot, tbb", "sar, strict, tbb",
)  # fmt: skip
DGL, DGL_TUNED, DGL_TBB = "DGL", "DGL, ranks' environment", "DGL, tbb"
ORIGINAL = "IntelLabs SAR"
TWO_THREADS = {**LAUNCH, "OMP_NUM_THREADS": "2"}
SMALL = 15  # DGL holds 2 GB a tensor of GATv2 on the large graph
Start = Callable[[], Cluster]


@benchmark("speed", "core")
def speed_4(options: Options) -> Report:
    """Processor seconds per epoch of 4 ranks against one DGL process: R-MAT, METIS, SAGE."""
    return speed(options, 4)


@benchmark("speed-8", "limits")
def speed_8(options: Options) -> Report:
    """The same on 8 ranks."""
    return speed(options, 8)


@benchmark("gat-speed", "edges")
def gat_speed(options: Options) -> Report:
    """A training step of a 3-layer GAT on 1 rank (DGL / 3) and 4 ranks (DGL / 2.8); two threads."""
    report, found = _steps(options, "gat", {1: 3.0, 4: 2.8}, two_threads=True)
    ratio = found.ratio("1 ranks", "two threads", "wall")
    report.figures.append(Figure("gat: wall, 1 / 2 threads", ratio, at_least=1.6))
    return report


@benchmark("gatv2-speed", "edges")
def gatv2_speed(options: Options) -> Report:
    """A training step of a 3-layer GATv2 on 1 rank: at most DGL / 2.5; a quarter of the graph."""
    return _steps(options, "gatv2", {1: 2.5}, SMALL)[0]


def speed(options: Options, ranks: int) -> Report:
    """SAGE in all environments; the first epoch gives the activation memory."""
    graph = graphs.rmat(options, [("metis", ranks)])
    known = contenders(graph, ranks, options)
    found = race(known, options.repeats, memory=1, ask=dict.fromkeys(OURS, ("round_bytes",)))
    title = (
        f"One epoch, medians of {options.repeats} turns; {ranks} ranks, one thread each. "
        "cpu = user + system seconds of all ranks; x DGL = median of the turns' ratios."
    )
    keys = ["cpu", "user", "system", "faults", "wall", "sent", "activation"]
    report = Report(tables=[found.table(title, keys, DGL)])
    for name in OURS:
        ratio = found.ratio(name, DGL)
        report.figures.append(Figure(f"{name}: cpu / DGL's", ratio, at_most=LIMIT))
        tuned = found.ratio(name, DGL_TBB if "tbb" in name else DGL_TUNED)
        report.figures.append(Figure(f"{name}: cpu / DGL's in the ranks' environment", tuned))
        one_round = max(found.asked[name]["round_bytes"])
        bound = SLACK * found.middle(DGL, "activation") / ranks + 2 * one_round
        used = found.middle(name, "activation") / MB
        held = Figure(f"{name}: activations", used, "MB", at_most=bound / MB)
        report.figures.append(held)
    report.figures += losses(found, DGL)
    return report


def losses(found: Race, base: str) -> list[Figure]:
    """The distance of each contender's losses from one's."""
    return [
        Figure(f"{name}: loss / {base}'s - 1", found.loss_apart(name, base), at_most=SAME_LOSS)
        for name in found.turns
        if name != base
    ]


def contenders(graph: graphs.Prepared, size: int, options: Options) -> dict[str, Start]:
    """What starts each of them, by name; every one starts its training with the same model."""
    parts, tbb = str(graph.parts["metis", size]), launch_environment("tbb")
    ranks = partial(Cluster, f"{SAGE}:Sar", size, parts=parts)
    whole = partial(Cluster, f"{SAGE}:Dgl", file=str(graph.file))
    known: dict[str, Start] = {
        DGL: partial(whole, environment=ONE_THREAD),
        DGL_TUNED: partial(whole, environment=LAUNCH),
        DGL_TBB: partial(whole, environment=tbb),
        ONE_SHOT: partial(ranks, environment=LAUNCH, rounds=1),
        STRICT: partial(ranks, environment=LAUNCH, rounds=None),
        ONE_SHOT_TBB: partial(ranks, environment=tbb, rounds=1),
        STRICT_TBB: partial(ranks, environment=tbb, rounds=None),
    }
    if (path := options.sar_path) is not None:
        theirs = partial(Cluster, f"{SAGE}:Original", size, environment=LAUNCH, parts=parts)
        known[ORIGINAL] = partial(theirs, first=path, checkout=str(path))
    return known


def _steps(
    options: Options,
    kind: str,
    faster: dict[int, float],
    scale: int = 17,
    two_threads: bool = False,
) -> tuple[Report, Race]:
    """A stack of layers on DGL and here; ``faster``: least times DGL's speed, by ranks."""
    cuts = {ranks: ("random", 1) if ranks == 1 else ("metis", ranks) for ranks in faster}
    graph = graphs.rmat(options, cuts.values(), scale)

    def ours(ranks: int, environment: dict[str, str] = LAUNCH) -> Start:
        given: dict[str, Any] = {"kind": kind, "parts": str(graph.parts[cuts[ranks]])}
        return partial(
            Cluster, f"{ATTENTION}:Sar", ranks, environment=environment, rounds=None, **given
        )

    whole = partial(Cluster, f"{ATTENTION}:Dgl", kind=kind, file=str(graph.file))
    known: dict[str, Start] = {DGL: partial(whole, environment=ONE_THREAD)}
    for ranks in faster:
        known[f"{ranks} ranks"] = ours(ranks)
        if two_threads and ranks == 1:  # right after it: the machine's speed changes
            known["two threads"] = ours(1, TWO_THREADS)
    found = race(known, options.repeats)
    title = f"{kind}: one step, medians of {options.repeats} turns"
    report = Report(losses(found, DGL), [found.table(title, ["cpu", "wall", "sent"], DGL)])
    for ranks, least in faster.items():
        times = 1 / found.ratio(f"{ranks} ranks", DGL)
        report.figures.append(
            Figure(f"{kind}, {ranks} ranks: DGL's cpu / cpu", times, at_least=least)
        )
    return report, found
