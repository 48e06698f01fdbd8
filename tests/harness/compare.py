"""How far results may be from the reference, and how that is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Largest difference over the reference's largest magnitude, by dtype of the tested run.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
_ZERO = 1e-11  # gradients below this share of the model's largest are zero in exact arithmetic


def relative_error(got: Tensor, want: Tensor, scale: float | None = None) -> float:
    """max|got - want| over max|want| (or over ``scale``); infinite when shapes or NaN differ."""
    if got.shape != want.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    if not torch.equal(got.isnan(), want.isnan()) or not torch.equal(got.isinf(), want.isinf()):
        return float("inf")
    same = got == want  # infinities of equal sign
    rest = ~(same | want.isnan())
    if not rest.any():
        return 0.0
    size = float(want[want.isfinite()].abs().max()) if scale is None else scale
    difference = float((got - want)[rest].abs().max())
    return difference / size if size > 0 else difference


def same(one: Any, other: Any) -> bool:
    """Whether all that two structures hold is bit for bit the same."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def assert_close(
    got: Tensor,
    want: Tensor,
    what: str,
    dtype: torch.dtype,
    scale: float | None = None,
    at_least: float = 0.0,
) -> None:
    """``got`` within the bound of ``dtype`` (or ``at_least``, if wider) from ``want``."""
    error, allowed = relative_error(got, want, scale), max(TOLERANCE[dtype], at_least)
    assert error <= allowed, (
        f"{what}: relative error {error:.3g}, allowed {allowed:.2g}; "
        f"got {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)}"
    )


def assert_gradients_close(
    got: Mapping[str, Tensor | None],
    want: Mapping[str, Tensor | None],
    dtype: torch.dtype,
    what: str = "gradient of",
    at_least: float = 0.0,
) -> None:
    """All gradients; one that is zero in exact arithmetic is held against the largest of all.

    ``at_least`` widens the bound, for what is limited by rounding outside of the tested code.
    """
    assert got.keys() == want.keys()
    sizes = [float(g.abs().max()) for g in want.values() if g is not None and g.numel()]
    largest = max(sizes, default=0.0)
    for name, expected in want.items():
        actual = got[name]
        assert (actual is None) == (expected is None), f"{what} {name}: {actual} not {expected}"
        if expected is None or actual is None or not expected.numel():
            continue
        vanishes = float(expected.abs().max()) <= _ZERO * largest
        scale = largest if vanishes else None
        assert_close(actual, expected, f"{what} {name}", dtype, scale, at_least)
