"""Cuts that are ended at any moment, and go on: the same files, and nothing else."""

from __future__ import annotations

import random
import signal
import tempfile
from pathlib import Path

from benchmarks.registry import Figure, Options, Report, Table, benchmark
from benchmarks.tasks.cuts import (
    Cut,
    Ending,
    end_and_resume,
    measure,
    start,
    write_plain,
    write_typed,
)

KILLS, SIGNALS = 50, 10
NODES, EDGES, PAPERS = 100_000, 1_000_000, 4_000  # edges come in both directions then
_MOST_IN_A_ROW = 3


@benchmark("cut-faults", "faults")
def faults(options: Options) -> Report:
    """`sar partition` that is killed at any moment and goes on: byte for byte the same files."""
    draw, endings = random.Random(7), list[Ending]()
    with tempfile.TemporaryDirectory(prefix="cuts-") as name:
        folder = Path(name)
        cuts = make_cuts(folder, NODES, EDGES, PAPERS)
        for cut in cuts:
            measure(cut, folder / "whole")
        ways = [
            (signal.SIGKILL, KILLS),
            (signal.SIGTERM, SIGNALS // 2),
            (signal.SIGINT, SIGNALS // 2),
        ]
        for number, wanted in ways:
            while (done := sum(one.ends for one in endings if one.number == number)) < wanted:
                cut = cuts[len(endings) % len(cuts)]
                ends = 1 if draw.random() < 0.6 else draw.randint(2, _MOST_IN_A_ROW)
                at = folder / f"run-{len(endings)}"
                ending = end_and_resume(cut, at, min(ends, wanted - done), number, draw)
                print(len(endings), ending, flush=True)
                endings.append(ending)
    return _report(cuts, endings)


def make_cuts(folder: Path, nodes: int, edges: int, papers: int) -> list[Cut]:
    """Of a plain and a typed graph, into a new folder, over another, and over its own input."""
    plain = str(write_plain(folder / "plain", nodes, edges))
    typed = str(write_typed(folder / "typed", papers))
    made = folder / "made"
    first = [plain, "--parts", "3", "--symmetrise", "--method", "random"]
    run = start(first, made)
    if (errors := run.communicate()[1]) or run.returncode:
        raise RuntimeError(errors)
    balanced = [plain, "--parts", "4", "--symmetrise", "--balance", "edges,halo"]
    return [
        Cut("new folder", balanced),
        Cut("several types", [typed, "--parts", "4"]),
        Cut("other folder replaced", [*balanced, "--overwrite"], made),
        Cut("PyG's layout", [plain, "--parts", "4", "--symmetrise", "--format", "pyg"]),
    ]


def _report(cuts: list[Cut], endings: list[Ending]) -> Report:
    table = Table("By what is cut", ["cut", "signal", "runs", "ends", "resumed", "wrong"])
    for cut in cuts:
        for number in sorted({one.number for one in endings}):
            same = [one for one in endings if (one.name, one.number) == (cut.name, number)]
            ends, resumed = sum(one.ends for one in same), sum(one.resumed for one in same)
            wrong = sum(bool(one.wrong) for one in same)
            row = [cut.name, number.name, len(same), ends, resumed, wrong]
            table.rows.append(row)
    for one in endings:
        for words in one.wrong:
            print(f"{one.name}, {one.number.name}: {words}")
    kills = sum(one.ends for one in endings if one.number == signal.SIGKILL)
    figures = [
        Figure("kills", kills, at_least=KILLS),
        Figure("SIGTERM and SIGINT", sum(one.ends for one in endings) - kills, at_least=SIGNALS),
        Figure("runs that went on from a cut", sum(one.resumed for one in endings), at_least=5),
        Figure("runs with anything wrong", sum(bool(one.wrong) for one in endings), at_most=0),
    ]
    return Report(figures, [table])
