"""Processor seconds of training steps, taking turns with DGL and, if asked, IntelLabs SAR."""

from __future__ import annotations

from functools import partial

from benchmarks import graphs
from benchmarks.cases.memory import SLACK
from benchmarks.cluster import LAUNCH, launch_environment
from benchmarks.contenders import DGL, ONE_SHOT, ORIGINAL, STRICT, Start, dgl, original, ours
from benchmarks.race import MB, Race, race
from benchmarks.registry import Figure, Options, Report, benchmark

LIMIT = 0.85  # share of DGL's processor seconds
ONE_SHOT_TBB, STRICT_TBB = f"{ONE_SHOT}, tbb", f"{STRICT}, tbb"
OURS = (ONE_SHOT, STRICT, ONE_SHOT_TBB, STRICT_TBB)
DGL_TUNED, DGL_TBB = "DGL, ranks' environment", "DGL, tbb"
TWO_THREADS = {**LAUNCH, "OMP_NUM_THREADS": "2"}
SMALL = 15  # DGL holds 2 GB a tensor of GATv2 on the large graph


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
    cut = ("metis", ranks)
    graph, tbb = graphs.rmat(options, [cut]), launch_environment("tbb")
    known: dict[str, Start] = {
        DGL: dgl(graph),
        DGL_TUNED: dgl(graph, environment=LAUNCH),
        DGL_TBB: dgl(graph, environment=tbb),
        ONE_SHOT: ours(graph, cut, rounds=1),
        STRICT: ours(graph, cut),
        ONE_SHOT_TBB: ours(graph, cut, environment=tbb, rounds=1),
        STRICT_TBB: ours(graph, cut, environment=tbb),
    }
    if options.sar_path is not None:
        known[ORIGINAL] = original(graph, cut, options.sar_path)
    found = race(known, options.repeats, memory=1, ask=dict.fromkeys(OURS, "round_bytes"))
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
        bound = SLACK * found.middle(DGL, "activation") / ranks + 2 * max(found.asked[name])
        used = found.middle(name, "activation") / MB
        held = Figure(f"{name}: activations", used, "MB", at_most=bound / MB)
        report.figures.append(held)
    report.figures += found.losses(DGL)
    return report


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
    step = partial(ours, graph, kind=kind)
    known: dict[str, Start] = {DGL: dgl(graph, kind)}
    for ranks, cut in cuts.items():
        known[f"{ranks} ranks"] = step(cut=cut)
        if two_threads and ranks == 1:  # right after it: the machine's speed changes
            known["two threads"] = step(cut=cut, environment=TWO_THREADS)
    found = race(known, options.repeats)
    title = f"{kind}: one step, medians of {options.repeats} turns"
    report = Report(found.losses(DGL), [found.table(title, ["cpu", "wall", "sent"], DGL)])
    for ranks, least in faster.items():
        times = 1 / found.ratio(f"{ranks} ranks", DGL)
        report.figures.append(
            Figure(f"{kind}, {ranks} ranks: DGL's cpu / cpu", times, at_least=least)
        )
    return report, found
