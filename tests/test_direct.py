"""Small collectives of gloo as exchanges: the same numbers as a ring's, the same on all ranks."""

from __future__ import annotations

from functools import reduce
from typing import Any
from unittest import mock

import pytest
import torch
from harness import WorkerPool, run_threads
from torch import Tensor

import sar
from sar.comm import direct

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64]
OPS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
NUMS = [0, 1, 7, 64, 90, 5000]  # around what is sent to all, and what ranks share evenly


def tensor_of(rank: int, num: int, dtype: torch.dtype) -> Tensor:
    made = torch.Generator().manual_seed(rank)
    return (torch.rand(num, generator=made) * 100 - 50).to(dtype)


def case_numbers(group: Any) -> None:
    """All against one process, bit for bit and in the order of ranks; gloo's ring to rounding."""
    for num, dtype in ((num, dtype) for num in NUMS for dtype in DTYPES):
        whole = [tensor_of(rank, num, dtype) for rank in range(group.size)]
        for limit in (direct.LARGEST, 0) if num in (1, 5000) else (direct.LARGEST,):
            with mock.patch.object(direct, "LARGEST", limit):
                gathered = group.all_gather(whole[group.rank])
                assert all(map(torch.equal, gathered, whole))
                for op, function in OPS.items():
                    made = group.all_reduce(whole[group.rank].clone(), op)
                    expected = reduce(function, whole)
                    assert made.dtype == dtype
                    assert (
                        torch.equal(made, expected)
                        or not limit
                        and torch.allclose(made.double(), expected.double(), rtol=0.02, atol=1.0)
                    ), (num, dtype, op)
    with torch.inference_mode():
        loss = torch.tensor(group.rank + 1.0)
    assert float(group.all_reduce(loss)) == sum(range(1, group.size + 1))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_equal_to_one_process(size: int, either: WorkerPool) -> None:
    either.run(size, case_numbers)


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
    except sar.CommError as error:
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


@pytest.mark.parametrize("size", [1, 3])
def test_sums_if_all_are_ready(size: int, either: WorkerPool) -> None:
    for num in (1, 5, 5000, direct.LARGEST // 4 + 1):
        found = [run_threads(size, case_if_all, num)] if num < 5000 else []
        for ranks in (*found, either.run(size, case_if_all, num)):
            for rank, results in enumerate(ranks):
                total, own = [size * (size + 1) / 2], [rank + 1.0]
                some = size == 1  # its only rank is the first, which is ready
                assert results == [True, total, some, own, False, own, True, total]
