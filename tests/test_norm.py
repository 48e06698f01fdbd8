"""The passes of batch normalization: loops and torch give float64's numbers, rounded once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sar.kernels import norm
from sar.kernels.norm import Norm

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Where numbers are rounded: to their type, and in the wide type on the way where torch computes.
CLOSE = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "columns": lambda x: torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]],
    "turned": lambda x: x.t().contiguous().t(),
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
}


def make_rows(num: int, width: int, dtype: torch.dtype, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(num + width)
    return (torch.randn(num, width, generator=generator, dtype=torch.float64) + shift).to(dtype)


def make_norm(width: int, relu: bool) -> Norm:
    mean, scale, shift = make_rows(3, width, torch.float64)
    return Norm(mean, scale, shift, relu)


def check(x: Tensor, dy: Tensor, given: Norm) -> None:
    """All passes beside the equations in float64."""
    wide, incoming = x.double(), dy.double()
    rtol = CLOSE[x.dtype]
    mean, m2, count = norm.moments(x)
    assert count == len(x) and mean.dtype == m2.dtype == torch.float64
    if count:
        torch.testing.assert_close(mean, wide.mean(0), rtol=1e-12, atol=1e-12)
        want = wide.var(0, unbiased=False) * count
        torch.testing.assert_close(m2, want, rtol=1e-9, atol=1e-12)
    y = (wide - given.mean) * given.scale + given.shift
    got = norm.normalize(x, given)
    assert got.dtype == x.dtype and got.is_contiguous()
    want = y.relu() if given.relu else y
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=4 * rtol)
    passes = norm.normalize(x, given._replace(relu=False)) > 0 if given.relu else True
    incoming = torch.where(torch.as_tensor(passes), incoming, 0.0)
    sums = norm.gradient_sums(x, dy, given)
    want = torch.stack([incoming.sum(0), (incoming * (wide - given.mean)).sum(0)])
    torch.testing.assert_close(sums, want, rtol=1e-11, atol=1e-10)
    slope, offset = make_rows(2, x.shape[1], torch.float64)
    want = (incoming - offset - (wide - given.mean) * slope) * given.scale
    inside = x.contiguous().clone()
    apart = x.new_empty(len(x), 2 * x.shape[1])[:, x.shape[1] :]
    for source, out in ((x, torch.empty(x.shape, dtype=x.dtype)), (x, apart), (inside, inside)):
        norm.input_gradient(source, dy, given, slope, offset, out)
        torch.testing.assert_close(out.double(), want, rtol=rtol, atol=16 * rtol)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num", [0, 1, 63, 64, 65, 1000])
def test_any_number_of_rows(num: int, dtype: torch.dtype, relu: bool) -> None:
    check(make_rows(num, 5, dtype), make_rows(num, 5, dtype).flip(0), make_norm(5, relu))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [1, 7, 512])
def test_any_layout(width: int, layout: str, threads: int) -> None:
    """Enough numbers for several threads, where the rows are wide."""
    x, dy = make_rows(1500, width, torch.float32), make_rows(1500, width, torch.float32).roll(1, 0)
    for one, other in ((LAYOUTS[layout](x), dy), (x, LAYOUTS[layout](dy))):
        check(one, other, make_norm(width, relu=True))
    check(x, dy[:1].expand_as(x), make_norm(width, relu=False))
    check(x, dy[:1, :1].expand_as(x), make_norm(width, relu=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_mean_that_dwarfs_the_deviation(dtype: torch.dtype) -> None:
    shift = 1e6 if dtype == torch.float32 else 1e9
    x = make_rows(5000, 3, dtype, shift)
    mean, m2, count = norm.moments(x)
    away = x.double() - shift  # exact
    away -= away.mean(0)
    torch.testing.assert_close(m2, away.square().sum(0), rtol=1e-6, atol=0)
    rstd = (m2 / count).rsqrt()
    y = norm.normalize(x, Norm(mean, rstd, torch.zeros_like(mean)))
    torch.testing.assert_close(y.double(), away * rstd, rtol=1e-6, atol=1e-6)
