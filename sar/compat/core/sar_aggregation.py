"""The decorator with which old message functions declare their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

Message = TypeVar("Message", bound=Callable[..., Any])


def message_has_parameters(
    param_foo: Callable[[Any], tuple[Tensor, ...]],
) -> Callable[[Message], Message]:
    """Leave a message function as it is: the parameters it uses are found when it runs.

    ``param_foo``, which names them for the original library, is never called.
    """
    if not callable(param_foo):
        raise TypeError(f"param_foo: got {type(param_foo).__name__}, expected a function")

    def unchanged(message: Message) -> Message:
        return message

    return unchanged
