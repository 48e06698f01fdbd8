"""Whether a user's function gives each row for itself, as it is run on some rows at a time.

Rows are tried on random rows together and in part: a function that mixes rows, or that asks how
many there are, gives others for the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sar._private import without_modes
from sar.errors import NotSupportedError
from sar.ops.randomness import seeded, unchanged

ROWS, PART = 6, slice(1, 4)  # neither from the start nor the middle, as a flip keeps it
ALL = slice(0, ROWS)
_ALIKE = 0.01  # of the largest value: a function may compute in 16 bits


def row_spec(frame: Mapping[str, Tensor], name: str) -> tuple[tuple[int, ...], Any, Any]:
    """Shape but for rows, dtype and device of a column, of which nothing is computed."""
    column = frame[name]
    with without_modes():  # the column may be lazy; it is not captured
        return tuple(column.shape)[1:], column.dtype, column.device


class Sample(Mapping[str, Tensor]):
    """Some ``rows`` of the same few random rows per column; zeros where ``blank``.

    ``inner`` are dimensions between the rows and the column's others. ``made`` has the rows by
    name, in the order in which they were first looked at.
    """

    def __init__(
        self,
        frame: Mapping[str, Tensor],
        rows: slice,
        inner: tuple[int, ...] = (),
        blank: bool = False,
    ) -> None:
        self._frame, self._rows, self._inner, self._blank = frame, rows, inner, blank
        self.made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.made:
            shape, dtype, device = row_spec(self._frame, name)
            with torch.inference_mode(False):  # where writes are counted
                rows = torch.zeros((ROWS, *self._inner, *shape), dtype=dtype, device=device)
                if dtype.is_floating_point and not self._blank:  # others may be rows elsewhere
                    drawn = torch.Generator().manual_seed(len(self.made))
                    rows.copy_(torch.rand(rows.shape, generator=drawn))
                self.made[name] = rows[self._rows].clone()
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)


def refuse_chunked(run: Callable[[slice], Mapping[str, Tensor]], what: str, rows: str) -> None:
    """Raise ``NotSupportedError`` where rows depend on those that are computed with them.

    ``run`` is the function on some rows of a sample, ``what`` and ``rows`` what error calls them.
    A function that draws torch's random numbers, or fails on random rows, is not judged.
    """
    with torch.no_grad(), unchanged():
        try:
            whole, part = run(ALL), run(PART)
        except Exception:  # noqa: BLE001 - a user's, which may want other numbers
            return
        if _are_alike({name: out[PART] for name, out in whole.items()}, part):
            return
        first, same, other = (_drawn(run, whole, seed) for seed in (0, 0, 1))
    if not _are_alike(first, same):
        raise NotSupportedError(
            f"{what}: gives other values when it is called again, on equal rows: by Python state "
            "that its calls change, or random numbers that are not torch's; it is called for some "
            f"{rows} at a time, and again in backward, so expected values of its arguments alone"
        )
    if _are_alike(first, other):
        raise NotSupportedError(
            f"{what}: what it gives for a row depends on which {rows} are computed together: by "
            "batch_size(), or a mean, softmax or norm over the batch; it is called for some "
            f"{rows} at a time, so expected each row for itself (compute the rest before, over all "
            "ranks: sar.global_mean)"
        )


def _drawn(run: Callable, like: Mapping[str, Tensor], seed: int) -> Mapping[str, Tensor]:
    with seeded(seed, next(iter(like.values())).device):
        return run(ALL)


def _are_alike(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    if some.keys() != others.keys():
        return False
    return all(alike(out, others[name], _ALIKE) for name, out in some.items())


def alike(a: Tensor, b: Tensor, share: float) -> bool:
    """Whether tensors differ by no more than a share of the largest number."""
    if a.shape != b.shape:
        return False
    a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    size = float(a.abs().nan_to_num(0, 0, 0).max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=share * size, equal_nan=True)
