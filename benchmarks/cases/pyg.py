"""PyG's layers beside PyG in one process: processor seconds, memory and bytes of a step."""

from __future__ import annotations

from benchmarks import graphs
from benchmarks.contenders import PYG_TASKS, ours, pyg
from benchmarks.race import MB, race
from benchmarks.registry import Figure, Options, Report, benchmark

EDGES = {
    "sage": ("edge_index", "sorted", "csr"),
    "gcn": ("edge_index", "csr"),
    "gat": ("edge_index",),
}
SHARE = {"sage": 1.0, "gat": 1 / 3}  # of the faster one's processor seconds, at most
FEWER, MORE = 4, 8  # ranks: of the seconds, and of the memory
SMALL = 15  # PyG holds 4 GB a tensor of GAT on the large graph
DGL = "DGL's layers"


@benchmark("pyg-sage", "pyg")
def pyg_sage(options: Options) -> Report:
    """PyG's SAGEConv on 4 and 8 ranks against PyG in one process: R-MAT, METIS."""
    return _steps(options, "sage")


@benchmark("pyg-gcn", "pyg")
def pyg_gcn(options: Options) -> Report:
    """The same of its GCNConv."""
    return _steps(options, "gcn")


@benchmark("pyg-gat", "pyg")
def pyg_gat(options: Options) -> Report:
    """The same of its GATConv, 4 heads of 64; a quarter of the graph."""
    return _steps(options, "gat", SMALL)


def _steps(options: Options, kind: str, scale: int = 17) -> Report:
    cuts = {ranks: ("metis", ranks) for ranks in (FEWER, MORE)}
    graph = graphs.rmat(options, cuts.values(), scale)
    alone = {f"PyG, {edges}": pyg(graph, kind, edges) for edges in EDGES[kind]}
    known = dict(alone)
    for ranks, cut in cuts.items():
        known[f"sar, {ranks}"] = ours(graph, cut, kind, task=f"{PYG_TASKS}:SarPyg")
        known[f"sar, {ranks}, {DGL}"] = ours(graph, cut, kind)
    asked = {f"sar, {ranks}": "round_bytes" for ranks in cuts}
    found = race(known, options.repeats, memory=1, ask=asked)
    base, title = next(iter(alone)), f"{kind}: one step, medians of {options.repeats} turns; strict"
    report = Report(tables=[found.table(title, ["cpu", "wall", "sent", "activation"], base)])
    report.figures += [one for one in found.losses(base) if DGL not in one.name]
    fastest = min(alone, key=lambda name: found.middle(name, "cpu"))
    share = found.ratio(f"sar, {FEWER}", fastest)
    report.figures.append(Figure(f"cpu / that of {fastest}", share, at_most=SHARE.get(kind)))
    least = min(found.middle(name, "activation") for name in alone)
    for ranks in cuts:
        bound = least / ranks + 2 * max(found.asked[f"sar, {ranks}"])
        held = found.middle(f"sar, {ranks}", "activation") / MB
        report.figures.append(Figure(f"{ranks} ranks: activations", held, "MB", at_most=bound / MB))
        sent, other = (found.middle(f"sar, {ranks}{x}", "sent") for x in ("", f", {DGL}"))
        report.figures.append(Figure(f"{ranks} ranks: bytes / {DGL}", sent / other, at_most=1.0))
    return report
