"""Gradients that results are given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sar.comm import Group
from sar.models.validation.compare import Layout
from sar.models.validation.record import is_plain


def seeds_of(
    group: Group, gathered: list[Any], results: list[Tensor], leaves: list[Tensor]
) -> list[Tensor]:
    """Gradients of results, the same however the graph is cut: of a single number 1, of others
    what each number decides. Collective.

    Of results that all ranks have each rank gives its share, unless a loss of all ranks is among
    them, whose gradient is the share already.

    Args:
        gathered: a place for each rank's results.
        leaves: what they were made of.
    """
    gathered[group.rank] = [result.detach() for result in results]
    group.all_gather(torch.zeros(1))  # all have written
    ranks = list(zip(*gathered))
    group.all_gather(torch.zeros(1))  # all have read
    return [_seed(group, leaves, *pair) for pair in zip(results, ranks)]


def _seed(group: Group, leaves: list[Tensor], result: Tensor, ranks: tuple[Tensor, ...]) -> Tensor:
    one, values = all(one.numel() == 1 for one in ranks), result.detach()
    bounded = values / (1.0 + values.abs())  # so that rounding, of large numbers too, stays small
    grad = torch.ones_like(values) if one else torch.cos(1.0 + bounded).nan_to_num()
    if not all(torch.equal(other, ranks[0]) for other in ranks):
        return grad
    return grad if one and _is_loss_of_all(group, result, leaves) else grad / group.size


def _is_loss_of_all(group: Group, result: Tensor, leaves: list[Tensor]) -> bool:
    """Whether a pass backwards meets one of the losses that take rows of all ranks."""
    before = group.losses
    if leaves:
        torch.autograd.grad(result, leaves, torch.ones_like(result), True, allow_unused=True)
    return group.losses > before


def moved(layout: Layout, rank: int, leaf: Any) -> Any:
    """Rows of nodes or edges with numbers of their own added, so that no two are equal."""
    if not is_plain(leaf) or not leaf.is_floating_point() or not leaf.dim():
        return leaf
    pieces = (kind.pieces[rank] for kind in layout.kinds)
    places = next((one.there for one in pieces if one.count == len(leaf)), None)
    if places is None:
        return leaf
    at = torch.arange(leaf[0].numel()) * 1.7 + places[:, None] * 950.0
    return leaf + 1e-3 * torch.sin(1.0 + at).view(leaf.shape)
