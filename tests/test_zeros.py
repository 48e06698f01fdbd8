"""Rows of a relu without their zeros: packed rows, unchanged results, the bytes that are saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import dgl
import dgl.nn
import pytest
import torch
from harness import run_threads
from harness.compare import assert_close
from harness.covering import by_pairs
from harness.graphs import mixed
from harness.parts import Cutter, joined
from harness.rows import Part
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sar
from sar.kernels import nonzero

WIDTH = 37  # more than a word of float32 has bits
WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}
NUMBERS = st.sampled_from([0.0, -0.0, 1.5, -2.0, float("inf"), float("nan"), 1e-45])


def bits_of(x: Tensor) -> Tensor:
    return x.view(WORDS[x.dtype])


@given(st.integers(0, 5), st.integers(1, 70), st.data(), st.sampled_from(sorted(WORDS, key=str)))
@settings(max_examples=100, deadline=None)
def test_packed_rows_come_back_bit_by_bit(n: int, width: int, data: Any, dtype: Any) -> None:
    numbers = data.draw(st.lists(NUMBERS, min_size=n * width, max_size=n * width))
    x = torch.tensor(numbers, dtype=dtype).view(n, width)
    idx = torch.tensor(data.draw(st.permutations(range(n))), dtype=torch.int32)[: max(0, n - 1)]
    words, counts = nonzero.nonzero_bits(x)
    assert torch.equal(counts.long(), (bits_of(x) != 0).sum(1))
    packed = torch.full((int(counts[idx].sum()) + nonzero.SLACK,), 7.0, dtype=dtype)
    nonzero.pack_rows(x, words, idx, packed)
    rows = torch.full((len(idx), width), 7.0, dtype=dtype)
    nonzero.unpack_rows(words[idx], packed, rows)
    assert torch.equal(bits_of(rows), bits_of(x[idx]))
    every = torch.empty(int(counts.sum()) + nonzero.SLACK, dtype=dtype)
    nonzero.pack_rows(x, words, None, every)
    assert torch.equal(bits_of(every[:-1]), bits_of(x)[bits_of(x) != 0])


class Net(nn.Module):
    """Two layers that sum what a relu made, one of them with ``kind``."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, WIDTH)
        conv = {
            "sage": lambda: dgl.nn.SAGEConv(WIDTH, WIDTH, "mean"),
            "gcn": lambda: dgl.nn.GraphConv(WIDTH, WIDTH, "both", allow_zero_in_degree=True),
            "gin": lambda: dgl.nn.GINConv(nn.Linear(WIDTH, WIDTH), "sum"),
        }
        self.conv = conv.get(kind, conv["sage"])()
        self.to(dtype)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        keep = (x.detach()[:, :1] > -0.3) / 0.7
        x = sar.nn.relu(self.first(x))
        if self.kind == "dropout":  # with the same mask for any number of threads
            x = x * keep.to(x.dtype)
        if self.kind == "weighted":
            with graph.local_scope():
                graph.srcdata["x"] = x
                graph.edata["w"] = graph.edata["weight"]
                graph.update_all(dgl.function.u_mul_e("x", "w", "m"), dgl.function.sum("m", "x"))
                x = graph.dstdata["x"]
        else:
            x = self.conv(graph, x)
        x = sar.nn.relu(self.last(x))
        return self.conv(graph, x)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    graph, generator = mixed(), torch.Generator().manual_seed(0)
    x = torch.randn(graph.total_nodes, 5, generator=generator, dtype=torch.float64)
    w = torch.rand(len(next(iter(graph.edges.values()))[0]), 1, generator=generator).double()
    return x.to(dtype), w.to(dtype)


def net(kind: str, dtype: torch.dtype) -> Net:
    torch.manual_seed(1)
    return Net(kind, dtype)


def case_step(group: Any, path: str, model: Net, policy: Any, activations: str) -> Any:
    """Output, gradients of parameters and input, bytes sent forward and backward."""
    part, (x, w) = Part(group, path, policy), inputs(model.last.weight.dtype)
    part.graph.edata["weight"] = part.edge_rows(w, grad=False)
    x, model = part.node_rows(x), copy.deepcopy(model)
    sar.set_activations(model, activations)
    sums = [(0, 0)]
    for _ in range(2):  # what is built on first use is not counted
        model.zero_grad()
        x.grad, start = None, group.counters.sent_bytes
        out = model(part.graph, x)
        middle = group.counters.sent_bytes
        (out * out).sum().backward()
        sums.append((middle - start, group.counters.sent_bytes - middle))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return part.nodes, out.detach(), grads, x.grad, sums[-1]


@by_pairs(
    kind=["sage", "gcn", "gin", "weighted", "dropout"],
    setting=[
        (3, None, {}),
        (4, 2, {"exchange": "pull"}),
        (4, None, {"rematerialize": False, "structure": "one"}),
        (1, None, {}),
    ],
    numbers=[(torch.float64, "keep"), (torch.float32, "keep"), (torch.float64, "recompute")],
)
def test_results_are_the_same_numbers(
    kind: str, setting: tuple, numbers: tuple[torch.dtype, str], partitioned: Cutter
) -> None:
    (size, rounds, options), (dtype, activations) = setting, numbers
    path = partitioned(mixed(), size, "random")
    found = [
        run_threads(size, case_step, path, net(kind, dtype), policy, activations)
        for policy in (sar.Policy(rounds, zeros=z, **options) for z in ("send", "skip"))
    ]
    for (_, out, grads, dx, sent), (_, out_2, grads_2, dx_2, sent_2) in zip(*found):
        pairs = [(out, out_2), (dx, dx_2), *((grads[name], grads_2[name]) for name in grads)]
        if activations == "keep" or kind in ("gcn", "gin"):
            assert all(torch.equal(one, other) for one, other in pairs)
        else:  # recomputed means are multiplied in blocks of columns, unless zeros are skipped
            for one, other in pairs:
                torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
        if size > 1:
            assert sent_2[0] < 0.9 * sent[0]
            if kind != "gcn":
                assert sent_2[1] < sent[1]
            elif activations == "keep":  # a product stands between
                assert sent_2[1] == sent[1]


@pytest.mark.parametrize("kind", ["sage", "gcn", "gin", "weighted"])
def test_results_equal_those_of_dgl(kind: str, partitioned: Cutter) -> None:
    graph, size, dtype = mixed(), 4, torch.float64
    whole = dgl.graph(next(iter(graph.edges.values())), num_nodes=graph.total_nodes)
    x, whole.edata["weight"] = inputs(dtype)
    model = net(kind, dtype)
    out = model(whole, x.requires_grad_())
    (out * out).sum().backward()
    path, policy = partitioned(graph, size, "random"), sar.Policy(zeros="skip")
    found = run_threads(size, case_step, path, net(kind, dtype), policy, "keep")
    ids = [part[0] for part in found]
    assert_close(joined([part[1] for part in found], ids, graph.total_nodes), out, "output", dtype)
    assert_close(joined([part[3] for part in found], ids, graph.total_nodes), x.grad, "dx", dtype)
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert_close(sum(part[2][name] for part in found), p.grad, name, dtype)


POLICY = sar.Policy(zeros="skip")


Change = Callable[[Tensor], Tensor]


def halved(x: Tensor) -> Tensor:
    """Zeros that no relu made, in a tensor whose gradient is not zero there."""
    with torch.no_grad():
        x[:, ::2] = 0
    return x


def normed(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad / grad.norm())
    return x


CHANGES: dict[str, Change] = {
    "hook": normed,
    "hook before a product": lambda x: normed(x) * 2,
    "hook before a view": lambda x: normed(x).view(-1, 1, WIDTH),
    "written without gradients": lambda x: halved(x * 2.0),
    "masked": lambda x: x * (torch.arange(WIDTH) % 3 > 0),
    "underflow": lambda x: x * 1e-300 * 1e-30,
    "heads": lambda x: sar.nn.relu(x.view(-1, 1, WIDTH)),
}


def case_change(group: Any, path: str, change: Change, zeros: str) -> list[Tensor]:
    part = Part(group, path, sar.Policy(zeros=zeros))
    x, w = part.node_rows(inputs(torch.float64)[0]), torch.ones(5, WIDTH, dtype=torch.float64)
    w = (w + torch.arange(WIDTH) % 5).requires_grad_()
    out = part.graph.aggregate(change(sar.nn.relu(x @ w)), "sum")
    out.square().sum().backward()
    return [out.detach(), x.grad, w.grad]


@pytest.mark.parametrize("name", CHANGES)
def test_what_else_is_done_to_rows_of_a_relu(name: str, partitioned: Cutter) -> None:
    path = partitioned(mixed(), 3, "random")
    found = [run_threads(3, case_change, path, CHANGES[name], zeros) for zeros in ("send", "skip")]
    for sent, skipped_ in zip(*found):
        assert all(torch.equal(a, b) for a, b in zip(sent, skipped_, strict=True))


def case_hooked_later(group: Any, path: str) -> None:
    part = Part(group, path, POLICY)
    rows = sar.nn.relu(part.node_rows(inputs(torch.float64)[0]))
    out = part.graph.aggregate(rows, "sum")
    normed(rows)
    with pytest.raises(sar.NotSupportedError, match="a hook, or retain_grad, on rows"):
        out.sum().backward()


def test_a_hook_after_the_sum_is_refused(partitioned: Cutter) -> None:
    run_threads(2, case_hooked_later, partitioned(mixed(), 2, "random"))


def case_differ(group: Any, path: str) -> Any:
    policy = sar.Policy(zeros="skip" if group.rank == 1 else "send")
    part = Part(group, path, policy)
    x = part.node_rows(inputs(torch.float32)[0])
    with pytest.raises(ValueError, match="what goes without zeros"):
        part.graph.aggregate(x.relu(), "sum")


def test_ranks_that_differ_are_told(partitioned: Cutter) -> None:
    run_threads(3, case_differ, partitioned(mixed(), 3, "random"))
