"""Edge columns, which are read as lazy edge tensors."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from sar.errors import NotSupportedError
from sar.frontends.dgl.frame import Frame
from sar.kernels.jit import untraced
from sar.tracing.lazy import EdgeTensor, Scope, stored
from sar.tracing.nodes import Leaf


def refuse_compiled(what: str, *_: Any, **__: Any) -> NoReturn:
    """Raise in compiled code, where edge tensors would be made."""
    raise NotSupportedError(
        f"{what} in code that torch.compile compiles: it cannot hold edge tensors; expected "
        "@torch.compiler.disable on the forward of the layer that calls it (the rest of the model "
        "is compiled all the same)"
    )


def _column(columns: EdgeColumns, name: str) -> Tensor:
    column = columns._frame[name]
    if isinstance(column, EdgeTensor) or column.is_floating_point():
        refuse_compiled(f"graph.edata[{name!r}]")
    return column


class EdgeColumns(MutableMapping[str, Tensor]):
    """A frame whose floating point columns are read as edge tensors, so that what is computed from
    them is computed block by block, as what is computed from ``apply_edges``."""

    def __init__(self, frame: Frame, scope: Scope) -> None:
        self._frame, self._scope = frame, scope

    @partial(untraced, otherwise=_column)
    def __getitem__(self, name: str) -> Tensor:
        column = self._frame[name]
        if isinstance(column, EdgeTensor) or not column.is_floating_point():
            return column
        made = EdgeTensor(Leaf("e", column, name), column, self._scope)
        made.column = column
        return made

    def info(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """``(dtype, shape)`` of a column, which is not read for it."""
        return self._frame.info(name)

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._frame[name] = stored(value) if isinstance(value, Tensor) else value

    def __delitem__(self, name: str) -> None:
        del self._frame[name]

    def __contains__(self, name: object) -> bool:
        return name in self._frame

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)
