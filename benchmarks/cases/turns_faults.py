"""Training out of core that is killed at any moment goes on: the same bits, and nothing left."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.registry import Figure, Options, Report, Table, benchmark
from benchmarks.tasks.turns import ENDING, PHASES, Chain, differences
from sar.partition.sources.generate import community_graph
from sar.partition.write import write_partitions

KILLS, IN_A_ROW, EPOCHS = 50, 10, 25
NODES, PARTS = 24_000, 6
MEMORY = 345 << 20  # of the process: so little that it reads and writes every epoch


@benchmark("faults-out-of-core", "faults")
def kills(options: Options) -> Report:
    """`sar train --out-of-core` that is killed at any moment and goes on: bit for bit the same."""
    draw, chains = random.Random(5), list[Chain]()
    with tempfile.TemporaryDirectory(prefix="turns-", dir=".") as name:
        folder = Path(name).absolute()
        graph = community_graph(NODES, 6 * NODES, 16, classes=8, features=64)
        parts = write_partitions(graph, np.arange(NODES) % PARTS, folder / "parts", "g")
        whole = Chain(parts, folder / "whole", EPOCHS, MEMORY)
        want = whole.finish()
        if whole.wrong:
            raise RuntimeError(*whole.wrong)
        moved = whole.moved()
        while (done := sum(len(one.phases) for one in chains)) < KILLS:
            chain = Chain(parts, folder / str(len(chains)), EPOCHS, MEMORY)
            chains.append(chain)
            phases = [draw.choice(PHASES) for _ in range(min(IN_A_ROW, KILLS - done) - 1)]
            for phase in [*phases, ENDING]:
                if not chain.kill(phase, draw):
                    break
            chain.wrong += [f"other bits: {one}" for one in differences(chain.finish(), want)]
            print(len(chains), chain.phases, chain.wrong, flush=True)
    return _report(chains, moved)


def _report(chains: list[Chain], moved: int) -> Report:
    killed = [phase for one in chains for phase in one.phases]
    table = Table("By what it did", ["phase", "kills"])
    table.rows = [[phase, killed.count(phase)] for phase in dict.fromkeys([*PHASES, ENDING])]
    figures = [
        Figure("kills", len(killed), at_least=KILLS),
        Figure("read and written by a whole run", moved / 1e6, "MB", at_least=100),
        Figure("chains with anything wrong", sum(bool(one.wrong) for one in chains), at_most=0),
    ]
    return Report(figures, [table])
