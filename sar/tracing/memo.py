"""Outcomes that are remembered: what a call gives, what a program is, for the next time.

A layer records the same program in every epoch, of other tensors. What is found out about a call or
a program (shapes, where its edges are, whether it mixes them, how it depends on a softmax) is
remembered by the relation, and found again by a key that holds all that was looked at:

* functions as such, of torch's own or of this package, whose work nothing but arguments decides; a
  user's function may read anything, so a program with one has no key, nor has a call of one;
* literals by type and value; what is not a plain literal has no key;
* of tensors which of them are the same, shape, dtype, device and whether they require a gradient,
  never values: those are looked at for numbers that are no floating point, such as indices, so a
  call that is given such a tensor has no key;
* the state of torch that functions read: autocast, default dtype, gradients enabled;
* the relation, with its number of edges, as it holds the table.

Outcomes hold no tensor of the user: programs are made of the present ones and only the finding out
is left out. What has no key is found out again. A full table is emptied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from types import EllipsisType, NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from sar.edges import AnyRelation
from sar.tracing.calls import is_known
from sar.tracing.nodes import EDGE_COUNT, Call, Dropout, Item, Leaf, Node, NumEdges, Softmax

T = TypeVar("T")

MOST = 1024  # outcomes
_LITERALS = {
    int, float, bool, str, NoneType, EllipsisType, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, type(EDGE_COUNT),
}  # fmt: skip


def remembered(relation: AnyRelation, key: Hashable | None, find: Callable[[], T]) -> T:
    """What ``find`` gives, or gave for this key; it is called where there is no key."""
    if key is None:
        return find()
    table = _table(relation)
    if key not in table:
        keep(relation, key, find())
    return table[key]


def keep(relation: AnyRelation, key: Hashable, outcome: Any) -> None:
    table = _table(relation)
    if len(table) >= MOST:
        table.clear()
    table[key] = outcome


def recall(relation: AnyRelation, key: Hashable | None) -> Any:
    """The outcome that was kept for this key; ``None``: there is none."""
    return None if key is None else _table(relation).get(key)


def _table(relation: AnyRelation) -> dict[Hashable, Any]:
    return relation.derived("edge programs", dict[Hashable, Any])


def state_of_torch() -> tuple[Any, ...]:
    """The state of torch that functions read besides their arguments."""
    kind = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return (
        kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind),
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
    )  # fmt: skip


def literals(leaves: Iterable[Any], kind: type) -> tuple[Any, ...] | None:
    """The arguments of a call, but for tensors and for those of ``kind``, as a key; or ``None``."""
    key: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, (kind, Tensor)):
            key.append(None)
        elif type(leaf) in _LITERALS:
            key.append((type(leaf), leaf))
        elif isinstance(leaf, NumEdges):
            key.append(NumEdges)
        elif callable(leaf) and is_known(leaf):
            key.append(leaf)
        elif type(leaf) is slice:
            parts = literals((leaf.start, leaf.stop, leaf.step), kind)
            if parts is None or None in parts:
                return None
            key.append((slice, parts))
        else:
            return None
    return tuple(key)


def outline(output: Node) -> tuple[Hashable | None, list[Node]]:
    """A key for the program of a node, and its nodes, each once, in an order that equal keys share.

    The keys are equal for programs that differ in the values of tensors alone, seeds of dropout and
    normalizers; ``None`` where that cannot be known.
    """
    nodes: list[Node] = []
    places: dict[int, int] = {}
    stack = [(output, False)]
    while stack:
        node, ready = stack.pop()
        if id(node) in places:
            continue
        if ready:
            places[id(node)] = len(nodes)
            nodes.append(node)
        else:
            stack.append((node, True))
            for one in node.inputs:
                stack.append((one, False))
    tensors: dict[int, int] = {}
    key: list[Any] = [state_of_torch()]
    for node in nodes:
        work = _work(node)
        if work is None:
            return None, nodes
        key.append(work)
        for one in node.inputs:
            key.append(places[id(one)])
        for tensor in node.tensors:
            if id(tensor) not in tensors:
                tensors[id(tensor)] = len(tensors)
                key.append((type(tensor), tensor.shape, tensor.dtype, tensor.device))
            key.append((tensors[id(tensor)], tensor.requires_grad))
    return tuple(key), nodes


def _work(node: Node) -> tuple[Any, ...] | None:
    """What a node does with its inputs and tensors, for a key; ``None`` where that is not known."""
    like = None if node.like is None else (node.like.shape, node.like.dtype)
    if isinstance(node, Leaf):
        return (Leaf, node.side) if type(node.tensor) in (Tensor, Parameter) else None
    if isinstance(node, Dropout):
        return Dropout, node.probability, like
    if isinstance(node, Softmax):
        return Softmax, node.side, node.dtype, like
    if isinstance(node, Item):
        return (Item, node.key, like) if type(node.key) is int else None
    if not isinstance(node, Call) or not is_known(node.function):
        return None
    arguments = literals(node.leaves, Node)
    return None if arguments is None else (Call, node.function, node.spec, arguments, like)
