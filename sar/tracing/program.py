"""Edge programs: how an edge tensor is computed, recorded instead of stored.

A program is a graph of nodes: columns of sources, destinations and edges at the leaves, torch
operations and users' message functions above. It is evaluated on the rows of one block of edges,
so that an edge tensor exists for one block at a time; :mod:`sar.ops.messages` streams the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from sar.edges import AnyRelation
from sar.ops import Inputs, Messages, Weighting
from sar.ops.keyed import keyed_dropout
from sar.tracing.binary import apply_binary
from sar.tracing.capture import TORCH_CAPTURES
from sar.tracing.message_dropout import Drawn, KeyedDropout
from sar.tracing.support import not_supported
from sar.tracing.udf import Probe, call_udf

Values = dict[int, Any]
BLANK_ROWS = 2


@dataclass(eq=False)
class Node:
    """A step of a program; evaluated once per block.

    Attributes:
        row_bytes: of its value for one edge, where that is known.
        like: its value for ``BLANK_ROWS`` edges on the meta device, where that is known.
    """

    row_bytes: int = field(default=0, init=False)
    like: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._versions = [_version(tensor) for tensor in self.reads()]

    def parents(self) -> Iterable[Node]:
        """The nodes whose values this one needs."""
        return ()

    def reads(self) -> list[Tensor]:
        """Eager tensors that the value is made of, besides that of the parents."""
        return []

    @property
    def is_written(self) -> bool:
        """Whether one of them was written in place since this was recorded."""
        return self._versions != [_version(tensor) for tensor in self.reads()]

    def compute(self, values: Values, position: Tensor) -> Any:
        """The value on a block, from the parents' in ``values`` (by ``id``).

        Args:
            position: int32 [e] positions of the block's edges among the local ones.
        """
        raise NotImplementedError


@dataclass(eq=False)
class Leaf(Node):
    """Rows of an eager tensor; ``side`` is u (source), v (destination) or e (edge)."""

    side: str
    tensor: Tensor
    name: str = ""  # of the column, if it is one

    def reads(self) -> list[Tensor]:
        return [self.tensor]


@dataclass(eq=False)
class Call(Node):
    """A torch function; tensors of all edges among its arguments are nodes."""

    function: Callable
    args: tuple
    kwargs: dict[str, Any]

    def parents(self) -> Iterable[Node]:
        return [a for a in tree_leaves((self.args, self.kwargs)) if isinstance(a, Node)]

    def reads(self) -> list[Tensor]:
        return [a for a in tree_leaves((self.args, self.kwargs)) if isinstance(a, Tensor)]

    def compute(self, values: Values, position: Tensor) -> Any:
        def value(argument: Any) -> Any:
            if isinstance(argument, Node):
                return values[id(argument)]
            return len(position) if argument is EDGE_COUNT else argument

        args, kwargs = tree_map(value, (self.args, self.kwargs))
        return self.function(*args, **kwargs)


@dataclass(eq=False)
class Item(Node):
    """One of the results of a node that has several."""

    whole: Node
    key: Any

    def parents(self) -> Iterable[Node]:
        return [self.whole]

    def compute(self, values: Values, position: Tensor) -> Any:
        return values[id(self.whole)][self.key]


@dataclass(eq=False)
class Udf(Node):
    """A user's message function over named columns; its results are :class:`Item`.

    Its dropouts on rows of edges have masks like those of :class:`Dropout`.
    """

    function: Callable
    seen: Probe
    src: list[Node]
    dst: list[Node]
    edge: list[Node]
    relation: AnyRelation
    dropouts: list[Drawn]

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = [math.prod(t.shape[1:]) * t.element_size() for t in self.seen.outputs.values()]
        self.row_bytes = max(rows, default=0)

    def parents(self) -> Iterable[Node]:
        return [*self.src, *self.dst, *self.edge]

    def reads(self) -> list[Tensor]:
        return [t for t in self.seen.captures if t.requires_grad]  # not the buffers it updates

    def compute(self, values: Values, position: Tensor) -> Any:
        sides = [[values[id(node)] for node in side] for side in (self.src, self.dst, self.edge)]
        if not self.dropouts:
            return call_udf(self.function, self.seen, sides[0], sides[1], sides[2], len(position))
        with KeyedDropout(self.relation.keys.index_select(0, position), self.dropouts):
            return call_udf(self.function, self.seen, sides[0], sides[1], sides[2], len(position))


@dataclass(eq=False)
class Dropout(Node):
    """Dropout whose mask is a function of a seed and the edge, the same in every evaluation.

    Element (edge, column) is kept where :func:`sar.ops.keyed.keyed_uniform` of the edge's key in
    ``relation.keys`` is at least ``probability``; columns run over all dimensions but the first.
    """

    source: Node
    probability: float
    relation: AnyRelation
    seed: int

    def parents(self) -> Iterable[Node]:
        return [self.source]

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

    @property
    def norm(self) -> Leaf:
        """Computed when a program that is evaluated reaches this node; collective.

        Again where a gradient is wanted of what was computed without one.
        """
        if self._norm is None or torch.is_grad_enabled() > self._with_grad:
            self._with_grad = torch.is_grad_enabled()
            self._norm = self.normalizer()
        return self._norm

    def parents(self) -> Iterable[Node]:
        return [self.scores, self.norm]

    def compute(self, values: Values, position: Tensor) -> Any:
        largest, log_sum = values[id(self.norm)].unbind(-1)
        return (values[id(self.scores)] - largest - log_sum).exp().to(self.dtype)


class _EdgeCount:
    """Stands for the number of edges where a function was given it as a literal."""

    def __repr__(self) -> str:
        return "EDGE_COUNT"


EDGE_COUNT = _EdgeCount()


class Program:
    """The nodes that some outputs need, in an order in which they can be evaluated.

    Args:
        streamed: a softmax whose weights are given by whoever runs the program, who sees the
            scores; it needs no normalizer.
    """

    def __init__(self, outputs: list[Node], streamed: Softmax | None = None) -> None:
        refuse_written(outputs)
        self.streamed = streamed
        self.outputs, self.order = outputs, _topological(outputs, streamed)
        leaves = [node for node in self.order if isinstance(node, Leaf)]
        self.leaves = {side: _distinct(leaves, side) for side in "uve"}

    def inputs(self) -> Inputs:
        """The tensors to stream, by side."""
        src, dst, edge = ([leaf.tensor for leaf in self.leaves[side]] for side in "uve")
        return Inputs(src, dst, edge)

    def messages(self, weighting: Weighting | None = None) -> Messages:
        """The message function that evaluates the program on a block.

        Args:
            weighting: how the messages depend on the weights of the streamed softmax.
        """
        udfs = [node for node in self.order if isinstance(node, Udf)]
        captures = {id(t): t for udf in udfs for t in udf.seen.captures}
        hidden = {id(t): t for udf in udfs for t in udf.seen.hidden}
        return Messages(
            self._evaluate,
            is_udf=True,
            ordered=bool(udfs),
            linear_in_src=_linear_in_src(self.order),
            sort_by=self._type_column(udfs),
            capturing=TORCH_CAPTURES,
            captures=tuple({**captures, **self._captured()}.values()),
            hidden=tuple(hidden.values()),
            widest=max((node.row_bytes for node in self.order), default=0),
            names={
                id(leaf.tensor): f"column {leaf.name!r}"
                for leaves in self.leaves.values()
                for leaf in leaves
                if leaf.name
            },
            weighting=weighting,
        )

    def _captured(self) -> dict[int, Tensor]:
        """Tensors with gradient among the arguments of calls."""
        found: dict[int, Tensor] = {}
        for node in self.order:
            if isinstance(node, Call):
                for argument in tree_leaves((node.args, node.kwargs)):
                    if isinstance(argument, Tensor) and argument.requires_grad:
                        found[id(argument)] = argument
        return found

    def _type_column(self, udfs: list[Udf]) -> int | None:
        """The integer edge column that typed layers want sorted, among the edge inputs."""
        read = {id(node) for udf in udfs for node in udf.edge}
        for index, leaf in enumerate(self.leaves["e"]):
            kind = leaf.tensor.dtype
            integer = not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
            if id(leaf) in read and integer and leaf.tensor.dim() == 1:
                return index
        return None

    def _evaluate(
        self,
        src: list[Tensor],
        dst: list[Tensor],
        edge: list[Tensor],
        position: Tensor,
        weigh: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Tensor]:
        sides = dict(zip("uve", (src, dst, edge), strict=True))
        values: Values = {}
        by_tensor: dict[tuple[str, int], Tensor] = {}
        for side, rows in sides.items():
            for leaf, block in zip(self.leaves[side], rows, strict=True):
                by_tensor[side, id(leaf.tensor)] = block
        for node in self.order:
            if isinstance(node, Leaf):
                values[id(node)] = by_tensor[node.side, id(node.tensor)]
            elif isinstance(node, Softmax) and node is self.streamed and weigh is not None:
                values[id(node)] = weigh(values[id(node.scores)]).to(node.dtype)
            else:
                values[id(node)] = node.compute(values, position)
        return [values[id(node)] for node in self.outputs]


def _linear_in_src(order: list[Node]) -> bool:
    """True when no gradient that is asked for depends on the values of source rows."""
    reading: set[int] = set()  # nodes whose values follow from source rows
    asking: set[int] = set()  # nodes that pass gradients on
    for node in order:
        tensors: list[Any] = [node.tensor] if isinstance(node, Leaf) else []
        if isinstance(node, Call):
            tensors = tree_leaves((node.args, node.kwargs))
        parents = [id(parent) for parent in inputs_of(node)]
        of_src = isinstance(node, (Leaf, Softmax)) and node.side == "u"
        reads = of_src or not reading.isdisjoint(parents)
        asks = isinstance(node, Udf) or not asking.isdisjoint(parents)  # a function may capture
        asks = asks or any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
        asks = asks and getattr(node, "function", None) not in (Tensor.detach, torch.detach)
        if reads:
            reading.add(id(node))
        if asks:
            asking.add(id(node))
        fixed = isinstance(node, (Udf, Softmax))  # ask for more than their parents show
        if reads and (asks or fixed) and not _is_linear(node, reading, asking):
            return False
    return True


def inputs_of(node: Node) -> list[Node]:
    """What a node depends on; the normalizer of a softmax, not computed for this, on its scores."""
    return [node.scores] if isinstance(node, Softmax) else list(node.parents())


def _is_linear(node: Node, reading: set[int], asking: set[int]) -> bool:
    """Whether the gradients that ``node`` passes on depend on none of the values in ``reading``."""
    if not isinstance(node, Call) or node.function is not apply_binary:
        return isinstance(node, (Leaf, Dropout))
    op, lhs, rhs = node.args
    if rhs is None or op in ("copy", "add", "sub"):
        return True
    if op == "div" and id(rhs) in asking:
        return False
    return not any(id(a) in asking and id(b) in reading for a, b in ((lhs, rhs), (rhs, lhs)))


def refuse_written(outputs: list[Node]) -> None:
    """Raise ``NotSupportedError`` where what outputs are made of is not what it was.

    An edge tensor exists when it is used; values of before a write in place are gone by then.
    """
    stack, seen = list(outputs), set[int]()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        if node.is_written:
            name = getattr(node, "name", "")
            raise not_supported(
                f"{f'column {name!r}' if name else 'a tensor or parameter'} was written in place "
                "after an edge tensor was made of it, whose values are computed when used; "
                "expected the write on a copy, or .materialize() of the edge tensor before it"
            )
        seen.add(id(node))
        stack.extend(inputs_of(node))


def _version(tensor: Tensor) -> int:
    """Writes so far; those of inference tensors are not counted."""
    return -1 if tensor.is_inference() else tensor._version


def _topological(outputs: list[Node], streamed: Softmax | None) -> list[Node]:
    order: list[Node] = []
    done: set[int] = set()
    stack = [(node, False) for node in reversed(outputs)]
    while stack:
        node, ready = stack.pop()
        if id(node) in done:
            continue
        if ready:
            done.add(id(node))
            order.append(node)
        else:
            stack.append((node, True))
            parents = inputs_of(node) if node is streamed else node.parents()
            stack.extend((parent, False) for parent in parents)
    return order


def _distinct(leaves: list[Leaf], side: str) -> list[Leaf]:
    """One leaf per tensor."""
    return list({id(leaf.tensor): leaf for leaf in leaves if leaf.side == side}.values())
