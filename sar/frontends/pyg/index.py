"""Tensors that stand for ids of nodes without having them: edge indices, their ends, and masks.

What PyG's layers do with an edge index ends in torch functions of these tensors and of rows. Each
of them that is known is in :mod:`sar.frontends.pyg.functions`; any other raises, as local ids that
got out would read the rows of other nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from sar._private import make_wrapper, without_overrides
from sar.errors import NotSupportedError
from sar.frontends.pyg.graph import EdgeGraph
from sar.graph import GraphArgument
from sar.tracing.nodes import NumEdges

Handler = Callable[..., Any]


class Symbol(Tensor):
    """A tensor by its looks, of which only known functions can be taken.

    Attributes:
        graph: the edges that it has a number for.
        hint: what is supported, for errors.
    """

    is_structure = True
    hint = (
        "there are no ids of the whole graph's nodes here; expected rows to be taken by it "
        "(x[edge_index[0]]) or summed by it (scatter)"
    )
    graph: EdgeGraph
    handlers: dict[Callable, Handler] = {}

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = cls.handlers.get(func)
        if handler is None:
            raise unknown(func, cls)
        try:
            return handler(*args, **(kwargs or {}))
        except TypeError as error:
            if _takes(handler, args, kwargs or {}):
                raise
            name, given = name_of(func), ", ".join(kwargs or ()) or f"{len(args)} arguments"
            raise NotSupportedError(f"{name} of a {cls.__name__} with {given}") from error

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise unknown(func, cls)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)})"


def unknown(func: Callable, kind: Any) -> NotSupportedError:
    """The error for a function that is not known of a kind of tensors."""
    name = name_of(func)
    return NotSupportedError(f"{name} of a {kind.__name__}: {_INSTEAD.get(name, kind.hint)}")


def name_of(func: Callable) -> str:
    """How users call a function, or the attribute that it reads or writes."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


_SAVE = "expected its state_dict() where a model is saved, and a graph that each rank makes itself"
_INSTEAD = {"__reduce_ex__": _SAVE, "__setstate__": _SAVE, "share_memory_": _SAVE}


def _takes(handler: Handler, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function has such parameters."""
    try:
        signature(handler).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


class ShardedEdgeIndex(Symbol, GraphArgument):
    """int64 [2, num_edges]: both ends of the edges that end in this rank's rows.

    Attributes:
        order: ``"uv"``, or ``"vu"`` where destinations come first.
        piece: the graph of the edges, whatever was added to their ends.
        shifts: numbers that were added to its two rows; ``None``: none were.
    """

    handlers: dict[Callable, Handler] = {}
    order: str
    piece: EdgeGraph
    shifts: tuple[int, int] | None

    @staticmethod
    def __new__(
        cls, graph: EdgeGraph, order: str = "uv", shifts: tuple[int, int] | None = None
    ) -> ShardedEdgeIndex:
        made = make_wrapper(cls, [2, graph.num_edges()], dtype=torch.int64, device=graph.device)
        made.piece, made.order, made.shifts = graph, order, shifts
        return made

    @property
    def graph(self) -> EdgeGraph:  # type: ignore[override]
        """The graph of the edges."""
        if self.shifts is not None:
            raise NotSupportedError(
                "an edge index to which numbers were added, used by itself; expected torch.cat of "
                "such indices along dimension 1"
            )
        return self.piece

    @property
    def sharded_graph(self) -> EdgeGraph:
        """The graph of the one relation."""
        return self.graph

    @property
    def is_turned(self) -> bool:
        """Whether destinations come first."""
        return self.order == "vu"

    def end(self, place: int) -> EdgeEnd:
        """The sources (0), or the destinations (1), in the order that this has."""
        return EdgeEnd(self.piece, self.order[place], whole=self)

    def looks(self) -> list[int]:
        return [2, NumEdges.of(self.piece.scope().relation)]


class EdgeEnd(Symbol):
    """int64 [num_edges] ends of edges, or ones broadcast along the other axes of a tensor.

    Attributes:
        side: ``"u"``: sources; ``"v"``: destinations.
        axis: the one that edges are along.
        whole: the edge index that it was taken from.
    """

    handlers: dict[Callable, Handler] = {}
    side: str
    axis: int
    whole: ShardedEdgeIndex | None

    @staticmethod
    def __new__(
        cls, graph: EdgeGraph, side: str, shape: Any = None, axis: int = 0,
        whole: ShardedEdgeIndex | None = None,
    ) -> EdgeEnd:  # fmt: skip
        sizes = [graph.num_edges()] if shape is None else list(map(int, shape))
        made = make_wrapper(cls, sizes, dtype=torch.int64, device=graph.device)
        made.graph, made.side, made.axis, made.whole = graph, side, axis, whole
        return made

    @property
    def num_rows(self) -> int:
        """Rows of this rank that an end may be."""
        relation = self.graph.scope().relation
        return relation.num_src if self.side == "u" else relation.num_dst

    def are_rows(self, count: Any) -> bool:
        """Whether a tensor of so many rows has one for each of ``num_rows``."""
        more = self.graph.may_have_more_rows and int(count) > self.num_rows
        return more or int(count) == self.num_rows

    def looks(self) -> list[int]:
        sizes: list[int] = list(self.size_of_wrapper())
        sizes[self.axis] = NumEdges.of(self.graph.scope().relation)
        return sizes

    def size_of_wrapper(self) -> torch.Size:
        with without_overrides():
            return self.shape


class EdgeMask(Symbol):
    """bool [num_edges], of which only this rank's are known: which edges to take.

    Attributes:
        chosen: bool [num_edges].
        kind: ``"loops"`` or ``"others"`` where it asks for edges from a node to itself, or for all
            but those, ``"all"`` for all on all ranks; else empty.
    """

    handlers: dict[Callable, Handler] = {}
    chosen: Tensor
    kind: str

    @staticmethod
    def __new__(cls, graph: EdgeGraph, chosen: Tensor, kind: str = "") -> EdgeMask:
        made = make_wrapper(cls, [len(chosen)], dtype=torch.bool, device=chosen.device)
        made.graph, made.chosen, made.kind = graph, chosen, kind
        return made

    def looks(self) -> list[int]:
        return [NumEdges.of(self.graph.scope().relation)]
