"""The state of a lazy edge tensor: its program, what was written since, its values once computed.

Torch gives the results of a ``torch.autograd.Function`` a backward pass when one of its tensors
requires a gradient, and disables gradients while its forward pass runs. With an edge tensor among
them that pass would never do its work: its result is another edge tensor, whose gradient follows
from the program instead, or the gradient that it returns has nowhere to go. So an edge tensor tells
torch the truth, whether it requires a gradient. Then a result that is an edge tensor has a
``grad_fn``, which nothing else gives it: using it raises. And where the result was eager, backward
calls the hook of the edge tensor that went in, which raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sar._private import make_wrapper, tree_map, without_overrides
from sar.edges import AnyRelation
from sar.errors import NotSupportedError
from sar.graph.view import Scope
from sar.ops import run_messages
from sar.tracing.nodes import BLANK_ROWS, Call, Leaf, Node
from sar.tracing.program import Program


class EdgeRows(Tensor):
    """One row per local edge, computed block by block when it is reduced.

    What torch functions do with it is in :mod:`sar.tracing.lazy`. It requires a gradient where its
    program asks for one, as the module says.

    Attributes:
        axis: the dimension that the edges are along; only views lead to another than 0.
        base: the tensor that it is a view of.
        is_dense: whether its elements would lie one behind the other.
        column: the stored column that it is: what is written goes there.
        kind: its shape without edges, dtype and axis.
    """

    node: Node
    scope: Scope
    axis: int
    base: EdgeRows | None
    _writes: int
    _writes_of_base: int  # when this view of it was taken
    _is_stale: bool
    is_dense: bool
    column: Tensor | None
    kind: tuple[tuple[int, ...], torch.dtype, int]
    _eager: Tensor | None
    _with_grad: bool
    _recorded_with_grad: bool

    @staticmethod
    def __new__(
        cls, node: Node, like: Tensor, scope: Scope, axis: int = 0, base: EdgeRows | None = None
    ) -> EdgeRows:
        """``like``: its shape, but for the size of ``axis``, and dtype; ``base``: of a view."""
        shape, dtype = list(like.shape), like.dtype
        shape[axis] = scope.relation.num_edges
        with_grad = torch.is_grad_enabled()
        made = make_wrapper(cls, shape, dtype=dtype, device=scope.device)
        made.node, made.scope, made.axis = node, scope, axis
        row = (*shape[:axis], *shape[axis + 1 :])
        made.kind = row, dtype, axis
        node.row_bytes = max(node.row_bytes, math.prod(row) * dtype.itemsize)
        if node.like is None:
            shape[axis] = BLANK_ROWS
            node.like = torch.empty(shape, dtype=dtype, device="meta")
        made.base, made._writes, made._is_stale = base, 0, False
        made._writes_of_base = 0 if base is None else base._writes
        made.is_dense = like.is_contiguous() and (base is None or base.is_dense)
        made._eager, made._with_grad, made.column = None, False, None
        made._recorded_with_grad = with_grad
        if with_grad and node.asks and (dtype.is_floating_point or dtype.is_complex):
            made._ask(True)
        return made

    def _ask(self, asks: bool) -> None:
        """Let torch know whether a gradient of the values is wanted, see the module."""
        with without_overrides():
            if asks and not self.requires_grad:
                self.requires_grad_(True).register_hook(_refuse_gradient)
            elif not asks and self.requires_grad:
                self.requires_grad_(False)

    @property
    def num_edges(self) -> int:
        return self.scope.relation.num_edges

    def read(self) -> Node:
        """The program, detached where it was recorded without gradients."""
        self._refuse_unusable()
        given = torch.is_grad_enabled() and not self._recorded_with_grad
        if given and not (isinstance(self.node, Leaf) and self.node.side == "e"):
            constant = Call(Tensor.detach, (self.node,), {})
            constant.like = self.node.like
            return constant
        return self.node

    def rebind(self, node: Node, *, same_values: bool = False) -> None:
        """Make ``node`` the program, after a write in place or for the ``same_values``."""
        self._refuse_unusable()
        with_grad = torch.is_grad_enabled()
        if self._recorded_with_grad and not with_grad and self.node.asks:
            raise NotSupportedError(
                f"an edge tensor {tuple(self.shape)}: written in place where gradients are "
                "disabled, but its values have one; expected the write on its .detach()"
            )
        if not same_values and any(x.column is not None for x in self._bases()):
            raise NotSupportedError(
                f"an edge tensor {tuple(self.shape)}: a view of an edge column, written in place; "
                "expected the write on the column, or on a copy that is stored"
            )
        node.like = self.node.like
        self.node, self._eager = node, None
        self._recorded_with_grad = with_grad
        self._ask(with_grad and node.asks and (self.is_floating_point() or self.is_complex()))
        if same_values:
            return
        self._writes += 1
        for x in self._bases():
            x._is_stale = True

    def write(self, func: Callable, args: Any, kwargs: dict[str, Any]) -> EdgeRows:
        """Run ``func``, which writes, on the stored column that this, its first argument, is;
        collective if another argument has to be computed.

        What was recorded of its former values raises when it is run.
        """
        self._refuse_unusable()
        others, kwargs = tree_map(eager, (args[1:], kwargs))
        func(self.column, *others, **kwargs)
        old = self.node
        self.node = Leaf("e", self.column, getattr(old, "name", ""))  # type: ignore[arg-type]
        self.node.like, self.node.row_bytes = old.like, old.row_bytes
        self._writes += 1
        self._ask(self._recorded_with_grad and self.node.asks)
        return self

    def _bases(self) -> Iterator[EdgeRows]:
        base = self.base
        while base is not None:
            yield base
            base = base.base

    def _refuse_unusable(self) -> None:
        """Raise ``NotSupportedError`` where the program does not tell the values."""
        with without_overrides():
            function = self.grad_fn
        if function is not None:
            raise NotSupportedError(_of_function(function, tuple(self.shape)))
        is_stale = self._is_stale
        if self.base is not None:
            views = zip((self, *self._bases()), self._bases(), strict=False)
            is_stale |= any(x._writes_of_base != base._writes for x, base in views)
        if is_stale:
            raise NotSupportedError(
                f"an edge tensor {tuple(self.shape)}: a tensor that shares its values was written "
                "in place; expected the write on a copy, or a view that is taken after it"
            )

    def materialize(self) -> Tensor:
        """[num_edges, ...] eager values; collective unless stored, computed once."""
        self._refuse_unusable()
        if isinstance(self.node, Leaf) and self.node.side == "e":
            return self.node.tensor
        if self.axis != 0:
            return self.movedim(self.axis, 0).materialize().movedim(0, self.axis)  # type: ignore
        if self._eager is None or torch.is_grad_enabled() > self._with_grad:
            self._with_grad = torch.is_grad_enabled()
            program, scope = Program([self.read()]), self.scope
            (self._eager,) = run_messages(
                scope.relation, program.messages(), "edges", scope.policy, program.inputs(),
                [self.without_rows],
            )  # fmt: skip
        return self._eager

    @property
    def without_rows(self) -> Tensor:
        """[0, ...]: trailing shape, dtype and device."""
        shape = tuple(self.shape)
        row = (*shape[: self.axis], *shape[self.axis + 1 :])
        return torch.empty((0, *row), dtype=self.dtype, device=self.scope.device)

    @property
    def is_stored(self) -> bool:
        """Whether the values exist already."""
        return self._eager is not None or (isinstance(self.node, Leaf) and self.node.side == "e")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _of_function(function: Any, shape: tuple[int, ...]) -> str:
    name = type(function).__name__.removesuffix("Backward")
    return (
        f"{name}.apply: got an edge tensor {shape}, whose values exist block by block; expected to "
        "be called in a message function, as in update_all(lambda edges: "
        f"{{'m': {name}.apply(edges.src['h'])}}, ..), or with its .materialize()"
    )


def _refuse_gradient(gradient: Tensor) -> None:
    raise NotSupportedError(
        f"a torch.autograd.Function: got an edge tensor and gives {tuple(gradient.shape)} numbers "
        "as its gradient, whose values exist block by block; expected it to be called in a message "
        "function, or with the edge tensor's .materialize()"
    )


def eager(value: Any) -> Any:
    """The values of an edge tensor, collective; anything else as it is."""
    return value.materialize() if isinstance(value, EdgeRows) else value


def stored_values(values: Tensor, axis: int) -> Node:
    """A program for values whose edges are along ``axis``."""
    leaf = Leaf("e", values.movedim(axis, 0))
    return Call(Tensor.movedim, (leaf, 0, axis), {}) if axis else leaf


def node_of(tensor: Tensor, relation: AnyRelation, name: str = "") -> Node:
    """The program of an edge column of ``relation``, lazy or eager.

    A program over other edges, or over the same ones turned round, does not fit: it is computed.
    """
    if isinstance(tensor, EdgeRows) and tensor.scope.relation is relation and tensor.axis == 0:
        return tensor.read()
    return Leaf("e", eager(tensor), name)


def stored(tensor: Tensor) -> Tensor:
    """The stored values of a lazy tensor that has some; else the tensor."""
    return eager(tensor) if isinstance(tensor, EdgeRows) and tensor.is_stored else tensor
