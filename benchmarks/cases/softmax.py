"""Layers with a softmax that no kernel takes: what they send."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks import graphs
from benchmarks.race import MB
from benchmarks.registry import Figure, Options, Report, Table, benchmark

if TYPE_CHECKING:
    from sar.comm import Group

RANKS, TINY = 4, 12
WIDTH, HEADS = 64, 4


@benchmark("softmax-bytes", "edges")
def softmax_bytes(options: Options) -> Report:
    """Bytes of layers that no kernel takes, 4 ranks: three streams of their rows, METIS."""
    from sar.comm import ThreadGroup

    prepared = graphs.rmat(options, [("metis", RANKS)], TINY)
    table = Table("Forward and backward, all ranks", ["layer", "sent MB", "three streams", "cpu s"])
    report = Report(tables=[table])
    for kind in ("agnn", "edgegat", "hgt"):
        parts = str(prepared.parts["metis", RANKS])
        ranks = ThreadGroup.run(RANKS, partial(streamed_bytes, kind, parts))
        sent, bound, cpu = (sum(column) for column in zip(*ranks))
        table.rows.append([kind, sent / MB, bound / MB, cpu])
        report.figures.append(Figure(f"{kind}: sent / three streams", sent / bound, at_most=1.02))
    return report


def streamed_bytes(kind: str, parts: str, group: Group) -> tuple[int, int, float]:
    """(bytes sent, those of three streams of the rows that are asked for, CPU seconds)."""
    import sar

    graph = sar.construct_full_graph(sar.load_dgl_partition_data(parts, group.rank))
    torch.manual_seed(0)
    run, numbers = make(kind, graph)
    x = torch.randn(graph.num_nodes(), WIDTH, requires_grad=True)
    bound = 3 * sum(graph.scope().relation.plan.recv_counts) * numbers * x.element_size()
    before, started = 0, 0.0
    for _ in range(2):  # structure and pages are new to the first
        before, started = group.counters.sent_bytes, time.thread_time()
        run(x).square().sum().backward()
    return group.counters.sent_bytes - before, bound, time.thread_time() - started


def make(kind: str, graph: Any) -> tuple[Callable[[Tensor], Tensor], int]:
    """A layer of ``dgl.nn`` and how many numbers of a source row it reads."""
    import dgl.nn

    if kind == "agnn":
        layer = dgl.nn.AGNNConv(allow_zero_in_degree=True)
        return lambda x: layer(graph, x), 2 * WIDTH
    if kind == "edgegat":
        layer = dgl.nn.EdgeGATConv(WIDTH, 4, WIDTH // HEADS, HEADS, allow_zero_in_degree=True)
        edges = torch.ones(graph.num_edges(), 4)
        return lambda x: layer(graph, x, edges), WIDTH + HEADS
    layer = dgl.nn.HGTConv(WIDTH, WIDTH // HEADS, HEADS, 1, 1, dropout=0.0)
    ntypes = torch.zeros(graph.num_nodes(), dtype=torch.int64)
    etypes = torch.zeros(graph.num_edges(), dtype=torch.int64)
    return lambda x: layer(graph, x, ntypes, etypes), 2 * WIDTH
