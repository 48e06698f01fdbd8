"""Checks of arguments: what passes is returned, what does not is named."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from sar import expect
from sar.comm import Group, ThreadGroup

ROWS = torch.zeros(3, 2)


@pytest.mark.parametrize(
    "check, value",
    [
        (expect.integer, -5),
        (partial(expect.integer, at_least=1, at_most=3), 3),
        (partial(expect.number, at_least=0, at_most=1), 0.5),
        (partial(expect.number, above=0), 2),
        (expect.boolean, False),
        (partial(expect.one_of, known=(None, "int8")), None),
        (partial(expect.instance, kind=dict, expected="a dict"), {}),
        (partial(expect.tensor, floating=True, shape=(3, "D")), ROWS),
        (partial(expect.tensor, shape=(3, ...)), ROWS),
        (partial(expect.tensor, shape=(3, "D", ...)), ROWS),
        (partial(expect.tensor, dtypes=(torch.bool, torch.int64)), ROWS.bool()),
        (partial(expect.indices, what="rows", count=3), torch.tensor([2, 0])),
        (partial(expect.indices, what="rows", count=0), torch.tensor([]).long()),
    ],
)
def test_what_fits_is_returned(check: Callable[..., Any], value: object) -> None:
    assert check(value, name="x") is value


@pytest.mark.parametrize(
    "check, value, kind, text",
    [
        (expect.integer, True, TypeError, "got bool, expected an int"),
        (expect.integer, 2.0, TypeError, "got float, expected an int"),
        (partial(expect.integer, at_least=1), 0, ValueError, "expected an int of at least 1"),
        (partial(expect.integer, at_most=1), 2, ValueError, "got 2, expected an int of at most 1"),
        (partial(expect.integer, at_least=0, at_most=3), 4, ValueError, "an int from 0 to 3"),
        (expect.number, "1", TypeError, "got str, expected a number"),
        (partial(expect.number, above=0), float("nan"), ValueError, "expected more than 0"),
        (partial(expect.number, at_most=1), float("nan"), ValueError, "a number of at most 1"),
        (expect.boolean, 1, TypeError, "got int, expected a bool"),
        (partial(expect.one_of, known=("a", "b")), "c", ValueError, "'c', expected one of a, b"),
        (partial(expect.one_of, known=(1, 2)), True, ValueError, "got True, expected one of 1, 2"),
        (partial(expect.instance, kind=dict, expected="a dict"), [], TypeError, "expected a dict"),
        (expect.tensor, [1], TypeError, "got list, expected a tensor"),
        (partial(expect.tensor, floating=True), ROWS.int(), TypeError, "a floating point tensor"),
        (partial(expect.tensor, dtypes=(torch.bool, torch.int64)), ROWS, TypeError,
         "got torch.float32, expected bool or int64"),
        (partial(expect.indices, what="rows", count=3), torch.tensor([1, 3]), ValueError,
         "got rows from 1 to 3, expected 0 to 2"),
        (partial(expect.tensor, shape=(4, "D")), ROWS, ValueError, "shape (3, 2), expected [4, D]"),
        (partial(expect.tensor, shape=("n",)), ROWS, ValueError, "got shape (3, 2), expected [n]"),
        (partial(expect.tensor, shape=("n", 2, "h", ...)), ROWS, ValueError, "[n, 2, h, ..]"),
    ],
)  # fmt: skip
def test_what_does_not_is_named(
    check: Callable[..., Any], value: object, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=rf"^x: (?=got ).*{re.escape(text)}"):
        check(value, name="x")
    assert isinstance(expect.problem(check, value, name="x"), kind)


def test_nothing_is_imported() -> None:
    code = "import sys; import sar.expect; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_rank_s_error_is_all_ranks() -> None:
    def body(group: Group) -> str:
        with pytest.raises(ValueError, match="k: got 0") as caught:
            with group.agreed("call"):
                expect.integer(group.rank, "k", at_least=1)
        return str(caught.value)

    assert ThreadGroup.run(2, body) == ["rank 0: call: k: got 0, expected an int of at least 1"] * 2
