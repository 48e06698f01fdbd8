"""What rows travel as where less than all of their digits may be sent: bfloat16, int8."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

_LEVELS = 127  # of an int8 on either side of 0
_SCALE_BYTES = 4
_BLOCK_ELEMENTS = 1 << 18  # coded at a time, so that temporaries stay small


class Codec(ABC):
    """Turns rows into what is sent and back, a block at a time.

    Attributes:
        dtype: of what is sent.
    """

    dtype: torch.dtype

    def width(self, columns: int) -> int:
        """Numbers of ``dtype`` that a row of ``columns`` is sent as."""
        return columns

    @abstractmethod
    def encode(self, rows: Tensor, out: Tensor) -> None:
        """Fill ``out`` [n, self.width(columns)] from ``rows`` [n, columns]."""

    @abstractmethod
    def decode(self, coded: Tensor, out: Tensor) -> None:
        """Fill ``out`` [n, columns] from what :meth:`encode` made."""

    def encode_all(self, rows: Tensor, out: Tensor) -> None:
        """:meth:`encode` by blocks of rows."""
        step = block_rows(rows.shape[1])
        for part, coded in zip(rows.split(step), out.split(step), strict=True):
            self.encode(part, coded)

    def decode_all(self, coded: Tensor, out: Tensor) -> None:
        """:meth:`decode` by blocks of rows."""
        step = block_rows(out.shape[1])
        for part, rows in zip(coded.split(step), out.split(step), strict=True):
            self.decode(part, rows)


def block_rows(width: int) -> int:
    """Rows of ``width`` numbers that are coded at a time."""
    return max(1, _BLOCK_ELEMENTS // max(1, width))


class BFloat16(Codec):
    """Rows rounded to the nearest bfloat16."""

    dtype = torch.bfloat16

    def encode(self, rows: Tensor, out: Tensor) -> None:
        out.copy_(rows)

    def decode(self, coded: Tensor, out: Tensor) -> None:
        out.copy_(coded)


class Int8(Codec):
    """x_ic as q_ic s_i with s_i = max_c |x_ic| / 127 and q_ic = floor(x_ic / s_i + u), 0 <= u < 1.

    u is uniform, so the mean of what arrives is x. The float32 scale follows the row's bytes. A row
    with an infinity or NaN arrives as NaN.

    Args:
        noise: where u is drawn.
    """

    dtype = torch.int8

    def __init__(self, noise: torch.Generator) -> None:
        self._noise = noise

    def width(self, columns: int) -> int:
        return columns + _SCALE_BYTES

    def encode(self, rows: Tensor, out: Tensor) -> None:
        rows = rows.float()
        if rows.numel() == 0:
            out.zero_()
            return
        scale = rows.abs().amax(1, keepdim=True) / _LEVELS
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        noise = torch.rand(rows.shape, generator=self._noise).to(rows.device)
        levels = (rows / torch.where(scale > 0, scale, 1.0)).add_(noise).floor_()
        out[:, : rows.shape[1]] = levels.clamp_(-_LEVELS, _LEVELS).nan_to_num_(0.0)
        out[:, rows.shape[1] :] = scale.view(torch.int8)

    def decode(self, coded: Tensor, out: Tensor) -> None:
        columns = out.shape[1]
        # Aligned by a copy, which contiguous() would not make of one row.
        scale = coded[:, columns:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        out.copy_(coded[:, :columns] * scale)


def codec_of(name: str | None, dtype: torch.dtype, noise: torch.Generator) -> Codec | None:
    """The codec of a :class:`sar.config.Lossy` field for rows of ``dtype``.

    ``None`` where rows travel as they are: by default, and where coding would save nothing.
    """
    if name is None or not dtype.is_floating_point:
        return None
    codec: Codec = BFloat16() if name == "bfloat16" else Int8(noise)
    return codec if codec.dtype.itemsize < dtype.itemsize else None
