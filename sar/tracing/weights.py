"""Which softmax a message is linear in, and which of its scores weighs each element.

A sum over edges whose messages are linear in one softmax needs no normalizer beforehand: see
:mod:`sar.ops.reducers`. Linearity is shown, not tried: the part of the program above the softmax
runs once on two rows of stand-ins for its weights, which only functions known to be linear take.
Whatever else they meet, the message does not count as linear.

Each weight of the two rows has a label: 1, 2, 3, ... A linear function is run on ones, on labels
and on squared labels, with ones for its other operands. This gives sums w, s and q over the weights
that an element of its result is made of. They all have the same label exactly where w q = s^2
(Cauchy-Schwarz), and s / w is the label.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sar._private import make_wrapper, tree_leaves, tree_map, without_overrides
from sar.ops import Weighting
from sar.ops.randomness import unchanged
from sar.tracing.calls import PRODUCTS, SHAPED, is_read, name_of
from sar.tracing.lazy import METADATA, EdgeTensor
from sar.tracing.memo import outline, remembered
from sar.tracing.message_dropout import DROPOUTS, arguments
from sar.tracing.nodes import BLANK_ROWS, Dropout, Node, Softmax, Udf

_OPTIONS = {"input", "other", "dim", "keepdim", "dim0", "dim1", "start_dim", "end_dim"}
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)


class NotLinear(Exception):
    """Weights met a function that is not known to be linear in them."""


def weighted_by(messages: EdgeTensor) -> tuple[Softmax, Weighting] | None:
    """A softmax by destination that ``messages`` are linear in; the same on all ranks.

    ``None`` where no softmax can be shown to weigh every element of a message by one of its scores.
    """
    key, nodes = outline(messages.read())
    key = None if key is None else ("weighted by", key, messages.axis)
    found = remembered(messages.scope.relation, key, lambda: _found(nodes, messages))
    return None if found is None else (nodes[found[0]], found[1])  # type: ignore[return-value]


def _found(nodes: list[Node], messages: EdgeTensor) -> tuple[int, Weighting] | None:
    """Where the softmax is among the nodes of a program, the last of which is its output."""
    for softmax in _outermost(nodes[-1]):
        if softmax.side == "v" and softmax.like is not None and messages.axis == 0:
            try:
                with torch.no_grad(), unchanged():
                    weighting = _weighting(nodes[-1], softmax, messages.device)
            except (NotLinear, *_FAILURES):  # user functions may not take stand-ins
                continue
            return next(i for i, node in enumerate(nodes) if node is softmax), weighting
    return None


def _weighting(output: Node, softmax: Softmax, device: torch.device) -> Weighting:
    like = softmax.like
    if like is None:
        raise NotLinear("scores of unknown shape")
    labels = torch.arange(1, like.numel() + 1, dtype=torch.float64).view(like.shape)
    weights = LinearInWeights(labels, softmax.dtype, device)
    result = StandInEvaluator(softmax, weights).value(output)
    if not isinstance(result, LinearInWeights):
        raise NotLinear("the message does not depend on it")
    scores = math.prod(like.shape[1:])
    first, second = (result.labels.long() - 1).view(BLANK_ROWS, -1)
    if not torch.equal(second, first + scores) or bool((first >= scores).any()):
        raise NotLinear("it mixes edges")
    return Weighting(scores, first.to(device))


class StandInEvaluator:
    """Evaluates what is above a softmax on stand-ins for its weights, and on blanks otherwise."""

    def __init__(self, softmax: Softmax, weights: LinearInWeights) -> None:
        self._device = weights.device
        self._values: dict[int, Any] = {id(softmax): weights}
        self._depends: dict[int, bool] = {id(softmax): True}

    def value(self, node: Node) -> Any:
        """Stand-ins where ``node`` depends on the softmax; else blank rows on the meta device."""
        if not self._is_above(node):
            if node.like is None:
                raise NotLinear("rows of unknown shape")
            return torch.empty_like(node.like)
        if id(node) not in self._values:
            self._values[id(node)] = self._computed(node)
        return self._values[id(node)]

    def _is_above(self, node: Node) -> bool:
        if id(node) not in self._depends:
            self._depends[id(node)] = any([self._is_above(parent) for parent in node.inputs])
        return self._depends[id(node)]

    def _computed(self, node: Node) -> Any:
        if isinstance(node, Softmax):
            raise NotLinear("softmax")
        if isinstance(node, Dropout):  # a mask that is a function of the edge
            return self.value(node.source)
        if isinstance(node, Udf):
            return self._called(node)
        values = {id(parent): self.value(parent) for parent in node.parents()}
        return node.compute(values, torch.arange(BLANK_ROWS, dtype=torch.int32))

    def _called(self, udf: Udf) -> Any:
        def rows(node: Node) -> Tensor:
            value = self.value(node)
            if isinstance(value, LinearInWeights):
                return value
            return torch.zeros(value.shape, dtype=value.dtype, device=self._device)

        if udf.chosen is not None:
            raise NotLinear("a function of some of the edges")
        sides = [[rows(node) for node in side] for side in (udf.src, udf.dst, udf.edge)]
        return udf.function(sides, BLANK_ROWS)


def _outermost(output: Node) -> Iterator[Softmax]:
    """The softmaxes below ``output`` that are reached without passing another."""
    todo, seen = [output], {id(output)}
    while todo:
        node = todo.pop()
        if isinstance(node, Softmax):
            yield node
            continue
        for parent in node.inputs:
            if id(parent) not in seen:
                seen.add(id(parent))
                todo.append(parent)


class LinearInWeights(Tensor):
    """A multiple of softmax weights, without values; ``labels``, float64: which weight of each."""

    labels: Tensor

    @staticmethod
    def __new__(cls, labels: Tensor, dtype: torch.dtype, device: torch.device) -> LinearInWeights:
        made = make_wrapper(cls, labels.shape, dtype=dtype, device=device)
        made.labels = labels
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        if func in METADATA or is_read(func):
            with without_overrides():
                return func(*args, **kwargs)
        if func in DROPOUTS and isinstance(arguments(*args, **kwargs)[0], LinearInWeights):
            return arguments(*args, **kwargs)[0]
        if not _is_linear(name, args, kwargs):
            raise NotLinear(str(func))
        like = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, LinearInWeights))
        made = _labels(func, args, kwargs)
        return tree_map(lambda labels: LinearInWeights(labels, like.dtype, like.device), made)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotLinear(str(func))  # what no torch function shows

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LinearInWeights(labels={self.labels})"


def _is_linear(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call is linear in what is followed among its arguments."""
    leaves = tree_leaves((args, kwargs))
    tensors = [a for a in leaves if isinstance(a, Tensor)]
    followed = [a for a in tensors if isinstance(a, LinearInWeights)]
    if set(kwargs) - _OPTIONS or any(isinstance(a, torch.dtype) for a in leaves):
        return False
    if name in SHAPED:  # all of them must be followed
        return len(followed) == len(tensors)
    if name == "add":  # both, and no number
        return len(followed) == len(leaves) == 2
    if name in PRODUCTS:
        return len(followed) == 1 and len(tensors) <= 2
    return name == "div" and len(followed) == 1 and args[0] is followed[0]


def _labels(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Labels of what a linear function returns; raises :class:`NotLinear` where they mix."""

    def run(power: int) -> Any:
        def number(value: Any) -> Any:
            if isinstance(value, LinearInWeights):
                return value.labels**power
            return torch.ones(value.shape).double() if isinstance(value, Tensor) else value

        with torch.autocast("cpu", enabled=False):
            return func(*tree_map(number, args), **tree_map(number, kwargs))

    def label(w: Tensor, s: Tensor, q: Tensor) -> Tensor:
        if not bool(((w * q - s * s).abs() < 1e-10 * s * s).all()):
            raise NotLinear("an element depends on several weights, or on none")
        return (s / w).round().contiguous()

    return tree_map(label, run(0), run(1), run(2))
