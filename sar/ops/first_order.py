"""Backward passes whose gradients cannot be differentiated again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from sar.errors import NotSupportedError


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``backward`` of a function that streams: gradients of gradients raise at once.

    Torch's ``once_differentiable`` raises when the second backward pass comes by, but
    ``torch.autograd.grad`` with named inputs never goes there: what is missing would be left out
    of the result without a word.

    Raises:
        NotSupportedError: in a backward pass with ``create_graph=True``.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotSupportedError(
                "create_graph: got True, expected False: gradients that streamed over the edges of "
                "a sharded graph cannot be differentiated again"
            )
        return backward(ctx, *grads)

    return checked
