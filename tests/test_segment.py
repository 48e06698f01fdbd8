"""Extremes over edges: the same winner in any order, split, type and number of threads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sar.kernels import ExtremeReducer, add_to_winners, compress, winners_only

NUMBERS = [0.0, -0.0, 1.0, 1.0, -2.0, 3.5, math.inf, -math.inf, math.nan]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def expected(
    row: list[int], position: list[int], values: Tensor, num_rows: int, largest: bool
) -> tuple[Tensor, Tensor]:
    """Edge by edge: NaN before all numbers, then the extreme, then the smallest position."""
    value = values.new_zeros((num_rows, values.shape[1]))
    winner = torch.full(value.shape, ExtremeReducer.NO_EDGE, dtype=torch.int32)
    for i in range(num_rows):
        for d in range(values.shape[1]):
            edges = [e for e in range(len(row)) if row[e] == i]
            if edges:

                def rank(e: int, d: int = d) -> tuple[bool, float, int]:
                    number = float(values[e, d])
                    size = 0.0 if math.isnan(number) else number
                    return not math.isnan(number), -size if largest else size, position[e]

                best = min(edges, key=rank)
                value[i, d], winner[i, d] = values[best, d], position[best]
    return value, winner


def reduced(
    row: Tensor, position: Tensor, values: Tensor, num_rows: int, largest: bool, cuts: list[int]
) -> ExtremeReducer:
    reducer = ExtremeReducer(largest, num_rows, values)
    for low, high in zip([0, *cuts], [*cuts, len(row)], strict=True):
        reducer.add(row[low:high], position[low:high], values[low:high])
    return reducer


@st.composite
def edges(draw: st.DrawFn) -> tuple[list[int], list[int], Tensor, list[int]]:
    num, width = draw(st.integers(0, 12)), draw(st.integers(1, 3))
    row = draw(st.lists(st.integers(0, 3), min_size=num, max_size=num))
    position = draw(st.permutations(range(num)))
    numbers = st.lists(st.sampled_from(NUMBERS), min_size=num * width, max_size=num * width)
    values = torch.tensor(draw(numbers), dtype=torch.float64).view(num, width)
    cuts = sorted(draw(st.lists(st.integers(0, num), max_size=3)))
    return row, list(position), values, cuts


@given(edges(), st.sampled_from(DTYPES), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_kind_of_number(
    given: tuple[list[int], list[int], Tensor, list[int]], dtype: torch.dtype, largest: bool
) -> None:
    row, position, values, cuts = given
    values = values.to(dtype)
    ends = [torch.tensor(one, dtype=torch.int32) for one in (row, position)]
    reducer = reduced(*ends, values, 4, largest, cuts)
    value, winner = expected(row, position, values, 4, largest)
    assert torch.equal(reducer.edge, winner)
    torch.testing.assert_close(reducer.result(), value, rtol=0, atol=0, equal_nan=True)
    grad = torch.arange(1.0, 1 + value.numel()).view_as(value).to(dtype)
    won = winners_only(winner, grad, *ends)
    mine = torch.tensor(position).view(-1, 1) == winner[torch.tensor(row, dtype=torch.long)]
    assert torch.equal(won, grad[torch.tensor(row, dtype=torch.long)] * mine)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("width", [1, 5, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_of_a_shard_are_those_of_its_edges(
    dtype: torch.dtype, width: int, compact: bool, threads: int
) -> None:
    """Rows with many edges, with one and with none; ties, as numbers are few."""
    generator = torch.Generator().manual_seed(width)
    num = 5000
    x = torch.randint(-3, 4, (50, width), generator=generator).to(dtype)
    x[7] = math.nan
    src = torch.randint(50, (num,), generator=generator, dtype=torch.int32)
    dst = (torch.rand(num, generator=generator) ** 3 * 60).int()
    ends = dst, torch.arange(num, dtype=torch.int32)
    csc = compress(dst, src, 61, compact=compact, order=True)
    grad = torch.randn(61, width, generator=generator, dtype=dtype)
    for largest in (False, True):
        by_edge, by_shard = (ExtremeReducer(largest, 61, x) for _ in range(2))
        by_edge.add(*ends, x[src.long()])
        by_shard.add_shard(csc, x)
        assert torch.equal(by_shard.edge, by_edge.edge)
        torch.testing.assert_close(by_shard.result(), by_edge.result(), equal_nan=True)
        for one in (grad, grad[:, :1].expand_as(grad)):
            found = torch.ones_like(x)
            add_to_winners(found, csc, by_shard.edge, one)
            won = winners_only(by_edge.edge, one, *ends)
            want = torch.ones_like(x).index_add_(0, src, won)
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
