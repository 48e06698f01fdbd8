"""What differs between devices: which kernels there are, how much at once, memory and clocks.

What CUDA runs is compared with the loops here, on tensors of the processor, as far as that goes;
tests marked ``device`` run on a GPU where there is one.
"""

from __future__ import annotations

from typing import Any

import dgl
import pytest
import torch
from harness import run_threads
from harness.graphs import mixed
from harness.parts import Cutter
from torch import Tensor

import sar
from sar.comm.environment import take_device
from sar.comm.meter import Meter
from sar.kernels import (
    Csc,
    ExtremeReducer,
    Factors,
    add_rows,
    compress,
    device,
    has,
    nonzero,
    norm,
    spmm,
    spmm_add,
    spmm_into,
    winners_only,
)
from sar.ops.randomness import keyed_dropout

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ROWS, SOURCES = 60, 40


def edges(kind: str) -> tuple[Csc, int]:
    """Edges by destination with their order, and how many; "some" leaves odd rows without one."""
    number = {"none": 0, "one": 1}.get(kind, 300)
    rng = torch.Generator().manual_seed(number)
    dst = torch.randint(ROWS // 2, (number,), generator=rng, dtype=torch.int32) * 2
    src = torch.randint(SOURCES, (number,), generator=rng, dtype=torch.int32)
    return compress(dst, src, ROWS, compact=kind != "all rows", order=True), number


def factors_of(names: str, number: int, dtype: torch.dtype) -> Factors:
    rng = torch.Generator().manual_seed(3)

    def some(name: str, size: int) -> Tensor | None:
        return torch.rand(size, generator=rng, dtype=dtype) if name in names else None

    return Factors(some("edge", number), some("row", ROWS), some("gathered", SOURCES))


def moved(factors: Factors, to: torch.device) -> Factors:
    kinds = (factors.edge, factors.row, factors.gathered)
    return Factors(*(None if one is None else one.to(to) for one in kinds))


def sums(csc: Csc, x: Tensor, factors: Factors) -> list[Tensor]:
    """What the three entries make; the last one into columns of wider rows, too."""
    out = torch.full((ROWS, x.shape[1]), torch.nan, dtype=x.dtype, device=x.device)
    spmm(csc, x, factors, out)
    added = torch.ones_like(out)
    spmm_add(added, csc, x, factors)
    segments = x.new_full((csc.num_segments, x.shape[1]), torch.nan)
    spmm_into(segments, csc, x, factors)
    wide = x.new_full((csc.num_segments, x.shape[1] + 2), 7.0)
    spmm_into(wide[:, 1:-1], csc, x, factors)
    return [out, added, segments, wide]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    size = 1e-5 if dtype == torch.float32 else 1e-13
    return {"rtol": size, "atol": size}


KINDS = ["some", "all rows", "none", "one"]
FACTORS = ["", "edge", "row", "gathered", "edge row gathered"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [0, 1, 7])
@pytest.mark.parametrize("names", FACTORS)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_cuda_are_those_of_the_processor(
    kind: str, names: str, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code on the processor's tensors; sources that nobody reads are infinite."""
    csc, number = edges(kind)
    x = torch.randn(SOURCES + 1, width, dtype=dtype)
    x[SOURCES:] = torch.inf
    factors = factors_of(names, number, dtype)
    want = sums(csc, x, factors)
    monkeypatch.setitem(device.KERNELS, ("sum", "cpu", dtype), device.KERNELS["sum", "cuda", dtype])
    for got, one in zip(sums(csc, x, factors), want, strict=True):
        torch.testing.assert_close(got, one, **tolerance(dtype))


def test_without_compiled_kernels_torch_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = everything(CPU)
    for key in list(device.KERNELS):
        monkeypatch.delitem(device.KERNELS, key)
    has.cache_clear()
    try:
        assert not has("drop", CPU, torch.float64)
        check(everything(CPU), compiled)
    finally:
        has.cache_clear()


def everything(to: torch.device) -> dict[str, Tensor]:
    """A result of each kernel that torch's operators have a second form of, on a device."""
    rng = torch.Generator().manual_seed(0)
    csc, number = edges("some")
    x = torch.randn(SOURCES, 9, generator=rng, dtype=torch.float64)
    rows = torch.randn(number, 9, generator=rng, dtype=torch.float64)
    many = torch.randn(1500, 9, generator=rng, dtype=torch.float64)
    idx = torch.randint(ROWS, (1500,), generator=rng, dtype=torch.int32)
    mean, scale, shift = torch.rand(3, 9, generator=rng, dtype=torch.float64)
    keys = torch.arange(number)
    csc, x, rows, many, idx, keys = (one.to(to) for one in (csc, x, rows, many, idx, keys))
    pass_ = norm.Norm(mean.to(to), scale.to(to), shift.to(to), True)
    found = {"sum": spmm(csc, x, moved(factors_of("edge row", number, x.dtype), to))}
    found["rows"] = x.new_zeros((ROWS, 9))
    add_rows(found["rows"], idx, many)
    reducer = ExtremeReducer(True, ROWS, rows)
    row, order = csc.row_of_edges(), csc.order
    assert order is not None
    reducer.add(row, order, rows)
    found["max"], found["edge"] = reducer.result(), reducer.edge
    found["won"] = winners_only(reducer.edge, found["max"], row, order)
    words, found["counts"] = nonzero.nonzero_bits(x.relu())
    packed = x.new_zeros(int(found["counts"].sum()) + nonzero.SLACK)
    nonzero.pack_rows(x.relu(), words, None, packed)
    found["unpacked"] = torch.empty_like(x)
    nonzero.unpack_rows(words, packed, found["unpacked"])
    found["mean"], found["m2"], _ = norm.moments(x)
    found["normal"] = norm.normalize(x, pass_)
    found["sums"] = norm.gradient_sums(x, x + 1, pass_)
    found["dx"] = torch.empty_like(x)
    norm.input_gradient(x, x + 1, pass_, pass_.mean, pass_.shift, found["dx"])
    found["dropped"] = keyed_dropout(rows, keys, 5, 0.4)
    return found


def check(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, one in want.items():
        torch.testing.assert_close(got[name].cpu(), one, rtol=1e-12, atol=1e-12, msg=name)


# ---------------------------------------------------------------- chunks, clocks, places


@pytest.mark.parametrize(
    ("place", "current", "kind", "want"),
    [("5", 0, "cuda", [1]), ("0", 0, "cuda", [0]), ("5", 2, "cuda", []), ("", 0, "cuda", []),
     ("5", 0, "cpu", [])],
)  # fmt: skip
def test_a_rank_takes_the_device_of_its_place(
    place: str, current: int, kind: str, want: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sixth rank of a host with four devices; one that the script chose stays."""
    taken: list[int] = []
    monkeypatch.setenv("LOCAL_RANK", place)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    take_device(torch.device(kind))
    assert taken == want


# ---------------------------------------------------------------- on a GPU


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("names", FACTORS)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_on_cuda(kind: str, names: str, dtype: torch.dtype) -> None:
    csc, number = edges(kind)
    for width in (0, 1, 7, 128):
        x, factors = torch.randn(SOURCES, width, dtype=dtype), factors_of(names, number, dtype)
        want = sums(csc, x, factors)
        got = sums(csc.to(CUDA), x.to(CUDA), moved(factors, CUDA))
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.cpu(), other, **tolerance(dtype))


@pytest.mark.device
def test_sums_on_cuda_of_segments_that_begin_anywhere() -> None:
    """Arrays whose first number is 4, 8 or 12 bytes behind an address that a GPU likes."""
    csc, _ = edges("all rows")
    x = torch.randn(SOURCES, 5)
    there, want = csc.to(CUDA), spmm(csc, x)
    for first in range(0, 12):
        got = spmm(there.segments(first, 40), x.to(CUDA))
        torch.testing.assert_close(got.cpu(), want[first:40], rtol=1e-5, atol=1e-5)


@pytest.mark.device
def test_kernels_on_cuda() -> None:
    check(everything(CUDA), everything(CPU))


@pytest.mark.device
def test_peaks_and_times_on_cuda() -> None:
    device.reset_peak(CUDA)
    before = device.peak_bytes(CUDA)
    x = torch.randn(2048, 2048, device=CUDA)
    assert device.peak_bytes(CUDA) - before >= x.nbytes
    meter = Meter()
    meter.use(device.clock_of(CUDA))
    meter.switch("layer", "forward")
    for _ in range(50):
        x = x @ x / 2048
    meter.switch("", "other")
    meter.use(None)
    # 8.6e11 operations: no device does them in the time that it takes to ask for them
    assert 0.001 < meter.stretches["layer", "forward"].seconds < 10


LAYERS = {
    "SAGEConv": lambda: dgl.nn.SAGEConv(6, 5, "mean"),
    "pool": lambda: dgl.nn.SAGEConv(6, 5, "pool"),
    "GraphConv": lambda: dgl.nn.GraphConv(6, 5, allow_zero_in_degree=True),
    "GATConv": lambda: dgl.nn.GATConv(6, 5, 2, allow_zero_in_degree=True),
    "GATv2Conv": lambda: dgl.nn.GATv2Conv(6, 5, 2, allow_zero_in_degree=True),
    "AGNNConv": lambda: dgl.nn.AGNNConv(allow_zero_in_degree=True),
}


@pytest.mark.device
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_on_cuda(name: str, ranks: int, partitioned: Cutter) -> None:
    """Outputs and all gradients; ranks share the device and stage what they send."""
    path = partitioned(mixed(), ranks, "random")

    def results(to: torch.device) -> list[list[Tensor]]:
        def case(group: Any) -> list[Tensor]:
            data = sar.load_dgl_partition_data(path, group.rank, to)
            graph = sar.construct_full_graph(data)
            x = data.node_features["_N/feat"].double().to(to).requires_grad_()
            layer = made.to(to) if ranks == 1 else copies[group.rank].to(to)
            out = layer(graph, x)
            out.square().sum().backward()
            grads = [p.grad for p in layer.parameters()]
            return [t.detach().cpu() for t in (out, x.grad, *grads)]

        torch.manual_seed(0)
        made = LAYERS[name]().double()
        states = made.state_dict()
        copies = [LAYERS[name]().double() for _ in range(ranks)]
        for one in copies:
            one.load_state_dict(states)
        return run_threads(ranks, case)

    for got, want in zip(results(CUDA), results(CPU), strict=True):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
