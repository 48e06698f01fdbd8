"""PyG's layers beside PyG in one process: processor seconds, memory and bytes of a step."""

from __future__ import annotations

from benchmarks import graphs
from benchmarks.contenders import PYG_TASKS, ours, pyg
from benchmarks.race import MB, Race, race
from benchmarks.registry import Figure, Options, Report, benchmark

EDGES = {"sage": ("edge_index", "csr"), "gcn": ("edge_index",), "gat": ("edge_index",)}
SHARE = {"sage": 1.0, "gat": 1 / 3}  # of the faster one's processor seconds, at most
FEWER, MORE = 4, 8  # ranks: of the seconds, and of the memory
SMALL = 15  # PyG holds 4 GB a tensor on the large graph
DGL = "sar, DGL's layers"


@benchmark("pyg-sage", "pyg")
def pyg_sage(options: Options) -> Report:
    """PyG's SAGEConv on 4 and 8 ranks against PyG in one process: R-MAT, METIS."""
    return _steps(options, "sage")


@benchmark("pyg-gcn", "pyg")
def pyg_gcn(options: Options) -> Report:
    """The same of its GCNConv, beside DGL's GraphConv."""
    return _steps(options, "gcn", SMALL)


@benchmark("pyg-gat", "pyg")
def pyg_gat(options: Options) -> Report:
    """The same of its GATConv, 4 heads of 64; a quarter of the graph."""
    return _steps(options, "gat", SMALL)


def _steps(options: Options, kind: str, scale: int = 17) -> Report:
    cuts = {ranks: ("metis", ranks) for ranks in (FEWER, MORE)}
    graph = graphs.rmat(options, cuts.values(), scale)
    alone = {f"PyG, {edges}": pyg(graph, kind, edges) for edges in EDGES[kind]}
    found: Race | None = None
    report = Report()
    for ranks, cut in cuts.items():  # one after the other, as each rank holds half a gigabyte
        mine = ours(graph, cut, kind, task=f"{PYG_TASKS}:SarPyg")
        known = {"sar": mine, DGL: ours(graph, cut, kind)} | (alone if found is None else {})
        raced = race(known, options.repeats, memory=1, ask={"sar": "round_bytes"})
        found = found or raced
        title = f"{kind}, {ranks} ranks: one step, medians of {options.repeats} turns; strict"
        report.tables.append(raced.table(title, ["cpu", "wall", "sent", "activation"], "sar"))
        least = min(found.middle(name, "activation") for name in alone)
        bound = least / ranks + 2 * max(raced.asked["sar"])
        held, sent = (raced.middle("sar", key) for key in ("activation", "sent"))
        report.figures += [
            Figure(f"{ranks} ranks: activations", held / MB, "MB", at_most=bound / MB),
            Figure(f"{ranks} ranks: bytes / {DGL}", sent / raced.middle(DGL, "sent"), at_most=1.0),
        ]
        if ranks == FEWER:
            fastest = min(alone, key=lambda name: raced.middle(name, "cpu"))
            share = raced.ratio("sar", fastest)
            report.figures.append(Figure(f"cpu / {fastest}", share, at_most=SHARE.get(kind)))
            report.figures += [one for one in raced.losses("sar") if DGL not in one.name]
    return report
