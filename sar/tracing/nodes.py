"""The steps of edge programs: how an edge tensor is computed, recorded instead of stored.

Columns of sources, destinations and edges are at the leaves, torch operations and users' message
functions above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sar._private import tree_flatten, tree_unflatten, version_of
from sar.edges import AnyRelation
from sar.errors import NotSupportedError
from sar.ops.randomness import keyed_dropout
from sar.tracing.calls import name_of
from sar.tracing.message_dropout import Drawn, KeyedDropout

Values = dict[int, Any]
BLANK_ROWS = 2
DETACHES = (Tensor.detach, torch.detach)


@dataclass(eq=False)
class Node:
    """A step of a program; evaluated once per block.

    Attributes:
        row_bytes: of its value for one edge, where that is known.
        like: its value for ``BLANK_ROWS`` edges on the meta device, where that is known.
        inputs: the nodes that it depends on; the normalizer of a softmax follows from its scores.
        tensors: eager tensors that the value is made of, besides those of the inputs.
        versions: of these tensors, when this was recorded.
        asks: whether one of all these tensors wanted a gradient when this was recorded.
    """

    row_bytes: int = field(default=0, init=False)
    like: Tensor | None = field(default=None, init=False)

    def _reads(self, inputs: Sequence[Node], tensors: Sequence[Tensor]) -> None:
        """Note what the value is made of, and which state these tensors are in."""
        self.inputs, self.tensors = inputs, tensors
        self.versions, self.asks = [], False
        for tensor in tensors:
            self.versions.append(version_of(tensor))
            self.asks = self.asks or tensor.requires_grad
        for node in inputs:
            self.asks = self.asks or node.asks

    def parents(self) -> Sequence[Node]:
        """The nodes whose values this one needs."""
        return self.inputs

    def compute(self, values: Values, position: Tensor) -> Any:
        """The value on a block, of edges at ``position`` int32 [e], from parents' in ``values``."""
        raise NotImplementedError


@dataclass(eq=False)
class Leaf(Node):
    """Rows of an eager tensor; ``side`` is u (source), v (destination) or e (edge)."""

    side: str
    tensor: Tensor
    name: str = ""  # of the column, if it is one

    def __post_init__(self) -> None:
        self._reads((), (self.tensor,))
        shape = (BLANK_ROWS, *self.tensor.shape[1:])
        self.like = torch.empty(shape, dtype=self.tensor.dtype, device="meta")


@dataclass(eq=False)
class Call(Node):
    """A torch function, in programs called ``name``; arguments with a row per edge are nodes."""

    function: Callable
    args: tuple
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        self.name = name_of(self.function)
        self.leaves, self.spec = tree_flatten((self.args, self.kwargs))
        inputs, tensors = [], []
        for leaf in self.leaves:
            if isinstance(leaf, Node):
                inputs.append(leaf)
            elif isinstance(leaf, Tensor):
                tensors.append(leaf)
        self._reads(inputs, tensors)
        self.asks = self.asks and self.function not in DETACHES

    def compute(self, values: Values, position: Tensor) -> Any:
        def value(argument: Any) -> Any:
            if isinstance(argument, Node):
                return values[id(argument)]
            return len(position) if argument is EDGE_COUNT else argument

        args, kwargs = tree_unflatten([value(leaf) for leaf in self.leaves], self.spec)
        return self.function(*args, **kwargs)


def arguments_of(node: Any, name: str, *names: str) -> list[Any] | None:
    """The arguments of a call of the function ``name`` in the order of their ``names``, ``None``
    for one that was not given; ``None`` for other calls, and for one with other arguments."""
    if not isinstance(node, Call) or node.name != name or len(node.args) > len(names):
        return None
    if not node.kwargs.keys() <= set(names):
        return None
    given = {**dict.fromkeys(names), **dict(zip(names, node.args)), **node.kwargs}
    return list(given.values())


@dataclass(eq=False)
class Item(Node):
    """One of the results of a node that has several."""

    whole: Node
    key: Any

    def __post_init__(self) -> None:
        self._reads((self.whole,), ())

    def compute(self, values: Values, position: Tensor) -> Any:
        return values[id(self.whole)][self.key]


@dataclass(eq=False)
class Udf(Node):
    """A function of the user's over rows of columns; its results are :class:`Item`.

    Its dropouts on rows of edges have masks like those of :class:`Dropout`.

    Attributes:
        function: ([source rows, destination rows, edge rows], edges) -> rows by name.
        outputs: its results, without rows.
        captures, hidden: Note [Captured tensors].
        chosen: bool of each edge, where the function is called for some.
        before: by name what the others have; 0 where there is nothing.
    """

    function: Callable[..., Mapping[str, Tensor]]
    outputs: Mapping[str, Tensor]
    captures: Sequence[Tensor]
    hidden: Sequence[Tensor]
    src: list[Node]
    dst: list[Node]
    edge: list[Node]
    relation: AnyRelation
    dropouts: list[Drawn]
    chosen: Node | None = None
    before: Mapping[str, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        captures = [t for t in self.captures if t.requires_grad]  # not the buffers it updates
        some = [] if self.chosen is None else [self.chosen, *self.before.values()]
        self._reads([*self.src, *self.dst, *self.edge, *some], captures)
        self.asks = self.asks or len(self.hidden) > 0
        rows = [math.prod(t.shape[1:]) * t.element_size() for t in self.outputs.values()]
        self.row_bytes = max(rows, default=0)

    def compute(self, values: Values, position: Tensor) -> Any:
        sides = [[values[id(node)] for node in side] for side in (self.src, self.dst, self.edge)]
        if self.chosen is None:
            return self._called(sides, position)
        mine = values[id(self.chosen)].nonzero().view(-1)
        found = {name: values[id(node)] for name, node in self.before.items()}
        for name, like in self.outputs.items():
            if name not in found:
                found[name] = like.new_zeros(len(position), *like.shape[1:])
        if len(mine):
            some = [[rows.index_select(0, mine) for rows in side] for side in sides]
            called = self._called(some, position.index_select(0, mine))
            for name, rows in found.items():
                found[name] = rows.index_copy(0, mine, called[name])
        return found

    def _called(self, sides: list[list[Tensor]], position: Tensor) -> Mapping[str, Tensor]:
        keyed: Any = nullcontext()
        if self.dropouts:
            keyed = KeyedDropout(self.relation.keys.index_select(0, position), self.dropouts)
        with keyed:
            return self.function(sides, len(position))


@dataclass(eq=False)
class Dropout(Node):
    """Dropout whose mask is a function of a seed and the edge, the same in every evaluation.

    Element (edge, column) is kept where :func:`sar.kernels.keyed.keyed_uniform` of the edge's key
    in ``relation.keys`` is at least ``probability``; columns run over all dimensions but the first.
    """

    source: Node
    probability: float
    relation: AnyRelation
    seed: int

    def __post_init__(self) -> None:
        self._reads((self.source,), ())

    def compute(self, values: Values, position: Tensor) -> Any:
        keys = self.relation.keys.index_select(0, position)
        return keyed_dropout(values[id(self.source)], keys, self.seed, self.probability)


@dataclass(eq=False)
class Softmax(Node):
    """a_e = exp((z_e - m_i) - l_i), l_i = log sum over the edges e' into i of exp(z_e' - m_i).

    m_i is the largest z_e'. In m_i + l_i large scores would leave no digits for l_i.

    Attributes:
        scores: z.
        normalizer: computes the leaf of (m, l), one row [..., 2] per destination, at first need;
            collective. m is a constant to gradients: no weight depends on it.
        side: ``"v"``, or ``"u"`` where the edges out of a source are normalized.
        dtype: of the weights.
    """

    scores: Node
    normalizer: Callable[[], Leaf]
    side: str
    dtype: torch.dtype
    _norm: Leaf | None = None
    _with_grad: bool = False

    def __post_init__(self) -> None:
        self._reads((self.scores,), ())

    @property
    def norm(self) -> Leaf:
        """(m, l), made when a program reaches this, again once a gradient is wanted; collective."""
        if self._norm is None or torch.is_grad_enabled() > self._with_grad:
            self._with_grad = torch.is_grad_enabled()
            self._norm = self.normalizer()
        return self._norm

    def parents(self) -> Sequence[Node]:
        return (self.scores, self.norm)

    def compute(self, values: Values, position: Tensor) -> Any:
        largest, log_sum = values[id(self.norm)].unbind(-1)
        return (values[id(self.scores)] - largest - log_sum).exp().to(self.dtype)


class EdgesCounted(int):
    """A number of this rank's edges, or of numbers that they have, in sizes of tensors.

    A rank without edges takes the way that all others take: what compares with 0 is the number of
    edges on all ranks.
    """

    everywhere: int

    @classmethod
    def of(cls, relation: AnyRelation, each: int = 1) -> Any:
        """``each`` for every edge."""
        made = cls(relation.num_edges * each)
        made.everywhere = relation.num_edges_global * each
        return made

    def __eq__(self, other: object) -> bool:
        return self.everywhere == 0 if _is_zero(other) else int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __gt__(self, other: int) -> bool:
        return self.everywhere > 0 if _is_zero(other) else int.__gt__(self, other)

    def __bool__(self) -> bool:
        return self.everywhere > 0

    __hash__ = int.__hash__


class NumEdges(EdgesCounted):
    """The number of a rank's edges as a size, told apart from other numbers that are as large."""


class EdgesHere(int):
    """A number of edges of this rank alone. As 0 it equals the size of a tensor of no edges, which
    the literal 0 does not."""


def _is_zero(value: object) -> bool:
    return type(value) is int and value == 0


class _EdgeCount:
    """Stands for the number of edges where a function was given it as a literal."""


EDGE_COUNT = _EdgeCount()


def raise_if_written(outputs: list[Node]) -> None:
    """Raise ``NotSupportedError`` where what outputs are made of is not what it was.

    An edge tensor exists when it is used; values of before a write in place are gone by then.
    """
    stack, seen = list(outputs), set[int]()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        for tensor, version in zip(node.tensors, node.versions, strict=True):
            if version == version_of(tensor):
                continue
            name = node.name if isinstance(node, Leaf) else ""
            raise NotSupportedError(
                f"{f'column {name!r}' if name else 'a tensor or parameter'} was written in place "
                "after an edge tensor was made of it, whose values are computed when used; "
                "expected the write on a copy, or .materialize() of the edge tensor before it"
            )
        seen.add(id(node))
        stack.extend(node.inputs)
