"""Ranks of true links among all nodes or given negatives, and MRR and Hits@k of all processes.

The rank of a true link is 1 + (candidates with a higher score) + (others with the same score) / 2:
the mean of what an optimist and a pessimist would say, so that a model that scores all alike gains
nothing. Scores that are not numbers count as higher.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sar import expect
from sar.comm import Group, current_group
from sar.comm.collectives import ask_rows, send_rows
from sar.graph import GraphView, graph_of
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
        :mod:`sar.nn.ranking` counts them.
    """
    graph = graph_of(graph)
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
    return expect.indices(queries, "queries", "edges", num_edges).cpu()


class _Ranker:
    """One evaluation: this rank's share of the candidates and of the known edges. A query is a row
    (source nid, destination nid, type). Side 0 ranks sources, side 1 destinations."""

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
        """Known edges with this side's end owned here: sorted keys of the rest, rows of the end."""
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
        """Batches of all ranks' queries, equal everywhere, and which of them are this rank's."""
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
        """(query, row of this rank) of the candidates that are no competitors."""
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
    """int64 [b, 2] candidates above and level with the truth; (query, column) do not count."""
    above, level = _rivals(scores, truth.unsqueeze(1))
    level[query, column] = False
    above[query, column] = False
    return torch.stack([above.sum(1), level.sum(1)], 1)


def _rivals(scores: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Masks of scores above the truth (NaN among them) and level with it."""
    return (scores <= truth).logical_not_(), scores == truth


def negative_ranks(
    positive: Tensor,
    negative: Tensor,
    positive_ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    *,
    group: Group | None = None,
) -> Tensor:
    """Ranks of true links among given negative ones, as OGB's MRR takes them.

    Args:
        positive: float [n] scores of this rank's true links.
        negative: float [n, k] scores of each one's negatives; or float [m], in any order and on
            any rank, with ids. Then the call is collective.
        positive_ids: int64 [n], 0 or more, each once on all ranks.
        negative_ids: int64 [m] the true link that each negative belongs to.

    Returns:
        float64 [n] ranks.

    Raises:
        ValueError: shapes or dtypes that do not fit, a positive id that repeats, or a negative id
            that is none of them; on every rank where the call is collective.
    """
    if negative_ids is None and positive_ids is None:
        if negative.dim() != 2 or positive.shape != negative.shape[:1]:
            raise ValueError(
                f"negative: got shape {tuple(negative.shape)}, expected [{len(positive)}, k] "
                "or ids of both"
            )
        above, level = _rivals(negative, positive.unsqueeze(1))
        return 1 + above.sum(1).double() + level.sum(1).double() / 2
    group = group or current_group()
    error = _ids_error("positive", positive, positive_ids)
    error = error or _ids_error("negative", negative, negative_ids)
    group.agree(error, "negative_ranks")
    return _ranks_by_id((positive_ids, positive), (negative_ids, negative), group)


def _ids_error(name: str, scores: Tensor, ids: Tensor | None) -> Exception | None:
    if scores.dim() != 1:
        return ValueError(f"{name}: got shape {tuple(scores.shape)}, expected [n] with ids")
    if isinstance(ids, Tensor) and ids.dtype == torch.int64 and ids.shape == scores.shape:
        return None
    got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
    return ValueError(f"{name}_ids: got {got}, expected int64 [{len(scores)}], one for each score")


def _ranks_by_id(positive: tuple, negative: tuple, group: Group) -> Tensor:
    """The rank that an id names collects its negatives and answers its true link."""
    owners = [pair[0].cpu() % group.size for pair in (positive, negative)]
    # int64 rows with the bits of the scores: float64 does not tell ids above 2^53 apart
    asked, given = (
        torch.stack([ids.cpu(), scores.detach().double().cpu().view(torch.int64)], 1)
        for ids, scores in (positive, negative)
    )
    ids, scores = _columns(send_rows(group, owners[1], given))

    def ranks(rows: Tensor) -> Tensor:
        asked_ids, truths = _columns(rows)
        known, order = asked_ids.sort()
        group.agree(_known_error(known, ids), "negative_ranks")  # on all: each answers once
        query = order[torch.searchsorted(known, ids)]
        above, level = _rivals(scores, truths[query])
        result = torch.ones(len(rows), dtype=torch.float64)
        return result.index_add_(0, query, above.double() + level.double() / 2)

    return ask_rows(group, owners[0], asked, ranks).to(positive[1].device)


def _columns(rows: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [m] ids and float64 [m] scores of int64 [m, 2] rows."""
    ids, bits = rows.T.contiguous()
    return ids, bits.view(torch.float64)


def _known_error(known: Tensor, ids: Tensor) -> Exception | None:
    """The fault of ``known`` ids of true links, ascending, or of their negatives' ``ids``."""
    repeated = known[1:][known[1:] == known[:-1]]
    if len(repeated):
        return ValueError(
            f"positive_ids: got {int(repeated[0])} more than once, expected each once on all ranks"
        )
    unknown = ids[~torch.isin(ids, known)]
    if len(unknown):
        return ValueError(f"negative_ids: got {int(unknown[0])}, expected one of positive_ids")
    return None


def ranking_metrics(
    ranks: Tensor, hits: Sequence[int] = (1, 3, 10), *, group: Group | None = None
) -> dict[str, float]:
    """Mean reciprocal rank and Hits@k over the ranks that all processes hold; collective.

    Args:
        ranks: float of any shape, at least 1.
        hits: the k's.

    Returns:
        ``{"mrr": .., "hits@1": .., ..}``, equal everywhere; NaN where nobody has a rank.

    Raises ``ValueError`` on every rank when ``hits`` differ.
    """
    group = group or current_group()
    group.agree(None, "ranking_metrics", {"hits": list(hits)})
    ranks = ranks.detach().double().reshape(-1)
    sums = [torch.tensor(len(ranks)), (1 / ranks).sum(), *((ranks <= k).sum() for k in hits)]
    count, *totals = group.all_reduce(torch.stack([s.double().cpu() for s in sums])).tolist()
    names = ["mrr", *(f"hits@{k}" for k in hits)]
    return {name: total / count if count else math.nan for name, total in zip(names, totals)}


def hits_at(positive: Tensor, negative: Tensor, k: int, *, group: Group | None = None) -> float:
    """Share of true links above the k-th best of negatives that all share; collective.

    OGB's Hits@K (Hu et al., arXiv 2005.00687): with fewer than k negatives all are above.

    Args:
        positive, negative: float [n] and [m] scores of this rank, of one dtype on all.

    Raises ``ValueError`` on every rank when k is less than 1; NaN without true links.
    """
    group = group or current_group()
    with group.agreed("hits_at", {"k": k}):
        expect.integer(k, "k", at_least=1)
    padded = F.pad(negative.detach().double().cpu().view(-1), (0, k), value=-math.inf)
    padded = padded.topk(k).values
    count = int(group.all_reduce(torch.tensor(len(positive))))
    bound = torch.cat(group.all_gather(padded)).topk(k).values[-1]
    above = positive.detach().double().cpu() > bound
    right = int(group.all_reduce(above.sum()))
    return right / count if count else math.nan
