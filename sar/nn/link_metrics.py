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

from sar import expect
from sar.comm import Group, current_group
from sar.comm.collectives import ask_rows, send_rows


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
        truth = positive.unsqueeze(1)
        above, level = ~(negative <= truth), negative == truth
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
        above, level = ~(scores <= truths[query]), scores == truths[query]
        result = torch.ones(len(rows), dtype=torch.float64)
        return result.index_add_(0, query, above.double() + level.double() / 2)

    return ask_rows(group, owners[0], asked, ranks).to(positive[1].device)


def _columns(rows: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [m] ids and float64 [m] scores of int64 [m, 2] rows."""
    ids, bits = rows.T.contiguous()
    return ids, bits.view(torch.float64)


def _known_error(known: Tensor, ids: Tensor) -> Exception | None:
    """What is wrong with the ids of this rank's true links, ascending, or of their negatives."""
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
    best = negative.detach().double().cpu().view(-1)
    best = best.topk(min(k, len(best))).values
    padded = torch.full((k,), -math.inf, dtype=torch.float64)
    padded[: len(best)] = best
    count = int(group.all_reduce(torch.tensor(len(positive))))
    bound = torch.cat(group.all_gather(padded)).topk(k).values[-1]
    above = positive.detach().double().cpu() > bound
    right = int(group.all_reduce(above.sum()))
    return right / count if count else math.nan
