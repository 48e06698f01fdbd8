"""Named tensors of nodes or edges, as DGL's frames: one row per local node or edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from sar.kernels.jit import untraced


class Later:
    """A column that is made at its first use and kept from then on, by all frames that have it.

    ``dtype`` and ``shape`` are those that it will have; ``made`` is ``None`` until then.
    """

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, ...], make: Callable[[], Tensor]
    ) -> None:
        self.dtype, self.shape = dtype, shape
        self.made: Tensor | None = None
        self._make: Callable[[], Tensor] | None = make

    def get(self) -> Tensor:
        return self._read() if self.made is None else self.made

    @untraced
    def _read(self) -> Tensor:
        with torch.inference_mode(False):  # later calls may be outside of it
            made = self.made = self.unkept()
        self._make = None  # lets go of what it is made from
        return made

    def unkept(self) -> Tensor:
        """The column, which is not kept where it is made now."""
        return self.made if self._make is None else self._make()  # type: ignore[return-value]

    def then(self, num_rows: int, change: Callable[[Tensor], Tensor]) -> Later:
        """What ``change`` makes of it, with other rows."""
        shape = (num_rows, *self.shape[1:])
        return Later(self.dtype, shape, lambda: change(self.unkept()))


class Frame(MutableMapping[str, Tensor]):
    """Columns of one node or edge type.

    ``num_rows`` is that of every column, ``kind`` what a row is in errors: ``"node type 'paper'"``.
    ``defaults`` are columns that are computed on access, such as global ids, and not iterated.
    Columns of partitions are iterated, and read from their files on first access.
    """

    def __init__(
        self, num_rows: int, kind: str, defaults: Mapping[str, Callable[[], Tensor]]
    ) -> None:
        self.num_rows, self.kind, self.defaults = num_rows, kind, dict(defaults)
        self._columns: dict[str, Tensor | Later] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._columns:
            column = self._columns[name]
            return column.get() if isinstance(column, Later) else column
        if name in self.defaults:
            return self.defaults[name]()
        have = ", ".join(sorted(self._columns)) or "none"
        raise KeyError(f"no column {name!r} for {self.kind}; there are: {have}")

    def values_of(self, name: str) -> Tensor:
        """The column, computed where it is the result of an edge program; collective then."""
        column: Any = self[name]
        return column.materialize() if hasattr(column, "materialize") else column

    def changed(
        self, name: str, num_rows: int, change: Callable[[Tensor], Tensor]
    ) -> Tensor | Later:
        """What ``change`` makes of a column's values, later where it has not been read."""
        column = self._columns.get(name)
        if isinstance(column, Later):
            return column.then(num_rows, change)
        return change(self.values_of(name))

    def info(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """``(dtype, shape)`` of a column, which is not read for it."""
        column = self._columns.get(name)
        known = column if isinstance(column, Later) else self[name]
        return known.dtype, tuple(known.shape)

    def __setitem__(self, name: str, value: Tensor | Later) -> None:
        if not isinstance(value, Tensor | Later):
            raise TypeError(f"{name!r}: got {type(value).__name__}, expected a tensor")
        shape = tuple(value.shape)
        if tuple(map(int, shape[:1])) != (self.num_rows,):
            raise ValueError(
                f"{name!r}: got shape {shape}, expected {self.num_rows} rows, "
                f"one per local row of {self.kind}"
            )
        self._columns[name] = value

    def __delitem__(self, name: str) -> None:
        del self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns or name in self.defaults

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._columns))

    def __len__(self) -> int:
        return len(self._columns)

    def save(self) -> dict[str, Tensor | Later]:
        return dict(self._columns)

    def restore(self, saved: dict[str, Tensor | Later]) -> None:
        self._columns = saved

    def in_memory(self) -> list[Tensor]:
        """The columns that lie in memory."""
        columns = self._columns.values()
        found = [one.made if isinstance(one, Later) else one for one in columns]
        return [one for one in found if one is not None]

    def to(self, device: torch.device) -> Frame:
        moved = Frame(
            self.num_rows,
            self.kind,
            {name: _moved(make, device) for name, make in self.defaults.items()},
        )
        columns = [*self._columns]
        moved.restore({n: self.changed(n, self.num_rows, lambda t: t.to(device)) for n in columns})
        return moved


def _moved(make: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    return lambda: make().to(device)


class FrameSet(MutableMapping[str, dict]):
    """The frames of several types as one mapping: a column is a dict from type to tensor."""

    def __init__(self, frames: Mapping[Any, MutableMapping], resolve: Callable[[Any], Any]) -> None:
        self._frames, self._resolve = frames, resolve

    def __getitem__(self, name: str) -> dict:
        found = {kind: frame[name] for kind, frame in self._frames.items() if name in frame}
        if not found:
            have = sorted({column for frame in self._frames.values() for column in frame})
            raise KeyError(f"no column {name!r}; there are: {', '.join(have) or 'none'}")
        return found

    def __setitem__(self, name: str, value: dict) -> None:
        if not isinstance(value, Mapping):
            types = ", ".join(map(str, self._frames))
            raise TypeError(
                f"{name!r}: got {type(value).__name__}, expected a dict from type to tensor: "
                f"the graph has the types {types}"
            )
        for kind, tensor in value.items():
            self._frames[self._resolve(kind)][name] = tensor

    def __delitem__(self, name: str) -> None:
        holding = [frame for frame in self._frames.values() if name in frame]
        if not holding:
            raise KeyError(f"no column {name!r}")
        for frame in holding:
            del frame[name]

    def __iter__(self) -> Iterator[str]:
        return iter({column: None for frame in self._frames.values() for column in frame})

    def __len__(self) -> int:
        return len(list(iter(self)))
