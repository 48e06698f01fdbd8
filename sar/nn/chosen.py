"""Which values count in a loss: rows that a mask chooses, or single values of them."""

from __future__ import annotations

import torch
from torch import Tensor


def choose(values: Tensor, mask: Tensor | None) -> Tensor:
    """The values that count: [K, ...] rows, or [K] where the mask is as wide as the values."""
    if mask is None:
        return values
    mask = mask.to(values.device)
    if mask.dim() == 2:
        return values.masked_select(mask)
    rows = mask.nonzero()[:, 0] if mask.dtype == torch.bool else mask
    return values.index_select(0, rows)


def problem_of_values(
    values: Tensor, mask: Tensor | None, name: str = "values", whole_rows: bool = False
) -> Exception | None:
    """Why ``mask`` cannot choose among ``values``; with ``whole_rows`` they are [N, C]."""
    if not isinstance(values, Tensor):
        return TypeError(f"{name}: got {type(values).__name__}, expected a tensor")
    if not values.is_floating_point():
        return TypeError(f"{name}: got {values.dtype}, expected a floating point type")
    if values.dim() != 2 and (whole_rows or values.dim() != 1):
        expected = "[N, C]" if whole_rows else "[N] or [N, C]"
        return ValueError(f"{name}: got shape {tuple(values.shape)}, expected {expected}")
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        return TypeError(f"mask: got {type(mask).__name__}, expected a tensor")
    if mask.dtype not in (torch.bool, torch.int64):
        return TypeError(f"mask: got {mask.dtype}, expected bool or int64 indices")
    if mask.dtype == torch.bool:
        shapes = {values.shape[:1]} if whole_rows else {values.shape[:1], values.shape}
        if mask.shape not in shapes:
            expected = " or ".join(str(tuple(shape)) for shape in sorted(shapes))
            return ValueError(f"mask: got shape {tuple(mask.shape)}, expected {expected}")
    elif mask.dim() != 1:
        return ValueError(f"mask: got shape {tuple(mask.shape)}, expected a vector of indices")
    elif len(mask) and not 0 <= int(mask.min()) <= int(mask.max()) < len(values):
        return ValueError(
            f"mask: got indices from {int(mask.min())} to {int(mask.max())}, "
            f"expected 0 to {len(values) - 1}"
        )
    return None


def problem_of_shape(name: str, tensor: Tensor, *shapes: tuple[int, ...]) -> Exception | None:
    """Why ``tensor`` is not one of these shapes."""
    if not isinstance(tensor, Tensor):
        return TypeError(f"{name}: got {type(tensor).__name__}, expected a tensor")
    if tensor.shape not in shapes:
        expected = " or ".join(str(tuple(shape)) for shape in dict.fromkeys(shapes))
        return ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {expected}")
    return None


def problem_of_weights(*shapes: tuple[int, ...], **weights: Tensor | None) -> Exception | None:
    """Why one of some weights, where given, is not a constant of one of these shapes."""
    for name, weight in weights.items():
        error = None if weight is None else problem_of_shape(name, weight, *shapes)
        if error is not None:
            return error
        if weight is not None and weight.requires_grad:
            return ValueError(f"{name}: got a tensor that asks for a gradient, expected a constant")
    return None
