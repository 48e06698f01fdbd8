"""Products of test parameters, covered by the rows that hold every pair of values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest


def pairs(row: tuple) -> set[tuple]:
    """Two of a row's values each, with their places."""
    return set(itertools.combinations(enumerate(row), 2))


def covering(rows: Iterable[tuple]) -> list[tuple]:
    """Few of ``rows`` that hold every pair of values which any of them holds."""
    shuffled = list(rows)
    missing = set().union(*map(pairs, shuffled))
    random.Random(0).shuffle(shuffled)
    chosen = []
    while missing:
        best = max(shuffled, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return sorted(chosen, key=str)


def by_pairs(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """``parametrize`` by the product of ``axes``; rows beyond a covering run with --full alone."""
    values = [list(axis) for axis in axes.values()]
    numbers = list(itertools.product(*[range(len(axis)) for axis in values]))
    kept = set(covering(numbers))
    rows = [
        pytest.param(
            *[axis[number] for axis, number in zip(values, row)],
            marks=() if row in kept else pytest.mark.slow,
        )
        for row in numbers
    ]
    return pytest.mark.parametrize(tuple(axes), rows)
