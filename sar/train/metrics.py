"""Accuracy, F1 and ROC-AUC over the nodes of all ranks, exact and equal on every rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sar.comm import Group, current_group
from sar.words import METRICS

OGB_METRICS = {  # its names are acc and rocauc
    "ogbn-arxiv": "ogb-acc",
    "ogbn-mag": "ogb-acc",
    "ogbn-papers100M": "ogb-acc",
    "ogbn-products": "ogb-acc",
    "ogbn-proteins": "ogb-rocauc",
}


def score(metric: str, logits: Tensor, labels: Tensor, *, group: Group | None = None) -> float:
    """One number over the rows of all ranks; collective.

    Args:
        metric: ``accuracy``; ``f1-micro``, ``f1-macro`` (classes that neither labels nor
            predictions have are left out); ``roc-auc`` (two classes: of the second; more: mean
            of one class against the rest; multilabel: mean over the labels with both values);
            ``ogb-acc`` and ``ogb-rocauc``, what OGB's evaluators of node properties compute: the
            mean over labels of each one's accuracy, or of its ROC-AUC where it has both values.
        logits: [n, C] float; n may be 0.
        labels: int64 [n], every one in [0, C); or for multilabel float [n, C] of 0, 1 and NaN
            for unknown, which is left out.

    Returns:
        A number in [0, 1], or NaN where it is undefined on the rows of all ranks.

    Raises ``ValueError`` for an unknown metric, and ``ogb-rocauc`` of classes.
    """
    if metric not in METRICS:
        raise ValueError(f"metric: got {metric!r}, expected one of {', '.join(METRICS)}")
    group = group or current_group()
    if metric == "ogb-rocauc" and labels.dim() == 1:
        raise ValueError("metric: got 'ogb-rocauc' and classes, expected multilabel")
    if metric in ("accuracy", "ogb-acc"):
        return _accuracy(logits, labels, group, by_label=metric == "ogb-acc")
    if metric in ("roc-auc", "ogb-rocauc"):
        return _mean_auc(logits, labels, group)
    return _f1(logits, labels, metric == "f1-macro", group)


def predict(logits: Tensor, multilabel: bool) -> Tensor:
    """int64 [n] classes, or bool [n, C] for multilabel (logit above 0)."""
    return logits > 0 if multilabel else logits.argmax(1)


def metric_of_dataset(name: str) -> str | None:
    """OGB's metric for a data set of node properties; ``None`` for any other name."""
    return OGB_METRICS.get(name)


def _accuracy(logits: Tensor, labels: Tensor, group: Group, by_label: bool) -> float:
    known = ~torch.isnan(labels) if labels.dim() == 2 else torch.ones_like(labels).bool()
    right = predict(logits, labels.dim() == 2) == labels
    counts = torch.stack([(right & known).sum(0), known.sum(0)])
    if not by_label and labels.dim() == 2:
        counts = counts.sum(1)
    correct, total = group.all_reduce(counts).double()
    return float((correct / total).mean())  # NaN where there is nothing


def _f1(logits: Tensor, labels: Tensor, macro: bool, group: Group) -> float:
    guess, truth = predict(logits, labels.dim() == 2), labels
    if labels.dim() == 1:
        classes = torch.arange(logits.shape[1], device=logits.device)
        guess, truth = guess[:, None] == classes, (labels[:, None] == classes).float()
    known = ~torch.isnan(truth)
    hit, positive = guess & known, truth == 1
    parts = [(hit & positive).sum(0), (hit & ~positive).sum(0), (~guess & positive).sum(0)]
    true, false, missed = group.all_reduce(torch.stack(parts)).double()
    if not macro:
        true, false, missed = true.sum(0, True), false.sum(0, True), missed.sum(0, True)
    weight = 2 * true + false + missed
    seen = weight > 0
    return float((2 * true[seen] / weight[seen]).mean()) if bool(seen.any()) else math.nan


def _mean_auc(logits: Tensor, labels: Tensor, group: Group) -> float:
    if labels.dim() == 1:
        scores = logits.double().softmax(1)
        columns = range(1, 2) if logits.shape[1] == 2 else range(logits.shape[1])
        pairs = ((scores[:, c], (labels == c).double()) for c in columns)
    else:
        pairs = ((logits[:, c].double(), labels[:, c].double()) for c in range(logits.shape[1]))
    values = [_auc(one_score, truth, group) for one_score, truth in pairs]
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan


def _auc(scores: Tensor, truth: Tensor, group: Group) -> float:
    """Share of (positive, negative) pairs in the right order, ties half: Mann and Whitney's U.
    Gathers one column at a time, so a rank holds two numbers for each row of all ranks."""
    known = ~torch.isnan(truth)
    scores, truth = _gather(torch.stack([scores[known], truth[known]], 1), group).unbind(1)
    _, place = torch.unique(scores, return_inverse=True)
    positive = torch.zeros(len(scores) + 1, dtype=torch.int64)
    positive.index_add_(0, place + 1, (truth == 1).long())
    negative = torch.zeros_like(positive).index_add_(0, place + 1, (truth != 1).long())
    below = negative.cumsum(0)[:-1]
    pairs = int(positive.sum()) * int(negative.sum())
    right = int((positive[1:] * (2 * below + negative[1:])).sum())
    return right / (2 * pairs) if pairs else math.nan


def _gather(rows: Tensor, group: Group) -> Tensor:
    """The [n, k] rows of all ranks in rank order, on the CPU."""
    counts = [int(n) for n in group.all_gather(torch.tensor([len(rows)]))]
    padded = rows.new_zeros((max(counts), rows.shape[1]), device="cpu")
    padded[: len(rows)] = rows.cpu()
    return torch.cat([part[:n] for part, n in zip(group.all_gather(padded), counts)])
