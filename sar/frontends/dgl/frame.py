"""Named tensors of nodes or edges, as DGL's frames: one row per local node or edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


class Frame(MutableMapping[str, Tensor]):
    """Columns of one node or edge type.

    ``num_rows`` is that of every column, ``kind`` what a row is in errors: ``"node type 'paper'"``.
    ``defaults`` are columns that are computed on access, such as global ids, and not iterated.
    """

    def __init__(
        self, num_rows: int, kind: str, defaults: Mapping[str, Callable[[], Tensor]]
    ) -> None:
        self.num_rows, self.kind, self.defaults = num_rows, kind, dict(defaults)
        self._columns: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._columns:
            return self._columns[name]
        if name in self.defaults:
            return self.defaults[name]()
        have = ", ".join(sorted(self._columns)) or "none"
        raise KeyError(f"no column {name!r} for {self.kind}; there are: {have}")

    def values_of(self, name: str) -> Tensor:
        """The column, computed where it is the result of an edge program; collective then."""
        column: Any = self[name]
        return column.materialize() if hasattr(column, "materialize") else column

    def __setitem__(self, name: str, value: Tensor) -> None:
        if not isinstance(value, Tensor):
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

    def save(self) -> dict[str, Tensor]:
        return dict(self._columns)

    def restore(self, saved: dict[str, Tensor]) -> None:
        self._columns = saved

    def to(self, device: torch.device) -> Frame:
        moved = Frame(
            self.num_rows,
            self.kind,
            {name: _moved(make, device) for name, make in self.defaults.items()},
        )
        moved.restore({name: value.to(device) for name, value in self._columns.items()})
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
