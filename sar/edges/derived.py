"""What is made of edges once, by whoever needs it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

DERIVED = "_derived"


class Derived:
    """An object that keeps what is made of it, as long as it lives; a copy of it must not."""

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, called once for ``key``."""
        kept: dict[Hashable, Any] = self.__dict__.setdefault(DERIVED, {})
        if key not in kept:
            kept[key] = make()
        return kept[key]
