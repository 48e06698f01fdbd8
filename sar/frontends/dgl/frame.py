"""Named tensors of nodes or edges, as DGL's frames: one row per local node or edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


class Frame(MutableMapping[str, Tensor]):
    """Columns of one node or edge type.

    Args:
        num_rows: rows that every column has.
        kind: what a row is, for errors: ``"node type 'paper'"``.
        defaults: columns computed on access, such as global ids; not listed by iteration.

    Attributes:
        pending: columns that are computed when they are first read, by name.
    """

    def __init__(
        self, num_rows: int, kind: str, defaults: Mapping[str, Callable[[], Tensor]]
    ) -> None:
        self.num_rows, self.kind, self.defaults = num_rows, kind, dict(defaults)
        self._columns: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}  # of the columns, and as far as they were counted
        self._written: dict[str, int] = {}
        self.pending: dict[str, Any] = {}
        self._without_grad: dict[str, tuple[Any, Tensor]] = {}  # pending columns, computed

    def __getitem__(self, name: str) -> Tensor:
        if name in self.pending:
            value = self._computed(name)
            if not torch.is_grad_enabled():
                return value  # and a later read may want gradients
            self[name] = value
        if name in self._columns:
            return self._columns[name]
        if name in self.defaults:
            return self.defaults[name]()
        have = ", ".join(sorted(self._columns)) or "none"
        raise KeyError(f"no column {name!r} for {self.kind}; there are: {have}")

    def _computed(self, name: str) -> Tensor:
        """[num_rows, ...] values of a pending column, once without gradients; collective."""
        column = self.pending[name]
        if torch.is_grad_enabled():
            return column.materialize()
        if name not in self._without_grad or self._without_grad[name][0] is not column:
            self._without_grad[name] = column, column.materialize()
        return self._without_grad[name][1]

    def like(self, name: str) -> Tensor:
        """A tensor of the column's dtype, device and shape but for rows; no communication.

        Raises ``KeyError`` when there is no such column.
        """
        return self.pending[name].like if name in self.pending else self[name]

    def values_of(self, name: str) -> Tensor:
        """The column, computed where it is the result of an edge program; collective then."""
        column: Any = self[name]
        return column.materialize() if hasattr(column, "materialize") else column

    def version(self, name: str) -> int:
        """Which of the tensors that the column has been it is now, counted alike on all ranks."""
        return self._versions.get(name, 0)

    def __setitem__(self, name: str, value: Tensor) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"{name!r}: got {type(value).__name__}, expected a tensor")
        shape = tuple(value.shape)
        if shape[:1] != (self.num_rows,):
            raise ValueError(
                f"{name!r}: got shape {shape}, expected {self.num_rows} rows, "
                f"one per local row of {self.kind}"
            )
        self.pending.pop(name, None)
        self._without_grad.pop(name, None)
        self._columns[name] = value
        self._versions[name] = self._written[name] = self._written.get(name, 0) + 1

    def __delitem__(self, name: str) -> None:
        self._without_grad.pop(name, None)
        if self.pending.pop(name, None) is None:
            del self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns or name in self.pending or name in self.defaults

    def __iter__(self) -> Iterator[str]:
        return iter([*self._columns, *self.pending])

    def __len__(self) -> int:
        return len(self._columns) + len(self.pending)

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, int]]:
        """What :meth:`restore` brings back."""
        return dict(self._columns), dict(self.pending), dict(self._versions)

    def restore(self, saved: tuple[dict[str, Tensor], dict[str, Any], dict[str, int]]) -> None:
        """Forget all changes since ``saved``."""
        self._columns, self.pending, self._versions = saved
        self._written = {**self._versions, **self._written}  # versions are not used again

    def to(self, device: torch.device) -> Frame:
        """A copy whose columns lie on ``device``, without the pending ones, which need a store."""
        moved = Frame(
            self.num_rows,
            self.kind,
            {name: _moved(make, device) for name, make in self.defaults.items()},
        )
        columns = {name: value.to(device) for name, value in self._columns.items()}
        moved.restore((columns, {}, dict(self._versions)))
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
        for frame in holding:  # not by reading it, which would compute what is pending
            del frame[name]

    def __iter__(self) -> Iterator[str]:
        return iter({column: None for frame in self._frames.values() for column in frame})

    def __len__(self) -> int:
        return len(list(iter(self)))
