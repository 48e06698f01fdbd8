"""Errors that begin with the layer whose code asked for what a sharded graph does not have."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from sar.errors import NotSupportedError


def named(forward: Callable) -> Callable:
    """``forward`` of a layer whose ``NotSupportedError`` begins with the layer's class.

    Of layers inside one another the innermost is named. The error is of the same class and comes
    from the one that was raised.
    """

    @wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(self, *args, **kwargs)
        except NotSupportedError as error:
            if error.layer is not None:
                raise
            raise error.of_layer(type(self).__name__) from error

    return call
