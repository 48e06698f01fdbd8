"""Traffic avoided without changing a number: a kept input layer, and only the rows of the loss."""

from __future__ import annotations

from typing import Any

from benchmarks import graphs
from benchmarks.contenders import ours
from benchmarks.race import race
from benchmarks.registry import Figure, Options, Report, benchmark
from sar.config import CONSTANT_INPUTS

CUT = ("metis", 4)
FEW = 60  # one training node in so many: 1 % of all nodes
SAME_LOSS = 1e-5
BLOCKS = "1 % labels, blocks"
GROUPS: list[dict[str, dict[str, Any]]] = [
    {f"{kind}, {m}": {"kind": kind, "constant_inputs": m} for m in CONSTANT_INPUTS[::-1]}
    for kind in ("sage", "gcn", "gat")
] + [{"1 % labels, whole graph": {"every": FEW}, BLOCKS: {"every": FEW, "blocks": True}}]


@benchmark("inputs", "limits")
def inputs(options: Options) -> Report:
    """Bytes and processor seconds with and without a kept input layer and blocks: R-MAT, METIS.

    SAGE, GCN and GAT; SAGE on blocks. The first epochs fill what is kept; the contenders then train
    in turns.
    """
    graph, report = graphs.rmat(options, [CUT]), Report()
    for group in GROUPS:
        ask = {BLOCKS: "saved_work"} if BLOCKS in group else {}
        known = {name: ours(graph, CUT, rounds=1, **given) for name, given in group.items()}
        found = race(known, options.repeats, memory=2, ask=ask)
        title = f"One epoch, medians of {options.repeats} turns; {CUT[1]} ranks, one-shot."
        report.tables.append(found.table(title, ["sent", "cpu", "activation"]))
        base, *others = group
        for name in others:
            for key in ("sent", "cpu"):
                ratio = found.ratio(name, base, key)
                report.figures.append(Figure(f"{name}: {key} / {base}", ratio))
            apart = found.loss_apart(name, base)
            words = f"{name}: loss / {base} - 1"
            report.figures.append(Figure(words, apart, at_most=SAME_LOSS))
        if ask:
            saved = found.asked[BLOCKS][0]
            report.figures.append(Figure("blocks: saved of rows, edges and traffic", saved))
    return report
