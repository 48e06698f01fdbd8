"""Layers whose input stays the same train as DGL's do, and stop sending it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import dgl.nn
import pytest
import torch
from harness import run_threads
from harness.graphs import mixed, to_dgl
from harness.parts import Cutter
from harness.rows import Part
from harness.rows import whole as whole_rows
from torch import Tensor, nn

import sar
from sar.edges import constant

FEATURES, WIDTH, SIZE, EPOCHS = 6, 8, 3, 6
DEFAULT = sar.Policy()
Make = Callable[[], nn.Module]


def graph_conv(norm: str) -> nn.Module:
    return dgl.nn.GraphConv(FEATURES, WIDTH, norm, allow_zero_in_degree=True)


def hops(kind: type[nn.Module], number: int) -> nn.Module:
    options = {"allow_zero_in_degree": True} if kind is dgl.nn.SGConv else {}
    return kind(FEATURES, WIDTH, number, **options)


def gat(heads: int = 2, **options: Any) -> nn.Module:
    return dgl.nn.GATConv(FEATURES, WIDTH, heads, allow_zero_in_degree=True, **options)


def filled(make: Make) -> nn.Module:
    layer, generator = make().double(), torch.Generator().manual_seed(7)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return layer


def features(epoch: int, changes: int) -> Tensor:
    """Of all nodes; other ones from epoch ``changes`` on."""
    x = whole_rows(mixed().total_nodes, (FEATURES,), 0)
    return x * 2 if epoch >= changes else x


def train(
    graph: Any,
    layer: nn.Module,
    x: Tensor,
    nodes: Tensor,
    changes: int,
    step: Callable[[int], None],
) -> list[Tensor]:
    """What the layer gives in each epoch; ``step`` is called after each backward pass."""
    outs = []
    for epoch in range(EPOCHS):
        if epoch == changes:
            x.mul_(2)
        out = layer(graph, x)
        factor = torch.cos(nodes.double()).view(-1, *[1] * (out.dim() - 1))
        (out * factor).square().sum().backward()
        step(epoch)
        outs.append(out.detach())
    return outs


def descend(layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.grad is not None:
                parameter -= 0.002 * parameter.grad
                parameter.grad = None


def in_one_place(make: Make, changes: int) -> list[Tensor]:
    layer, x = filled(make), features(0, EPOCHS)
    nodes = torch.arange(len(x))
    return train(to_dgl(mixed()), layer, x, nodes, changes, lambda _: descend(layer))


def case(
    group: Any, path: str, make: Make, policy: sar.Policy, changes: int
) -> tuple[list[Tensor], Tensor, list[int]]:
    part, layer = Part(group, path, policy), filled(make)
    x = part.node_rows(features(0, EPOCHS), False)
    sent, before = [], 0

    def step(_: int) -> None:
        nonlocal before
        sent.append(group.counters.sent_bytes - before)
        sar.gather_grads(layer)
        descend(layer)
        before = group.counters.sent_bytes

    return train(part.graph, layer, x, part.nodes, changes, step), part.nodes, sent


def sends(
    path: str, make: Make, policy: sar.Policy = DEFAULT, changes: int = EPOCHS, size: int = SIZE
) -> list[int]:
    """Rows' bytes that rank 0 sends in each epoch, once they all gave what DGL gives."""
    ranks = run_threads(size, case, path, make, policy, changes)
    for epoch, want in enumerate(in_one_place(make, changes)):
        for outs, nodes, _ in ranks:
            torch.testing.assert_close(outs[epoch], want[nodes], rtol=1e-10, atol=1e-10)
    return ranks[0][2]


SCALED: dict[str, tuple[Make, int]] = {  # and the epoch from which on nothing is sent
    "both": (lambda: graph_conv("both"), 2),
    "left": (lambda: graph_conv("left"), 2),
    "right": (lambda: graph_conv("right"), 2),
    "one hop": (lambda: hops(dgl.nn.SGConv, 1), 2),
    "two hops": (lambda: hops(dgl.nn.SGConv, 2), 2),
    "three hops, stacked": (lambda: hops(dgl.nn.TAGConv, 3), 2),
}


@pytest.mark.parametrize("mode", ["memory", "mapped"])
@pytest.mark.parametrize("kind", SCALED)
def test_scaled_input_is_sent_until_its_sums_are_kept(
    kind: str, mode: str, partitioned: Cutter
) -> None:
    make, last = SCALED[kind]
    path = partitioned(mixed(), SIZE, "random")
    sent = sends(path, make, sar.Policy(constant_inputs=mode))
    assert all(sent[:last]) and not any(sent[last:])


@pytest.mark.parametrize("kind", ["both", "two hops"])
def test_other_features_are_sent_again(kind: str, partitioned: Cutter) -> None:
    make, last = SCALED[kind]
    sent = sends(partitioned(mixed(), SIZE, "random"), make, changes=last + 1)
    assert not sent[last] and all(sent[last + 1 : last + 2])


class Both(nn.Module):
    """Layers that read the same rows, as they are and scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(graph_conv(norm) for norm in ("right", "both"))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return sum(conv(graph, x) for conv in self.convs)


def test_rows_as_they_are_and_scaled_are_told_apart(partitioned: Cutter) -> None:
    sent = sends(partitioned(mixed(), SIZE, "random"), Both)
    assert all(sent[:2]) and not any(sent[2:])


ATTENTION: dict[str, Make] = {
    "gat": gat,
    "residual": lambda: gat(residual=True),
    "gatv2": lambda: dgl.nn.GATv2Conv(FEATURES, WIDTH, 2, allow_zero_in_degree=True),
}


@pytest.mark.parametrize("policy", [{}, {"rounds": 1}, {"rematerialize": False}], ids=str)
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_reads_its_input_from_files(kind: str, policy: dict, partitioned: Cutter) -> None:
    path = partitioned(mixed(), SIZE, "random")
    make, passes = ATTENTION[kind], 2 if policy.get("rematerialize", True) else 1
    sent = sends(path, make, sar.Policy(constant_inputs="mapped", **policy))
    assert not any(sent[2:])
    first, *later = sends(path, make, sar.Policy(**policy))
    assert first == sent[0], "the first epoch does not know yet"
    assert later == [passes * sent[1]] * (EPOCHS - 1), "nothing of others is kept in memory"
    assert sent[1] > 0, "forward writes in the second epoch, backward reads"


def test_attention_sends_other_features_again(partitioned: Cutter) -> None:
    path = partitioned(mixed(), SIZE, "random")
    sent = sends(path, gat, sar.Policy(constant_inputs="mapped"), changes=3)
    assert [rows > 0 for rows in sent] == [True, True, False, True, True, False]


def test_attention_without_room_for_files(
    partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(rows: Tensor) -> Tensor:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(constant, "to_temporary_file", full)
    path = partitioned(mixed(), SIZE, "random")
    with pytest.warns(UserWarning, match="constant_inputs: no room in a temporary file: .*No spa"):
        sent = sends(path, gat, sar.Policy(constant_inputs="mapped"))
    assert sent[1:] == [sent[1]] * (EPOCHS - 1) and sent[1]


def disagreeing(group: Any, path: str) -> None:
    mode = "mapped" if group.rank else "memory"
    part = Part(group, path)
    graph = part.graph.with_policy(sar.Policy(constant_inputs=mode))
    with pytest.raises(ValueError, match=r"constant_inputs.* are \[\(0,\), \(1,\), \(1,\)\]"):
        filled(gat)(graph, part.node_rows(features(0, EPOCHS), False))


def test_attention_refuses_ranks_with_different_modes(partitioned: Cutter) -> None:
    run_threads(SIZE, disagreeing, partitioned(mixed(), SIZE, "random"))
