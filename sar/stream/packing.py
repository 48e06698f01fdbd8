"""Several tensors in one row, so that a round is one message whatever a layer reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from sar.kernels import add_rows, wide_dtype

_ALIGNMENT = 16  # bytes; every dtype's columns start on a multiple of its size


class RowLayout:
    """Where each tensor's columns lie in a packed row.

    Tensors of one dtype are packed in it; different dtypes are packed as bytes.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.shapes = [t.shape[1:] for t in tensors]
        self.dtypes = [t.dtype for t in tensors]
        self.mixed = len(set(self.dtypes)) > 1
        self.dtype = torch.uint8 if self.mixed else self.dtypes[0]
        self.bounds: list[tuple[int, int]] = []
        self.width = 0
        for t in tensors:
            size = math.prod(t.shape[1:]) * (t.element_size() if self.mixed else 1)
            self.bounds.append((self.width, self.width + size))
            self.width += -(-size // _ALIGNMENT) * _ALIGNMENT if self.mixed else size

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """[rows, width] contiguous; a single tensor is only reshaped."""
        flat = [flat_rows(t) for t in tensors]
        if len(flat) == 1:
            return flat[0].contiguous()
        if not self.mixed:
            return torch.cat(flat, dim=1)
        packed = flat[0].new_zeros((len(flat[0]), self.width), dtype=torch.uint8)
        for part, (low, high) in zip(flat, self.bounds, strict=True):
            packed[:, low:high] = part.contiguous().view(torch.uint8).view(len(part), high - low)
        return packed

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Views of the columns, shaped as the tensors were."""
        parts = []
        for (low, high), shape, dtype in zip(self.bounds, self.shapes, self.dtypes, strict=True):
            columns = packed[:, low:high]
            if self.mixed:
                columns = columns.contiguous().view(dtype)
            parts.append(columns.reshape(len(packed), *shape))
        return parts

    def add_rows(self, target: Tensor, idx: Tensor, parts: Sequence[Tensor | None]) -> None:
        """target[idx] += the columns of those ``parts`` that are there; one dtype is packed."""
        for part, (low, high) in zip(parts, self.bounds, strict=True):
            if part is not None:
                add_rows(target[:, low:high], idx, flat_rows(part).to(target.dtype))


def flat_rows(tensor: Tensor) -> Tensor:
    """[rows, numbers of a row]; a view where there can be one."""
    return tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))


def sum_layout(tensors: Sequence[Tensor]) -> RowLayout | None:
    """Of the sums of rows like those of ``tensors``, all in one wide dtype, so that they can be
    added up in place; ``None`` where there are none."""
    wide = reduce(torch.promote_types, [wide_dtype(t.dtype) for t in tensors], torch.bfloat16)
    return RowLayout([t[:0].to(wide) for t in tensors]) if tensors else None
