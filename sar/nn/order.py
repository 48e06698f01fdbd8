"""The order in which backward computes: first what leads to the wire."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sar._private import can_be_renumbered, sequence_number, set_sequence_number
from sar.ops.aggregate import sends_gradients

_SHIFT = 40  # bits of a node's own number, which counts the operations of a thread
_OWN = (1 << _SHIFT) - 1


def wire_first(loss: Tensor) -> None:
    """Let the backward of ``loss`` take the paths to other ranks first; call it just before.

    Of the gradients that can be computed next, torch takes the one whose operation came last in
    forward. So a layer that aggregates first and multiplies its own rows last would finish the
    latter before anything is sent. Afterwards, torch takes the one with most sums over edges still
    ahead, and the others fill the time in which gradients of remote rows travel. Results differ
    only in the order in which gradients of one tensor are added, the same one on every rank. A
    torch whose nodes cannot be renumbered keeps its own order.
    """
    ahead: dict[Any, int] = {}
    stack: list[Any] = [loss.grad_fn] if can_be_renumbered(loss.grad_fn) else []
    while stack:  # depth first: a node is done when all that follow it are
        node = stack[-1]
        following = [after for after, _ in node.next_functions if after is not None]
        waiting = [after for after in following if after not in ahead]
        if waiting and node not in ahead:
            ahead[node] = -1
            stack.extend(waiting)
            continue
        stack.pop()
        most = max((ahead[after] for after in following), default=0)
        ahead[node] = most + sends_gradients(node)
        if ahead[node]:
            own = sequence_number(node) & _OWN
            set_sequence_number(node, own | ahead[node] << _SHIFT)
