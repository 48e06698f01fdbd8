"""Splitmix64 (Steele, Lea and Flood, 2014): the hash of which keyed random numbers are made."""

from __future__ import annotations

from typing import Any

import numpy as np

STEP, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ONE, _TWO = np.uint64(MIX_1), np.uint64(MIX_2)


def mix(x: Any) -> Any:
    """The finalizer of unsigned 64-bit integers: each result bit depends on all of ``x``. Not
    compiled."""
    x = (x ^ (x >> np.uint64(30))) * _ONE
    x = (x ^ (x >> np.uint64(27))) * _TWO
    return x ^ (x >> np.uint64(31))
