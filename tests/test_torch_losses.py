"""Losses over all ranks beside torch's own on the concatenated rows: values, gradients, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import WorkerPool, run_threads
from harness.covering import by_pairs
from torch import Tensor

import sar
from sar.comm import Group

# Rows of each rank: one, uneven, empty ranks, a rank (the last of three) without masked rows.
SPLITS = [[12], [7, 5], [0, 12], [4, 6, 2], [1, 6, 0, 5]]
MASK = torch.tensor([1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 0]).bool()
CLASSES = 4
Loss = Callable[..., Tensor]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def part(value: Any, splits: list[int], rank: int) -> Any:
    """This rank's rows of what has one for each node."""
    is_rows = isinstance(value, Tensor) and value.dim() and len(value) == sum(splits)
    return value.split(splits)[rank] if is_rows else value


def check(
    splits: list[int], ours: Loss, theirs: Callable[[Tensor], Tensor], values: Tensor,
    *others: Any, close: float = 1e-12, **options: Any,
) -> None:  # fmt: skip
    """``ours`` on the ranks' rows against ``theirs`` on all, three times, so that losses count."""
    whole = values.clone().requires_grad_()
    expected = theirs(whole)
    (3 * expected).backward()

    def case(group: Group) -> tuple[Tensor, Tensor, int]:
        mine = part(values, splits, group.rank).clone().requires_grad_()
        rest = [part(one, splits, group.rank) for one in others]
        given = {name: part(one, splits, group.rank) for name, one in options.items()}
        loss = ours(mine, *rest, **given)
        (3 * loss).backward()
        return loss.detach(), mine.grad, group.losses

    found = run_threads(len(splits), case)
    for loss, _, losses in found:
        assert torch.equal(loss, found[0][0]) and losses == 1
        torch.testing.assert_close(loss, expected.detach(), rtol=close, atol=0, check_dtype=False)
    grads = torch.cat([grad for _, grad, _ in found])
    assert grads.dtype == values.dtype
    torch.testing.assert_close(grads, whole.grad, rtol=close, atol=close / 10, check_dtype=False)


def masked(kind: str, shape: tuple[int, ...] = ()) -> tuple[Tensor, Any]:
    """The rows, or single values, that count, and what is passed as the mask."""
    if kind == "single values" and len(shape) == 2:
        chosen = seeded(*shape, seed=4) > -0.3
        return chosen, chosen
    return (torch.ones_like(MASK), None) if kind == "none" else (MASK, MASK)


@by_pairs(
    splits=SPLITS, kind=["none", "bool"], labels=["classes", "ignored", "probabilities"],
    weighted=[False, True], smoothing=[0.0, 0.2],
)  # fmt: skip
def test_cross_entropy(
    splits: list[int], kind: str, labels: str, weighted: bool, smoothing: float
) -> None:
    logits = seeded(12, CLASSES)
    y = torch.arange(12) % CLASSES
    ignore = {"ignore_index": 2} if labels == "ignored" else {}
    if labels == "probabilities":
        y = seeded(12, CLASSES, seed=1).softmax(1)
    weight = torch.tensor([0.5, 2.0, 1.0, 0.0], dtype=torch.float64) if weighted else None
    rows, mask = masked(kind)
    options = {"weight": weight, "label_smoothing": smoothing, **ignore}

    def theirs(whole: Tensor) -> Tensor:
        return F.cross_entropy(whole[rows], y[rows], **options)

    check(splits, sar.cross_entropy, theirs, logits, y, mask, **options)


@by_pairs(
    splits=SPLITS, kind=["none", "bool", "single values"], columns=[None, 3],
    weight=[None, "columns", "rows", "all"], positive=[False, True],
)  # fmt: skip
def test_binary_cross_entropy(
    splits: list[int], kind: str, columns: int | None, weight: str | None, positive: bool
) -> None:
    shape = (12,) if columns is None else (12, columns)
    logits, labels = seeded(*shape), (seeded(*shape, seed=1) > 0).double()
    sizes = {"columns": shape[1:] or shape, "rows": (12, 1) if columns else shape, "all": shape}
    options = {"weight": None if weight is None else seeded(*sizes[weight], seed=2).abs()}
    options["pos_weight"] = seeded(*shape[-1:], seed=3).abs() if positive else None
    rows, mask = masked(kind, shape)
    wide = {k: None if v is None else v.expand(shape)[rows] for k, v in options.items()}

    def theirs(whole: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(whole[rows], labels[rows], **wide)

    check(splits, BCE, theirs, logits, labels.long() if positive else labels, mask, **options)


def weighted_mean(losses: Tensor, weight: Tensor | None) -> Tensor:
    return losses.mean() if weight is None else (losses * weight).sum() / weight.sum()


@by_pairs(
    splits=SPLITS, kind=["none", "bool", "single values"], columns=[None, 3],
    weight=[None, "rows", "all"], ours=[sar.mse_loss, sar.global_mean],
)  # fmt: skip
def test_weighted_means(
    splits: list[int], kind: str, columns: int | None, weight: str | None, ours: Loss
) -> None:
    shape = (12,) if columns is None else (12, columns)
    values, targets = seeded(*shape), seeded(*shape, seed=1)
    given = None
    if weight is not None:
        given = seeded(*(shape if weight == "all" else (12,)), seed=2).abs()
    rows, mask = masked(kind, shape)
    wide = given
    if given is not None:
        wide = (given if given.dim() == values.dim() else given[:, None]).expand(shape)[rows]
    others = [targets, mask] if ours is sar.mse_loss else [mask]

    def theirs(whole: Tensor) -> Tensor:
        losses = (whole - targets) ** 2 if ours is sar.mse_loss else whole
        return weighted_mean(losses[rows], wide)

    check(splits, ours, theirs, values, *others, weight=given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_types_are_computed_wide(dtype: torch.dtype) -> None:
    logits, y = seeded(12, CLASSES).to(dtype), torch.arange(12) % CLASSES
    close = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, theirs, rest in (
        (sar.cross_entropy, lambda whole: F.cross_entropy(whole.double(), y), [y]),
        (sar.global_mean, lambda whole: whole.double().mean(), []),
    ):
        check([7, 5], ours, theirs, logits, *rest, close=close)
        loss = ours(logits, *rest)
        assert loss.dtype == torch.float32
        assert float(loss) == pytest.approx(float(theirs(logits)), abs=1e-6)


def test_indices_choose_rows_and_nothing_else_is_looked_at() -> None:
    rows = torch.tensor([5, 1, 1])
    logits, y = seeded(6, 3), torch.tensor([-1, 2, 99, -1, 7, 0])
    whole = F.cross_entropy(logits[rows], y[rows])
    torch.testing.assert_close(sar.cross_entropy(logits, y, rows), whole, rtol=1e-12, atol=0)
    targets = torch.full((6, 3), float("nan"), dtype=torch.float64)
    targets[rows] = 1
    leaf = logits.clone().requires_grad_()
    sar.mse_loss(leaf, targets, rows).backward()
    assert leaf.grad.isfinite().all() and (leaf.grad[[0, 2, 3, 4]] == 0).all()


Z, I, B = torch.zeros(3, 2), torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.bool)
BCE, GRAD = sar.binary_cross_entropy_with_logits, torch.ones(2, requires_grad=True)
WRONG: list[tuple[Loss, tuple, dict[str, Any], type[Exception], str]] = [
    (sar.cross_entropy, (I, I), {}, TypeError, "logits: got torch.int64"),
    (sar.cross_entropy, ([1], I), {}, TypeError, "logits: got list"),
    (sar.cross_entropy, (Z[:, 0], I), {}, ValueError, r"logits: got shape \(3,\), expected \[N, C"),
    (sar.cross_entropy, (Z, [0]), {}, TypeError, "labels .*: got list"),
    (sar.cross_entropy, (Z, I[:2]), {}, ValueError, r"labels .*: got shape \(2,\)"),
    (sar.cross_entropy, (Z, Z[:, 0]), {}, ValueError, r"labels .*: got shape \(3,\)"),
    (sar.cross_entropy, (Z, I + 2), {}, ValueError, "labels: got class 2, expected 0 to 1"),
    (sar.cross_entropy, (Z, I - 1), {}, ValueError, "labels: got class -1"),
    (sar.cross_entropy, (Z, I, Z > 0), {}, ValueError, r"mask: got shape \(3, 2\)"),
    (sar.cross_entropy, (Z, I), {"weight": Z[:, 0]}, ValueError, r"weight: got shape \(3,\)"),
    (sar.cross_entropy, (Z, I), {"weight": GRAD}, ValueError, "weight: got a tensor that asks"),
    (BCE, (Z, I), {}, ValueError, r"labels: got shape \(3,\)"),
    (BCE, (Z, Z), {"pos_weight": I}, ValueError, "pos_weight: got"),
    (sar.mse_loss, (Z[:, :1], Z[:, 0]), {}, ValueError, r"targets: got shape \(3,\)"),
    (sar.mse_loss, (Z, Z), {"weight": GRAD}, ValueError, r"weight: got shape \(2,\)"),
    (sar.global_mean, (Z,), {"weight": I[:2]}, ValueError, r"weight: got shape \(2,\)"),
    (sar.global_mean, (Z,), {"weight": 2.0}, TypeError, "weight: got float"),
    (sar.global_mean, (I,), {}, TypeError, "values: got torch.int64"),
    (sar.global_mean, (Z[0, 0],), {}, ValueError, r"values: got shape \(\), expected \[N\] or"),
    (sar.global_mean, (Z,), {"mask": B[:2]}, ValueError, r"mask: got shape \(2,\)"),
    (sar.global_mean, (Z,), {"mask": Z[:, 0]}, TypeError, "mask: got torch.float32"),
    (sar.global_mean, (Z,), {"mask": torch.tensor([3])}, ValueError, "mask: .*expected 0 to 2"),
    (sar.global_mean, (Z,), {"mask": [1]}, TypeError, "mask: got list"),
]


@pytest.mark.parametrize("loss, args, options, kind, words", WRONG)
def test_errors_are_raised_by_every_rank(
    loss: Loss, args: tuple, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    """The input is bad on rank 1 alone."""
    good = {1: (Z,), 2: (Z, I if loss is sar.cross_entropy else Z), 3: (Z, I, B)}[len(args)]

    def case(group: Group) -> str:
        with pytest.raises(kind, match="rank 1: " + words) as caught:
            loss(*(args if group.rank else good), **(options if group.rank else {}))
        return str(caught.value)

    assert len(set(run_threads(2, case))) == 1


def no_rows(group: Group) -> list[str]:
    labels = torch.full((3,), -100)
    calls: list[Callable[[], Any]] = [
        lambda: sar.cross_entropy(Z, labels),
        lambda: sar.cross_entropy(Z, I, B),
        lambda: sar.cross_entropy(Z, I, weight=torch.zeros(2)),
        lambda: sar.binary_cross_entropy_with_logits(Z, Z, B),
        lambda: sar.mse_loss(Z[:0], Z[:0]),
        lambda: sar.global_mean(Z, weight=torch.zeros(3)),
    ]
    found = []
    for call in calls:
        with pytest.raises(ValueError, match="no rank has a value to average") as caught:
            call()
        found.append(str(caught.value).partition(":")[0])
    return found


def test_no_row_that_counts_is_an_error_everywhere(processes: WorkerPool) -> None:
    others = ["binary_cross_entropy_with_logits", "mse_loss", "global_mean"]
    want = ["cross_entropy"] * 3 + others
    assert run_threads(3, no_rows) == [want] * 3
    assert processes.run(2, no_rows) == [want] * 2
