"""What ``torch.autograd.Function`` cannot do with edge tensors, and how that is noticed."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_leaves

from sar.tracing.program import Node
from sar.tracing.support import not_supported

if TYPE_CHECKING:
    from sar.tracing.lazy import EdgeTensor

_APPLY = getattr(getattr(Function.apply, "__func__", None), "__code__", None)


def refuse_function(x: EdgeTensor, *, with_grad: bool) -> None:
    """Raise ``NotSupportedError`` where ``x`` is an argument of the ``torch.autograd.Function``
    whose forward pass is running, and it or another argument has a gradient.

    Its steps could be recorded, but torch would never call its backward pass: that takes the
    gradient of values, and these do not exist yet.

    Args:
        with_grad: ``x`` was recorded where gradients were enabled.
    """
    frame: FrameType | None = sys._getframe()
    forward = frame
    while frame is not None and frame.f_code is not _APPLY:
        forward, frame = frame, frame.f_back
    if frame is None or not any(one is x for one in tree_leaves(frame.f_locals["args"])):
        return
    if (with_grad and asks_for_gradients(x.node)) or _leads_back(forward, frame.f_locals["args"]):
        name = frame.f_locals["cls"].__name__
        raise not_supported(
            f"{name}.apply: got an edge tensor {tuple(x.shape)}, whose values exist block by "
            "block; expected to be called in a message function, as in update_all(lambda edges: "
            f"{{'m': {name}.apply(edges.src['h'])}}, ..), or with its .materialize()"
        )


def _leads_back(forward: FrameType | None, args: tuple) -> bool:
    """Whether torch notes a backward pass for the arguments of a running ``Function``.

    Its context tells; a forward pass that is called without one may be noted.
    """
    wanted = any(isinstance(one, Tensor) and one.requires_grad for one in args)  # not inside lists
    if not wanted or forward is None:
        return False
    names = forward.f_code.co_varnames
    context = forward.f_locals.get(names[0]) if names else None
    return bool(getattr(context, "next_functions", True))


def asks_for_gradients(node: Node) -> bool:
    """Whether a tensor that a program reads wants a gradient."""
    todo, seen = [node], {id(node)}
    while todo:
        node = todo.pop()
        if any(tensor.requires_grad for tensor in node.reads()):
            return True
        new = [parent for parent in node.parents() if id(parent) not in seen]
        seen.update(id(parent) for parent in new)
        todo += new
    return False
