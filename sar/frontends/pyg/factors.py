"""Messages that are rows of sources times numbers of their edges and of both ends.

Their sum needs no edge program: a row is multiplied by its source's numbers before it travels, and
a sum by the numbers of its destination.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from sar.tracing.nodes import DETACHES, Call, Leaf, Node, arguments_of


def scaled_rows(node: Node) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """(rows of sources, numbers [num_edges], numbers [num_dst]) whose product messages are, but for
    their shape; ``None`` for other messages."""
    like, leaves, moves = node.like, list[Leaf](), list[tuple]()
    if like is None or not like.is_floating_point() or not _is_product(node, leaves, moves):
        return None
    u, v, e = ([leaf for leaf in leaves if leaf.side == side] for side in "uve")
    wide = [leaf for leaf in leaves if not _is_number(leaf.tensor)]
    if not u or any(leaf.side != "u" for leaf in wide) or len(leaves) == 1:
        return None
    rows, *others = wide or u[-1:]
    fits = math.prod(rows.tensor.shape[1:]) == math.prod(like.shape[1:])
    fits = fits and all(leaf.tensor.shape == rows.tensor.shape for leaf in others)
    if not fits or any(leaf.tensor.dtype != like.dtype for leaf in leaves):
        return None
    if moves and (len(moves) != 2 or moves[0] != moves[1][::-1] or others):
        return None
    x = rows.tensor
    for leaf in others:
        x = x * leaf.tensor
    x = times(x, _product([leaf for leaf in u if leaf not in (rows, *others)]))
    return x, _product(e), _product(v)


def times(rows: Any, numbers: Any) -> Any:
    """[n, ...] rows, each times its number of [n], if there are any."""
    return rows if numbers is None else rows * numbers.view(-1, *[1] * (rows.dim() - 1))


def _is_product(node: Node, leaves: list[Leaf], moves: list[tuple]) -> bool:
    """Collect the factors of a node, and how its axes are moved, outermost first."""
    if isinstance(node, Leaf):
        leaves.append(node)
        return True
    if not isinstance(node, Call) or not node.inputs:
        return False
    if node.function in DETACHES and not node.inputs[0].asks:  # recorded without gradients
        return _is_product(node.inputs[0], leaves, moves)
    if node.name == "movedim" and len(node.args) == 3 and not node.kwargs:
        moves.append(node.args[1:])
        return _is_product(node.inputs[0], leaves, moves)
    if node.name in ("unsqueeze", "view", "reshape"):  # numbers have any shape that has one
        one = node.inputs[0]
        return _is_number(node.like) and _is_number(one.like) and _is_product(one, leaves, moves)
    given = arguments_of(node, "mul", "input", "other")
    if given is None or not all(isinstance(one, Node) for one in given):
        return False
    return all([_is_product(one, leaves, moves) for one in given])


def _is_number(rows: Tensor | None) -> bool:
    return rows is not None and rows.dim() > 0 and math.prod(rows.shape[1:]) == 1


def _product(leaves: list[Leaf]) -> Tensor | None:
    """[n] products of numbers; ``None`` of no leaves."""
    found = None
    for leaf in leaves:
        flat = leaf.tensor.reshape(-1)
        found = flat if found is None else found * flat
    return found
