"""What is made of scores of links: ranks, MRR and Hits@k, over the links of all processes.

The rank of a true link is 1 + (candidates with a higher score) + (others with the same score) / 2:
the mean of what an optimist and a pessimist would say, so that a model that scores all alike gains
nothing. Scores that are not numbers count as higher.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sar.comm import Group, current_group
from sar.comm.routing import ask_rows, send_rows


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
        ValueError, TypeError: shapes that do not fit; on every rank where the call is collective.
    """
    if negative_ids is None and positive_ids is None:
        if negative.dim() != 2 or positive.shape != negative.shape[:1]:
            raise ValueError(
                f"negative: got shape {tuple(negative.shape)}, expected [{len(positive)}, k] "
                "or ids of both"
            )
        truth = positive.unsqueeze(1)
        above, level = ~(negative <= truth), negative == truth
        return 1 + above.sum(1).double() + level.sum(1).double() / 2
    group = group or current_group()
    error = _ids_error("positive", positive, positive_ids)
    error = error or _ids_error("negative", negative, negative_ids)
    group.agree(error, "negative_ranks")
    return _ranks_by_id((positive_ids, positive), (negative_ids, negative), group)


def _ids_error(name: str, scores: Tensor, ids: Tensor | None) -> Exception | None:
    if ids is not None and ids.dtype == torch.int64 and ids.shape == scores.shape:
        return None
    return ValueError(f"{name}_ids: expected int64 {list(scores.shape)}, one for each score")


def _ranks_by_id(positive: tuple, negative: tuple, group: Group) -> Tensor:
    """The rank that an id names collects its negatives and answers its true link."""
    owners = [pair[0].cpu() % group.size for pair in (positive, negative)]
    asked, given = (
        torch.stack([ids.double(), scores.detach().double()], 1).cpu()
        for ids, scores in (positive, negative)
    )
    ids, scores = send_rows(group, owners[1], given).T.contiguous()

    def ranks(rows: Tensor) -> Tensor:
        result = torch.ones(len(rows), dtype=torch.float64)
        if not len(rows):
            return result
        known, order = rows[:, 0].contiguous().sort()
        slot = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
        fits = known[slot] == ids
        query, truth = order[slot[fits]], rows[order[slot[fits]], 1]
        above, level = ~(scores[fits] <= truth), scores[fits] == truth
        return result.index_add_(0, query, above.double() + level.double() / 2)

    return ask_rows(group, owners[0], asked, ranks).to(positive[1].device)


def ranking_metrics(
    ranks: Tensor, hits: Sequence[int] = (1, 3, 10), *, group: Group | None = None
) -> dict[str, float]:
    """Mean reciprocal rank and Hits@k over the ranks that all processes hold; collective.

    Args:
        ranks: float of any shape, at least 1.
        hits: the k's.

    Returns:
        ``{"mrr": .., "hits@1": .., ..}``, equal everywhere; NaN where nobody has a rank.
    """
    group = group or current_group()
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
    group.agree(None if k >= 1 else ValueError(f"k: got {k}, expected at least 1"), "hits_at")
    best = negative.detach().double().cpu().view(-1)
    best = best.topk(min(k, len(best))).values
    padded = torch.full((k,), -math.inf, dtype=torch.float64)
    padded[: len(best)] = best
    count = int(group.all_reduce(torch.tensor(len(positive))))
    bound = torch.cat(group.all_gather(padded)).topk(k).values[-1]
    above = positive.detach().double().cpu() > bound
    right = int(group.all_reduce(above.sum()))
    return right / count if count else math.nan
