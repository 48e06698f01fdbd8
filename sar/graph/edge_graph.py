"""Graphs over the same nodes with other edges, given by the ids of their end points."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sar.comm.collectives import send_rows
from sar.edges import as_stored
from sar.edges.build import EdgeEnds, edge_ends, relation_of_edges
from sar.graph.view import G, GraphView


def locate(graph: GraphView, nids: Tensor) -> tuple[Tensor, Tensor]:
    """(rank, row) of global node ids, int64 [n] each, inside the rank's rows of their type."""
    _, owner, row = graph._store.book.locate(nids)
    return owner, row


def global_ends(graph: GraphView) -> tuple[Tensor, Tensor]:
    """int64 [E] global ids of both ends of the local edges, on the CPU, by position; collective."""
    ends, store = edge_ends(as_stored(graph.scope().relation, "edges")), graph._store
    starts = torch.as_tensor(store.book.node_ranges[graph.srctypes[0]][:, 0])
    return starts[ends.owner] + ends.src, ends.dst + store.first_nid(graph.dsttypes[0])


def edge_graph(
    graph: G,
    src: Tensor,
    dst: Tensor,
    eids: Tensor,
    columns: Mapping[str, Tensor] | None = None,
) -> G:
    """A graph of the same nodes with edges that any rank may give; collective.

    Every edge goes to the rank that owns its destination. What that costs depends on the edges, not
    on the graph, which is of one relation and gives node types, columns of nodes and policy.

    Args:
        src, dst: int64 [e] global ids of the end points of edges that this rank gives.
        eids: int64 [e], the edges' ids in the result, in the order of the ranks that gave them.
        columns: int64 [e] each, columns of the edges.
    """
    columns = columns or {}
    names = list(columns)
    table = torch.stack([src, dst, eids, *(columns[name] for name in names)], 1)
    table = send_rows(graph.group, locate(graph, dst)[0], table)
    src, dst, eids, *values = (column.clone() for column in table.unbind(1))
    relation = relation_of_edges(
        graph.group,
        EdgeEnds(*locate(graph, src), locate(graph, dst)[1]),
        (graph.num_src_nodes(), graph.num_dst_nodes()),
        lambda: eids,
    )
    device, etype = graph.device, graph.canonical_etypes[0]
    found = {name: value.to(device) for name, value in zip(names, values, strict=True)}
    return graph.with_edges(etype, relation.to(device), lambda: eids, found)
