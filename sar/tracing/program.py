"""Edge programs: the nodes that some edge tensors need, in an order to evaluate them in.

They are evaluated on the rows of one block of edges, so that an edge tensor exists for one block at
a time; :mod:`sar.ops.messages` streams the rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sar.ops import Inputs, Messages, Weighting
from sar.tracing.calls import ARITHMETIC, SHAPED
from sar.tracing.capture import TORCH_CAPTURES
from sar.tracing.nodes import (
    DETACHES,
    Call,
    Dropout,
    Leaf,
    Node,
    Softmax,
    Udf,
    Values,
    arguments_of,
    raise_if_written,
)


class Program:
    """The nodes that some outputs need, in an order in which they can be evaluated.

    ``streamed``: a softmax without normalizer, whose weights come from the caller that sees scores.
    """

    def __init__(self, outputs: list[Node], streamed: Softmax | None = None) -> None:
        raise_if_written(outputs)
        self.streamed = streamed
        self.outputs, self.order = outputs, _topological(outputs, streamed)
        leaves = [node for node in self.order if isinstance(node, Leaf)]
        self.leaves = {side: _distinct(leaves, side) for side in "uve"}

    def inputs(self) -> Inputs:
        """The tensors to stream, by side."""
        src, dst, edge = ([leaf.tensor for leaf in self.leaves[side]] for side in "uve")
        return Inputs(src, dst, edge)

    def messages(self, weighting: Weighting | None = None) -> Messages:
        """The message function that runs the program; ``weighting``: by the streamed softmax."""
        udfs = [node for node in self.order if isinstance(node, Udf)]
        captures = {id(t): t for udf in udfs for t in udf.captures}
        hidden = {id(t): t for udf in udfs for t in udf.hidden}
        return Messages(
            self._evaluate,
            is_udf=not all(_is_plain(node) for node in self.order),
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
                found.update((id(t), t) for t in node.tensors if t.requires_grad)
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
        parents = [id(parent) for parent in node.inputs]
        of_src = isinstance(node, (Leaf, Softmax)) and node.side == "u"
        reads = of_src or not reading.isdisjoint(parents)
        asks = isinstance(node, Udf) or not asking.isdisjoint(parents)  # a function may capture
        asks = asks or any(t.requires_grad for t in node.tensors)
        asks = asks and getattr(node, "function", None) not in DETACHES
        if reads:
            reading.add(id(node))
        if asks:
            asking.add(id(node))
        fixed = isinstance(node, (Udf, Softmax))  # ask for more than their parents show
        if reads and (asks or fixed) and not _is_linear(node, reading, asking):
            return False
    return True


def _is_linear(node: Node, reading: set[int], asking: set[int]) -> bool:
    """Whether the gradients that ``node`` passes on depend on none of the values in ``reading``."""
    if not isinstance(node, Call):
        return isinstance(node, (Leaf, Dropout))
    if node.name in (*SHAPED, "add", "sub") and node.name != "index":
        return True
    if node.name == "where":
        return id(node.args[0]) not in reading
    given = node.name in ("mul", "div") and arguments_of(node, node.name, "input", "other")
    if not given:
        return False
    lhs, rhs = given
    asks = [id(one) in asking or getattr(one, "requires_grad", False) for one in (lhs, rhs)]
    reads = [id(one) in reading for one in (lhs, rhs)]
    if node.name == "div" and asks[1]:
        return False
    return not (asks[0] and reads[1]) and not (asks[1] and reads[0])


def _is_plain(node: Node) -> bool:
    """Whether a node needs no random numbers, nor torch's modes, and no other tensors."""
    is_sum = isinstance(node, Call) and node.name in ARITHMETIC and not node.tensors
    return is_sum or isinstance(node, Leaf)


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
            parents = node.inputs if node is streamed else node.parents()
            stack.extend((parent, False) for parent in parents)
    return order


def _distinct(leaves: list[Leaf], side: str) -> list[Leaf]:
    return list({id(leaf.tensor): leaf for leaf in leaves if leaf.side == side}.values())
