"""Where the processor seconds of the `speed` benchmark go."""

from __future__ import annotations

from benchmarks import graphs
from benchmarks.cases.speed import DGL, DGL_TUNED, ONE_SHOT, ORIGINAL, STRICT, contenders
from benchmarks.registry import Options, Report, Table, benchmark

EPOCHS, RANKS = 3, 4
COLUMNS = DGL, DGL_TUNED, ONE_SHOT, STRICT, ORIGINAL


@benchmark("breakdown", "analysis")
def breakdown(options: Options) -> Report:
    """Processor seconds per epoch by operator, for the contenders of `speed`; no bound.

    Columns of several ranks are sums. "op:" rows are single operators, part of the groups above.
    """
    graph = graphs.rmat(options, [("metis", RANKS)])
    spent: dict[str, dict[str, float]] = {}
    for name, start in contenders(graph, RANKS, options).items():
        if name not in COLUMNS:
            continue
        with start() as cluster:
            cluster.call("epoch")
            ranks = cluster.call("profile", epochs=EPOCHS)
        keys = dict.fromkeys(key for rank in ranks for key in rank)
        spent[name] = {key: sum(rank.get(key, 0.0) for rank in ranks) for key in keys}
    names = [name for name in COLUMNS if name in spent]
    keys = dict.fromkeys(key for name in names for key in spent[name])
    table = Table("Seconds per epoch", ["spent on", *names])
    for key in keys:
        table.rows.append([key, *(spent[name].get(key) for name in names)])
    return Report(tables=[table])
