"""Lossy switches: what they lose, that they lose nothing else, and that all ranks agree on them."""

from __future__ import annotations

import gc
import math
import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch
from dgl.nn import GATConv, SAGEConv
from harness import run_threads
from harness.graphs import mixed
from harness.parts import Cutter
from harness.rows import Part
from torch import Tensor

import sar
from sar.partition.arrays import ETYPE_HOMO
from sar.stream.codec import BFloat16, Codec, Int8, codec_of

WIDTH = 12


def coded(codec: Codec, rows: Tensor) -> Tensor:
    """What arrives of ``rows``."""
    wire = torch.empty((len(rows), codec.width(rows.shape[1])), dtype=codec.dtype)
    codec.encode_all(rows, wire)
    out = torch.empty_like(rows)
    codec.decode_all(wire, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bfloat16_rounds_to_nearest(dtype: torch.dtype) -> None:
    rows = torch.randn(50, 7, dtype=dtype)
    assert torch.equal(coded(BFloat16(), rows), rows.bfloat16().to(dtype))


def test_int8_is_off_by_less_than_a_level_and_right_on_average() -> None:
    rows = torch.randn(20, 9) * torch.logspace(-6, 6, 20).unsqueeze(1)
    codec = Int8(torch.Generator().manual_seed(1))
    level = rows.abs().amax(1, keepdim=True) / 127
    draws = torch.stack([coded(codec, rows) for _ in range(2000)])
    assert ((draws - rows).abs() < level * 1.001).all()
    # a draw's error has at most the deviation of a fair coin: half a level
    assert ((draws.double().mean(0) - rows).abs() < 5 * level / 2 / math.sqrt(2000)).all()


@pytest.mark.parametrize("width", [1, 2, 3, 33])
def test_int8_of_one_row(width: int) -> None:
    """Its scale lies anywhere in memory."""
    rows = torch.ones(1, width)
    assert torch.equal(coded(Int8(torch.Generator()), rows), rows)


def test_int8_of_zeros_infinities_and_nothing() -> None:
    codec = Int8(torch.Generator())
    assert torch.equal(coded(codec, torch.zeros(3, 4)), torch.zeros(3, 4))
    rows = torch.tensor([[1.0, math.inf], [math.nan, 2.0], [3.0, -3.0]])
    out = coded(codec, rows)
    assert out[:2].isnan().all() and torch.equal(out[2], rows[2])
    for shape in ((0, 4), (3, 0), (0, 0)):
        assert coded(codec, torch.zeros(shape)).shape == shape


def test_nothing_is_coded_that_would_not_become_smaller() -> None:
    noise = torch.Generator()
    assert codec_of("bfloat16", torch.bfloat16, noise) is None
    assert codec_of("int8", torch.int64, noise) is None
    assert codec_of(None, torch.float32, noise) is None
    assert isinstance(codec_of("int8", torch.bfloat16, noise), Int8)


def close(mine: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def features(num_nodes: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_nodes, WIDTH, generator=generator, dtype=torch.float64)


def aggregated(
    group: sar.comm.Group, path: str, lossy: sar.Lossy, x: Tensor, dout: Tensor, rounds: int
) -> Any:
    """(nids, sums, gradients, bytes sent) of one sum over the whole graph."""
    policy = sar.Policy(rounds=rounds, lossy=lossy, exchange="pull")  # what is coded are rows of x
    part = Part(group, path, policy)
    graph, nids = part.graph, part.nodes
    sar.manual_seed(5)
    rows = x[nids].requires_grad_()
    out = graph.aggregate(rows, "sum")
    before = group.counters.sent_bytes
    out.backward(dout[nids])
    home = group.counters.sent_bytes - before
    with torch.no_grad():
        evaluated = graph.aggregate(rows, "sum")
    return nids, out.detach(), rows.grad, evaluated, home


@pytest.fixture(scope="module")
def sample() -> Any:
    return mixed()


def run(partitioned: Cutter, sample: Any, lossy: sar.Lossy, size: int = 3, rounds: int = 2) -> Any:
    x, dout = features(sample.total_nodes), features(sample.total_nodes).flip(0)
    path = partitioned(sample, size, "random")
    ranks = run_threads(size, aggregated, path, lossy, x, dout, rounds)
    order = torch.cat([part[0] for part in ranks]).argsort()
    joined = [torch.cat([part[i] for part in ranks])[order] for i in (1, 2, 3)]
    owner = torch.cat([torch.full_like(part[0], rank) for rank, part in enumerate(ranks)])[order]
    return joined, owner, sum(part[4] for part in ranks), (x, dout)


def matrices(sample: Any, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Dense [n, n] adjacency (destination, source): edges inside parts, edges between them."""
    src, dst = sample.edges[ETYPE_HOMO]
    inside, between = (torch.zeros(len(owner), len(owner), dtype=torch.float64) for _ in range(2))
    same = owner[src] == owner[dst]
    for matrix, chosen in ((inside, same), (between, ~same)):
        matrix.index_put_((dst[chosen], src[chosen]), torch.ones(()).double(), accumulate=True)
    return inside, between


def test_bfloat16_wire_rounds_remote_rows_and_nothing_else(
    partitioned: Cutter, sample: Any
) -> None:
    lossy = sar.Lossy(wire_dtype="bfloat16")
    (out, grad, evaluated), owner, _, (x, dout) = run(partitioned, sample, lossy)
    inside, between = matrices(sample, owner)
    expected = inside @ x + between @ x.bfloat16().double()
    close(out, expected)
    close(evaluated, expected)
    close(grad, (inside + between).T @ dout)


def test_gradients_have_a_switch_of_their_own(partitioned: Cutter, sample: Any) -> None:
    lossy = sar.Lossy(gradient_wire_dtype="int8")
    (out, grad, _), owner, sent, (x, dout) = run(partitioned, sample, lossy)
    exact = run(partitioned, sample, sar.Lossy())
    inside, between = matrices(sample, owner)
    close(out, (inside + between) @ x)
    assert sent * 8 * WIDTH == exact[2] * (WIDTH + 4)  # float64 rows against bytes and a scale
    error = (grad - (inside + between).T @ dout).abs().amax()
    partial = (between.abs().T @ dout.abs()).amax()  # no row that goes home is larger
    assert 0 < error < 3 * partial / 127


@pytest.mark.parametrize("rounds", [1, 2])
def test_sampled_rows_are_scaled_and_backward_is_the_transpose(
    partitioned: Cutter, sample: Any, rounds: int
) -> None:
    lossy = sar.Lossy(boundary_rate=0.5)
    (out, grad, evaluated), owner, _, (x, dout) = run(partitioned, sample, lossy, rounds=rounds)
    inside, between = matrices(sample, owner)
    close(evaluated, (inside + between) @ x)
    assert (out - evaluated).abs().amax() > 0.1
    close((out * dout).sum(), (grad * x).sum())
    again = run(partitioned, sample, lossy, rounds=rounds)[0]
    assert torch.equal(again[0], out) and torch.equal(again[1], grad)


def mean_of_samples(group: sar.comm.Group, path: str, x: Tensor, draws: int) -> Any:
    part = Part(group, path, sar.Policy(lossy=sar.Lossy(boundary_rate=0.4)))
    graph, rows = part.graph, x[part.nodes]
    sar.manual_seed(0)
    total = sum(graph.aggregate(rows, "mean") for _ in range(draws)) / draws
    with torch.no_grad():
        return total, graph.aggregate(rows, "mean")


def test_samples_are_right_on_average(partitioned: Cutter, sample: Any) -> None:
    x, draws = torch.ones(sample.total_nodes, 1, dtype=torch.float64), 400
    path = partitioned(sample, 3, "random")
    for total, exact in run_threads(3, mean_of_samples, path, x, draws):
        # one remote row of weight 1: deviation sqrt((1 - r) / r) = 1.22 a draw
        assert ((total - exact).abs() < 5 * 1.23 / math.sqrt(draws)).all()


def attend(group: sar.comm.Group, path: str, layer: str) -> None:
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    graph = sar.construct_full_graph(data, sar.Policy(lossy=sar.Lossy(boundary_rate=0.5)))
    x = torch.ones(graph.num_nodes(), 4)
    conv = GATConv(4, 2, 1, allow_zero_in_degree=True) if layer == "gat" else SAGEConv(4, 2, "pool")
    with torch.no_grad():
        conv(graph, x)
    with pytest.raises(sar.NotSupportedError, match="boundary_rate: got 0.5"):
        conv(graph, x)


@pytest.mark.parametrize("layer", ["gat", "pool"])
def test_only_sums_are_sampled(partitioned: Cutter, sample: Any, layer: str) -> None:
    run_threads(2, attend, partitioned(sample, 2, "random"), layer)


def differ(group: sar.comm.Group, path: str) -> None:
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    lossy = sar.Lossy(wire_dtype="int8" if group.rank else "bfloat16")
    graph = sar.construct_full_graph(data, sar.Policy(lossy=lossy))
    with pytest.raises(ValueError, match="ranks differ"):
        graph.aggregate(torch.ones(graph.num_nodes(), 4), "sum")


def test_ranks_that_differ_are_told(partitioned: Cutter, sample: Any) -> None:
    run_threads(2, differ, partitioned(sample, 2, "random"))


def draw_differently(group: sar.comm.Group, path: str) -> None:
    lossy = sar.Lossy(boundary_rate=0.5) if group.rank else sar.Lossy()
    graph = Part(group, path, sar.Policy(lossy=lossy)).graph
    with pytest.raises(ValueError, match=r"lossy.* of ranks 0, 1, .. are \[\(0, 100000000, 0\), "):
        graph.aggregate(torch.ones(graph.num_nodes(), 4, requires_grad=True), "sum")


def test_a_rank_that_draws_alone_is_told_before_it_draws(partitioned: Cutter, sample: Any) -> None:
    run_threads(2, draw_differently, partitioned(sample, 2, "random"))


def plans_that_stay(group: sar.comm.Group, path: str) -> int:
    """How many plans of sampled rows live on when their sums are gone."""
    part, seen = Part(group, path, sar.Policy(lossy=sar.Lossy(boundary_rate=0.5))), []
    plan = part.graph._store.relations[ETYPE_HOMO].plan
    thinned = plan.thinned

    def watched(*args: Any) -> Any:
        seen.append(thinned(*args))
        return seen[-1]

    plan.thinned = watched
    out = part.graph.aggregate(torch.ones(len(part.nodes), 4, requires_grad=True), "sum")
    out.sum().backward()
    del out
    seen = [weakref.ref(seen.pop())]
    return sum(one() is not None for one in seen)


def test_samples_go_with_their_sums(partitioned: Cutter, sample: Any) -> None:
    gc.disable()  # nothing waits for the collector of cycles
    try:
        assert run_threads(2, plans_that_stay, partitioned(sample, 2, "random")) == [0, 0]
    finally:
        gc.enable()


def attention(group: sar.comm.Group, path: str, lossy: sar.Lossy, x: Tensor, layer: GATConv) -> Any:
    part = Part(group, path, sar.Policy(lossy=lossy))
    graph, nids, conv = part.graph, part.nodes, deepcopy(layer)
    rows = x[nids].requires_grad_()
    out = conv(graph, rows)
    out.square().sum().backward()
    return nids, out.detach(), rows.grad


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_attention_over_a_lossy_wire(partitioned: Cutter, sample: Any, kind: str) -> None:
    """Rows and gradients of a layer that streams its features twice, close to the exact ones."""
    x, path = features(sample.total_nodes), partitioned(sample, 3, "random")
    layer = GATConv(WIDTH, 4, 2, allow_zero_in_degree=True).double()
    exact = run_threads(3, attention, path, sar.Lossy(), x, layer)
    lossy = run_threads(3, attention, path, sar.Lossy(kind, kind), x, layer)
    for (_, out, grad), (_, near, near_grad) in zip(exact, lossy, strict=True):
        for a, b in ((out, near), (grad, near_grad)):
            error = (a - b).abs().amax() / a.abs().amax()
            assert 1e-6 < error < 0.05


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"wire_dtype": "float16"}, ValueError, "wire_dtype: got 'float16', expected None or"),
        ({"gradient_wire_dtype": 8}, ValueError, "gradient_wire_dtype: got 8"),
        ({"boundary_rate": 0.0}, ValueError, "boundary_rate: got 0.0, expected 0 < rate <= 1"),
        ({"boundary_rate": "half"}, TypeError, "boundary_rate: got str, expected a float"),
    ],
)
def test_typos(arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        sar.Lossy(**arguments)


def test_policy_takes_a_lossy() -> None:
    with pytest.raises(TypeError, match="lossy: got str, expected a sar.Lossy"):
        sar.Policy(lossy="int8")
