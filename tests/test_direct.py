"""Small collectives of gloo as exchanges: the same numbers as a ring's, the same on all ranks."""

from __future__ import annotations

from functools import reduce
from typing import Any
from unittest import mock

import pytest
import torch
from harness import WorkerPool, run_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sar.comm import direct
from sar.errors import CommError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64]
OPS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def tensor_of(rank: int, num: int, dtype: torch.dtype) -> Tensor:
    made = torch.Generator().manual_seed(rank)
    return (torch.rand(num, generator=made) * 100 - 50).to(dtype)


def case(group: Any, num: int, op: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    steps = []

    def swap(recv: Tensor, send: Tensor) -> None:
        counts = [len(send) // group.size] * group.size
        recv.copy_(group.all_to_all(send, counts, counts))
        steps.append(len(send))

    mine = tensor_of(group.rank, num, dtype)
    gathered = torch.stack(direct.all_gather(swap, mine.view(1, num), group.size))
    part = -(-(16 + num * mine.element_size()) // 16) * 16  # bytes, with 16 in front
    assert steps == [part * group.size]
    direct.all_reduce(swap, mine, op, group.size)
    few = num <= 64 and not dtype.is_floating_point
    assert len(steps) == (2 if few else 3)
    return gathered, mine


@given(
    st.integers(2, 5),
    st.integers(1, 90),
    st.sampled_from(sorted(OPS)),
    st.sampled_from(DTYPES),
)
@settings(max_examples=60, deadline=None)
def test_equal_to_one_process(size: int, num: int, op: str, dtype: torch.dtype) -> None:
    whole = torch.stack([tensor_of(rank, num, dtype) for rank in range(size)])
    for gathered, reduced in run_threads(size, case, num, op, dtype):
        assert torch.equal(gathered.view(size, num), whole)
        assert reduced.dtype == dtype
        assert torch.equal(reduced, reduce(OPS[op], whole))  # in the order of ranks, bit for bit


def case_processes(group: Any) -> list[float]:
    """Sizes on either side of the limit, of which those above it take gloo's ring."""
    results = []
    for num in (0, 1, 7, 5000):
        for limit in (direct.LARGEST, 0):
            with mock.patch.object(direct, "LARGEST", limit):
                made = group.all_reduce(torch.arange(float(num)) + group.rank)
                parts = group.all_gather(torch.full((num, 2), group.rank))
            results += [float(made.sum()), float(sum(part.sum() for part in parts))]
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_over_gloo(size: int, either: WorkerPool) -> None:
    ranks = sum(range(size))
    expected = []
    for num in (0, 1, 7, 5000):
        expected += [size * sum(range(num)) + num * ranks, 2 * num * ranks] * 2
    assert either.run(size, case_processes) == [expected] * size


def case_different(group: Any, name: str) -> Any:
    second = group.rank == 1
    calls: dict[str, Any] = {
        "shapes": lambda: group.all_reduce(torch.ones(3 + second)),
        "dtypes": lambda: group.all_reduce(
            torch.ones(2, dtype=torch.float64) if second else torch.ones(4)
        ),
        "operations": lambda: group.all_reduce(torch.tensor(5), "max" if second else "sum"),
        "conditions": lambda: (
            group.sum_if_all(torch.ones(4), False) if second else group.all_reduce(torch.ones(4))
        ),
        "collectives": lambda: (group.all_gather if second else group.all_reduce)(torch.tensor(5)),
    }
    try:
        calls[name]()
    except CommError as error:
        message = str(error)
    else:
        message = ""
    return message, float(group.all_reduce(torch.ones(1)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shapes", "0: sum of 3 torch.float32, 1: sum of 4 torch.float32"),
        ("dtypes", "0: sum of 4 torch.float32, 1: sum of 2 torch.float64"),
        ("operations", "0: sum of 1 torch.int64, 1: max of 1 torch.int64"),
        ("conditions", "0: sum of 4 torch.float32, 1: sum_if_all of 4 torch.float32"),
        ("collectives", "0: sum of 1 torch.int64, 1: all_gather of 1 torch.int64"),
    ],
)
def test_ranks_that_call_different_things(name: str, words: str, either: WorkerPool) -> None:
    """Messages of one length are one to gloo; every rank is told, and goes on."""
    for message, later in either.run(2, case_different, name):
        assert words in message and later == 2


def case_if_all(group: Any, num: int) -> list[Any]:
    results: list[Any] = []
    for ready in (True, group.rank == 0, False, True):
        one = torch.full((num,), float(group.rank + 1))
        results += [group.sum_if_all(one, ready), one.unique().tolist()]
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_if_all_are_ready(size: int, either: WorkerPool) -> None:
    for num in (1, 5, 5000, direct.LARGEST):
        found = [run_threads(size, case_if_all, num)] if num < 5000 else []
        for ranks in (*found, either.run(size, case_if_all, num)):
            for rank, results in enumerate(ranks):
                total, own = [size * (size + 1) / 2], [rank + 1.0]
                some = size == 1  # its only rank is the first, which is ready
                assert results == [True, total, some, own, False, own, True, total]


def case_inference(group: Any) -> float:
    with torch.inference_mode():
        loss = torch.tensor(group.rank + 1.0)
    return float(group.all_reduce(loss))


def test_results_of_inference(either: WorkerPool) -> None:
    assert either.run(2, case_inference) == [3.0, 3.0]


def test_what_is_worth_it() -> None:
    assert not direct.fits(torch.empty(0))
    assert direct.fits(torch.empty(direct.LARGEST // 4)) and direct.fits(torch.empty(1), 1024)
    assert not direct.fits(torch.empty(direct.LARGEST // 4), 2)
