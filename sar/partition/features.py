"""Features of one part: a mapping from names to tensors that stay in their file until read."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping

import torch
from torch import Tensor

from sar.partition.column import Column, RowFile
from sar.partition.progress import blocks, rows_in

_MOST_SHOWN = 20


class FeatureStore(MutableMapping):
    """Named feature tensors, read from the mapped file at each access and never cached.

    ``store[name]`` is a fresh CPU tensor; assigning a name keeps that tensor in memory instead.
    uint8 features whose name ends in ``_mask`` are read as bool, because the files have no bool.
    """

    def __init__(self, columns: Mapping[str, Column] | None = None) -> None:
        self._items: dict[str, Column | Tensor | Callable[[], Tensor]] = dict(columns or {})

    def map(self, name: str, rows: Column) -> None:
        """Adds a feature that is read from ``rows`` at each access."""
        self._items[name] = rows

    def synthesize(self, name: str, make: Callable[[], Tensor]) -> None:
        """Adds a feature that ``make()`` computes at each access."""
        self._items[name] = make

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __setitem__(self, name: str, value: Tensor) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"feature {name!r}: got {type(value).__name__}, expected a Tensor")
        self._items[name] = value

    def __delitem__(self, name: str) -> None:
        del self._items[name]

    def __getitem__(self, name: str) -> Tensor:
        item = self._resolve(name)
        return item if isinstance(item, Tensor) else self._read(name, item, 0, len(item), None)

    def __repr__(self) -> str:
        return f"FeatureStore({', '.join(self._items)})"

    def _resolve(self, name: str) -> Column | Tensor:
        if name not in self._items:
            raise UnknownFeature(_unknown(name, list(self._items)))
        item = self._items[name]
        return item() if callable(item) else item

    @staticmethod
    def _read(name: str, item: Column, start: int, stop: int, dtype: torch.dtype | None) -> Tensor:
        if dtype is not None:
            return item.read(start, stop, dtype)
        found = item.read(start, stop)
        return found.ne(0) if _is_mask(name, item.dtype) else found

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``[start, stop)`` of a feature, without reading the others."""
        return self.reader(name)(start, stop)

    def reader(self, name: str) -> Callable[[int, int], Tensor]:
        """:meth:`rows` of one feature, for many blocks: what is computed is computed once."""
        item = self._resolve(name)
        if isinstance(item, Tensor):
            return lambda start, stop: item[start:stop]
        return lambda start, stop: self._read(name, item, start, stop, None)

    def info(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """``(dtype, shape)`` of a feature, without reading it."""
        item = self._resolve(name)
        dtype = torch.bool if _is_mask(name, item.dtype) else item.dtype
        return dtype, tuple(item.shape)

    def get_as(self, name: str, dtype: torch.dtype) -> Tensor:
        """A feature converted to ``dtype`` block by block: no full copy in the stored dtype."""
        item = self._resolve(name)
        if isinstance(item, Tensor):
            return item.to(dtype)
        return self._read(name, item, 0, len(item), dtype)

    def to_file(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        folder: str | os.PathLike | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> RowFile:
        """A feature in a temporary file in ``folder``, written block by block, never in memory.

        Args:
            dtype: what it is converted to; its own by default.
            change: what is done to each block of rows after that.
        """
        stored, shape = self.info(name)
        dtype, read = dtype or stored, self.reader(name)
        step = rows_in(math.prod(shape[1:]) * dtype.itemsize)

        def changed() -> Iterator[Tensor]:
            for low, high in blocks(shape[0], size=step):
                block = read(low, high).to(dtype)
                yield block if change is None else change(block)

        return RowFile(shape, dtype, changed(), folder)


class UnknownFeature(KeyError):
    """Shown as it is written; a ``KeyError`` is shown quoted."""

    def __str__(self) -> str:
        return str(self.args[0])


def _unknown(name: object, known: list[str]) -> str:
    """What there is instead, the nearest first: names with or without their type."""
    word = str(name)
    bare = {one: one.rpartition("/")[2] for one in known}
    near = [one for one in known if bare[one] == word.rpartition("/")[2]]
    near += difflib.get_close_matches(word, known, n=1)
    near += [one for one in known if bare[one] in difflib.get_close_matches(word, bare.values())]
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    shown = ", ".join(map(repr, known[:_MOST_SHOWN])) or "none"
    more = f" and {len(known) - _MOST_SHOWN} more" if len(known) > _MOST_SHOWN else ""
    return f"no feature {word!r}{hint} there are: {shown}{more}"


def _is_mask(name: str, dtype: torch.dtype) -> bool:
    return dtype == torch.uint8 and name.endswith("_mask")
