"""Bytes of layers over several relations, one after the other and together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks import graphs
from benchmarks.registry import Figure, Options, Report, Table, benchmark

if TYPE_CHECKING:
    from sar.comm import Group

RANKS, PAPERS, WIDTH = 4, 20_000, 64


@benchmark("relations", "edges")
def relations(options: Options) -> Report:
    """Bytes of a mean over five relations: one after the other, together, in a HeteroGraphConv.

    A bibliography of 3 types, 4 ranks, width 64, forward and backward pass; rows as they are (pull)
    and the fewest rows (auto).
    """
    from sar.comm import ThreadGroup
    from sar.partition.sources.generate import bibliography_graph

    make = partial(bibliography_graph, papers=PAPERS)
    cuts = [(method, RANKS) for method in ("metis", "random")]
    parts = graphs.partitions(options, f"bibliography-{PAPERS}", make, cuts)
    table = Table(f"{PAPERS} papers, MB sent", ["cut", "exchange", *PASSES, "share"])
    report = Report(tables=[table])
    for (cut, path), exchange in itertools.product(parts.items(), ("pull", "auto")):
        sent = [
            sum(ThreadGroup.run(RANKS, partial(_sent, path, run, exchange))) / 1e6
            for run in PASSES.values()
        ]
        table.rows.append([cut[0], exchange, *sent, sent[-1] / sent[0]])
        for name, together in zip(list(PASSES)[1:], sent[1:]):
            words = f"{cut[0]}, {exchange}: {name} / apart"
            report.figures.append(Figure(words, together / sent[0], at_most=1.0))
    return report


def _apart(graph: Any) -> Callable[[dict[str, Tensor]], list[Tensor]]:
    return lambda x: [
        out for e in graph.canonical_etypes for out in _multi_update_all(graph, [e])(x)
    ]


def _multi_update_all(graph: Any, etypes: list | None = None) -> Callable:
    import dgl.function as fn

    copy = fn.copy_u("h", "m"), fn.mean("m", "out")

    def run(x: dict[str, Tensor]) -> list[Tensor]:
        with graph.local_scope():
            graph.ndata["h"] = x
            graph.multi_update_all(dict.fromkeys(etypes or graph.canonical_etypes, copy), "sum")
            return list(graph.ndata["out"].values())

    return run


def _hetero_graph_conv(graph: Any) -> Callable[[dict[str, Tensor]], list[Tensor]]:
    import dgl.nn

    convs = {etype: dgl.nn.SAGEConv(WIDTH, WIDTH, "mean") for etype in graph.etypes}
    layer = dgl.nn.HeteroGraphConv(convs, "sum")
    return lambda x: list(layer(graph, x).values())


PASSES = {
    "apart": _apart,
    "multi_update_all": _multi_update_all,
    "HeteroGraphConv": _hetero_graph_conv,
}


def _sent(path: Path, make: Callable, exchange: str, group: Group) -> int:
    """Bytes that a rank sends in one pass forward and backward, set-up not counted."""
    import sar

    data = sar.load_dgl_partition_data(path, group.rank)
    graph = sar.construct_full_graph(data, sar.Policy(exchange=exchange))
    x = {t: torch.ones(graph.num_nodes(t), WIDTH, requires_grad=True) for t in graph.ntypes}
    run, before = make(graph), 0
    for _ in range(3):  # a layer shares rows from its second call on
        before = group.counters.sent_bytes
        torch.stack([rows.sum() for rows in run(x)]).sum().backward()
    return group.counters.sent_bytes - before
