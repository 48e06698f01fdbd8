"""Ranks of true links among all nodes, each process scoring its own nodes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from sar import expect
from sar.comm.collectives import send_rows
from sar.graph import GraphView
from sar.graph.edge_graph import global_ends, locate
from sar.nn.link import Ends, link_inputs
from sar.nn.scorers import LinkScorer
from sar.tracing.lazy import eager

_BATCH = 1024  # queries scored together on all ranks
_SCORES = 1 << 20  # scores computed at once


@torch.no_grad()
def rank_links(
    graph: GraphView,
    scorer: LinkScorer,
    h: Ends,
    queries: Tensor,
    *,
    edge_type: str | None = None,
    filtered: bool = True,
) -> Tensor:
    """Ranks of true edges among all edges with one end replaced by any node; collective.

    The protocol of knowledge graphs (Bordes et al., NIPS 2013): for (head, relation, tail) rank the
    head among all heads and the tail among all tails. Each rank scores its own nodes; rows of
    a batch of queries and two counts a query travel. Scores are computed in float64 and compared in
    float32, so that ties do not depend on the order in which a product adds.

    Args:
        graph: all edges known to be true, of training, validation and test.
        scorer, h, edge_type: as in :func:`sar.nn.score_edges`.
        queries: bool [E] or int64 [q]: local edges to rank.
        filtered: leave out candidates that make another known edge.

    Returns:
        float64 [q, 2] in the order of the queries: ranks of the source and of the destination, as
        :mod:`sar.nn.link_metrics` counts them.
    """
    inputs = link_inputs(graph, scorer, h, edge_type)
    with graph.group.agreed("rank_links", {"filtered": filtered}):
        positions = _positions(eager(queries), graph.num_edges())
    ranker = _Ranker(graph, scorer, (inputs.src[0], inputs.dst[0]), inputs.edge, filtered)
    return ranker.run(positions)


def _positions(queries: Tensor, num_edges: int) -> Tensor:
    expect.tensor(queries, "queries", dtypes=(torch.bool, torch.int64), shape=("q",))
    if queries.dtype == torch.bool:
        expect.tensor(queries, "queries", shape=(num_edges,))
        return queries.cpu().nonzero().view(-1)
    if len(queries) and not 0 <= int(queries.min()) <= int(queries.max()) < num_edges:
        raise ValueError(
            f"queries: got edges from {int(queries.min())} to {int(queries.max())}, "
            f"expected 0 to {num_edges - 1}"
        )
    return queries.cpu()


class _Ranker:
    """One evaluation: this rank's share of the candidates and of the known edges.

    A query is a row (source nid, destination nid, type). Side 0 ranks sources, side 1 destinations.
    """

    def __init__(
        self,
        graph: GraphView,
        scorer: LinkScorer,
        rows: tuple[Tensor, Tensor],
        types: list[Tensor],
        filtered: bool,
    ) -> None:
        self.graph, self.group, self.rows, self.typed = graph, graph.group, rows, bool(types)
        self.scorer = copy.deepcopy(scorer).double().eval()
        self.against = getattr(self.scorer, "against", partial(LinkScorer.against, self.scorer))
        src, dst = global_ends(graph)
        kinds = types[0].cpu() if types else torch.zeros_like(dst)
        self.edges = torch.stack([src, dst, kinds], 1)
        largest = kinds.max() if len(kinds) else torch.tensor(0)
        self.num_types = int(self.group.all_reduce(largest, "max")) + 1
        self.known = (self._index(0), self._index(1)) if filtered else None

    def _index(self, side: int) -> tuple[Tensor, Tensor]:
        """Known edges whose end on this side is owned here: sorted keys of the rest, and rows."""
        edges = self.edges
        if side == 0:  # every edge is with the owner of its destination
            edges = send_rows(self.group, locate(self.graph, edges[:, 0])[0], edges)
        keys, order = self._keys(edges, side).sort()
        return keys, locate(self.graph, edges[:, side])[1][order]

    def _keys(self, edges: Tensor, side: int) -> Tensor:
        return edges[:, 1 - side] * self.num_types + edges[:, 2]

    def run(self, positions: Tensor) -> Tensor:
        """float64 [q, 2] ranks of this rank's queries."""
        found = [torch.empty((0, 2), dtype=torch.float64)]
        for batch, mine in self._batches(self.edges[positions]):
            found.append(self._ranks(batch)[mine])
        return torch.cat(found)

    def _batches(self, queries: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Queries of all ranks, equal everywhere, and which of them are this rank's."""
        size = self.group.size
        share = max(1, _BATCH // size)
        steps = self.group.all_reduce(torch.tensor(-(-len(queries) // share)), "max")
        for step in range(int(steps)):
            mine = queries[step * share : (step + 1) * share]
            padded = mine.new_full((share, 3), -1)
            padded[: len(mine)] = mine
            parts = [part[part[:, 0] >= 0] for part in self.group.all_gather(padded)]
            before = sum(len(part) for part in parts[: self.group.rank])
            yield torch.cat(parts), slice(before, before + len(mine))

    def _ranks(self, queries: Tensor) -> Tensor:
        """float64 [b, 2] of a batch, on every rank."""
        device = self.rows[0].device
        ends = [self._shared_rows(queries[:, side], self.rows[side]) for side in (0, 1)]
        types = queries[:, 2].to(device) if self.typed else None
        truth = self.scorer(ends[0], ends[1], types).float()
        ranks = []
        for side in (0, 1):
            counts = torch.zeros((len(queries), 2), dtype=torch.int64, device=device)
            query, row = (part.to(device) for part in self._left_out(queries, side))
            for low, block in _row_blocks(self.rows[side], len(queries)):
                scores = self.against(
                    ends[1 - side], types, block.double(), to_src=side == 0
                ).float()
                here = (row >= low) & (row < low + len(block))
                counts += _beaten(scores, truth, query[here], row[here] - low)
            better, tied = self.group.all_reduce(counts).cpu().double().unbind(1)
            ranks.append(1 + better + tied / 2)
        return torch.stack(ranks, 1)

    def _shared_rows(self, nids: Tensor, rows: Tensor) -> Tensor:
        """float64 [b, D] rows of any nodes, on every rank: the owners fill them in."""
        owner, row = locate(self.graph, nids)
        own = (owner == self.group.rank).to(rows.device)
        shared = rows.new_zeros((len(nids), rows.shape[1]), dtype=torch.float64)
        shared[own] = rows.index_select(0, row.to(rows.device)[own]).double()
        return self.group.all_reduce(shared)

    def _left_out(self, queries: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """(query, row of this rank): the candidates that are no competitors."""
        if self.known is None:  # only the answer itself
            owner, row = locate(self.graph, queries[:, side])
            query = (owner == self.group.rank).nonzero().view(-1)
            return query, row[query]
        keys, rows = self.known[side]
        wanted = self._keys(queries, side)
        first, last = torch.searchsorted(keys, wanted), torch.searchsorted(keys, wanted, right=True)
        query = torch.arange(len(queries)).repeat_interleave(last - first)
        inside = torch.arange(len(query)) - (torch.cumsum(last - first, 0) - last)[query]
        return query, rows[inside]


def _row_blocks(rows: Tensor, num_queries: int) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of blocks whose scores with all queries take some megabytes."""
    size = max(1, _SCORES // max(1, num_queries))
    for low in range(0, len(rows), size):
        yield low, rows[low : low + size]


def _beaten(scores: Tensor, truth: Tensor, query: Tensor, column: Tensor) -> Tensor:
    """int64 [b, 2]: candidates of [b, n] above and level with the truth, but for those named."""
    level = scores == truth.unsqueeze(1)
    above = (scores <= truth.unsqueeze(1)).logical_not_()  # NaN is neither below nor level
    level[query, column] = False
    above[query, column] = False
    return torch.stack([above.sum(1), level.sum(1)], 1)
