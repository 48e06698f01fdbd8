"""A :class:`Spill` and a table for a model to scale of a graph: they count what grows with it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import UntypedStorage

from sar.comm.turns import Table
from sar.errors import SarError
from sar.memory.blocks import PAGE, Block, own_pages
from sar.memory.spill import LEAST_BYTES, Spill

NO_LIMIT = 1 << 50  # bytes


class TooLittle(SarError):
    """The model to scale does not fit."""


class SpillToScale(Spill):
    """A :class:`Spill` that counts what grows with the graph, within ``room`` bytes of it.

    Args:
        fixed: bytes of tensors that do not grow, such as parameters.

    Attributes:
        peak: bytes at the most.
        shared: what all ranks share, the table.
    """

    def __init__(self, folder: Path, room: int, scale: float, fixed: set[int]) -> None:
        super().__init__(folder, NO_LIMIT, max(PAGE, round(LEAST_BYTES / scale)))
        self._given, self._fixed, self._spare = room, fixed, round(self._spare / scale)
        self._small, self._apart = dict[int, int](), dict[int, set[int]]()
        self.peak = 0
        self.shared = dict[Any, Any]()

    def __enter__(self) -> SpillToScale:
        super().__enter__()
        self._most = self._limit = self._given
        return self

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.size

    @contextmanager
    def leaving_out(self, rank: int, but: set[int]) -> Iterator[None]:
        """Inside, nothing that ``rank`` makes grows with the graph, ``but`` tensors of so many
        bytes."""
        self._apart[rank] = but
        yield
        del self._apart[rank]

    def _measure(self) -> None:
        self._limit = self._most - self._growing()

    def _growing(self) -> int:
        kept = list(self.shared.get("kept", {}).values())
        return sum(map(_touched, kept)) + sum(self._small.values())

    def _follow(
        self, number: int, storage: UntypedStorage, maker: str, rank: int | None = None
    ) -> Block | None:
        size = storage.nbytes()
        grows = size not in self._fixed and size in self._apart.get(self._rank, {size})
        if rank is None and not grows:
            return None
        block = super()._follow(number, storage, maker, rank)
        if block is None and 0 < size < self._least and number not in self._small:
            self._small[number] = size
            weakref.finalize(storage, self._small.pop, number, None)
        self.peak = max(self.peak, self._resident + self._ahead + self._growing())
        return block

    def _too_little(self, needed: int) -> SarError:
        return TooLittle(str(super()._too_little(needed)))


def _touched(rows: torch.Tensor) -> int:
    """Bytes that were written of numpy's memory, which is none before."""
    first = rows.data_ptr() // PAGE * PAGE
    size = -(-(rows.data_ptr() + rows.nbytes) // PAGE) * PAGE - first
    return int(own_pages(first, size).sum()) * PAGE


class SeenTable(Table):
    """Remembers the blocks of columns in ``blocks``."""

    def __init__(self, group: Any, spill: SpillToScale, blocks: list[tuple[int, int]]) -> None:
        super().__init__(group, spill)
        self._blocks = blocks

    def columns(self, num_rows: int, width: int, dtype: torch.dtype, together: int = 1) -> int:
        found = super().columns(num_rows, width, dtype, together)
        self._blocks.append((width, -(-width // found)))
        return found
