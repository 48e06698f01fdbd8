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
from sar.partition.arrays import ETYPE_HOMO

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
    path: str,
    make: Make,
    policy: sar.Policy = DEFAULT,
    changes: int = EPOCHS,
    size: int = SIZE,
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


def test_off_sends_in_every_epoch(partitioned: Cutter) -> None:
    path = partitioned(mixed(), SIZE, "random")
    assert all(sends(path, SCALED["both"][0], sar.Policy(constant_inputs="off")))


@pytest.mark.parametrize("kind", ["both", "two hops"])
def test_other_features_are_sent_again(kind: str, partitioned: Cutter) -> None:
    make, last = SCALED[kind]
    sent = sends(partitioned(mixed(), SIZE, "random"), make, changes=last + 1)
    assert not sent[last] and all(sent[last + 1 : last + 2])


class Weighted(nn.Module):
    """A layer whose numbers a row change while its rows do not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.calls = graph_conv("both"), 0

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        self.calls += 1
        self.conv._norm = "left" if self.calls % 2 else "both"
        return self.conv(graph, x)


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


def test_rows_in_turns_are_kept_apart(partitioned: Cutter) -> None:
    sent = sends(partitioned(mixed(), SIZE, "random"), Weighted)
    assert all(sent[:4]) and not any(sent[4:])


def inferring(group: Any, path: str) -> list[Tensor]:
    """A layer in turns under the modes of torch, with features made in or outside of them."""
    part, layer = Part(group, path), filled(lambda: hops(dgl.nn.SGConv, 2))
    x = part.node_rows(features(0, EPOCHS), False)
    with torch.inference_mode():
        other = x.clone()
    outs = []
    for _ in range(4):
        outs.append(layer(part.graph, x).detach())
        with torch.inference_mode():
            outs += [layer(part.graph, x).clone(), layer(part.graph, other).clone()]
        with torch.no_grad():
            outs += [layer(part.graph, x), layer(part.graph, other)]
    return [out - outs[0] for out in outs]


def test_inference_between_epochs(partitioned: Cutter) -> None:
    for apart in run_threads(SIZE, inferring, partitioned(mixed(), SIZE, "random")):
        assert all(not one.any() for one in apart), "bit for bit"


def edge_weighted(group: Any, path: str) -> tuple[list[Tensor], Tensor, list[int]]:
    part, layer = Part(group, path), filled(lambda: graph_conv("both"))
    weight = part.edge_rows(whole_rows(len(mixed().edges[ETYPE_HOMO][0]), (), 1), False)
    x, sent, before, outs = part.node_rows(features(0, EPOCHS), False), [], 0, []
    for _ in range(4):
        outs.append(layer(part.graph, x, edge_weight=weight).detach())
        sent.append(group.counters.sent_bytes - before)
        before = group.counters.sent_bytes
    return outs, part.nodes, sent


def test_edge_weights_that_stay(partitioned: Cutter) -> None:
    layer, whole = filled(lambda: graph_conv("both")), to_dgl(mixed())
    weight = whole_rows(len(mixed().edges[ETYPE_HOMO][0]), (), 1)
    want = layer(whole, features(0, EPOCHS), edge_weight=weight)
    for outs, nodes, sent in run_threads(SIZE, edge_weighted, partitioned(mixed(), SIZE, "random")):
        assert all(sent[:2]) and not any(sent[2:])
        for out in outs:
            torch.testing.assert_close(out, want[nodes].detach(), rtol=1e-10, atol=1e-10)


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


def counting(group: Any, path: str) -> tuple[list[int], list[int]]:
    part = Part(group, path, sar.Policy(constant_inputs="mapped"))
    layer, x = filled(gat), part.node_rows(features(0, EPOCHS), False)
    sent, avoided, counters = [], [], group.counters
    for _ in range(4):
        before = counters.sent_bytes, counters.avoided_bytes
        layer(part.graph, x).sum().backward()
        sent.append(counters.sent_bytes - before[0])
        avoided.append(counters.avoided_bytes - before[1])
    return sent, avoided


def test_what_files_spare_is_counted(partitioned: Cutter) -> None:
    for sent, avoided in run_threads(SIZE, counting, partitioned(mixed(), SIZE, "random")):
        one = sent[1]
        assert avoided == [0, one, 2 * one, 2 * one] and sent[2:] == [0, 0]


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


class Pair(nn.Module):
    """Two layers that read the same rows."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.one, self.other = gat(), gat(heads)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.one(graph, x).sum(1) + self.other(graph, x).sum(1)


def test_layers_share_the_files_of_their_input(partitioned: Cutter) -> None:
    path = partitioned(mixed(), SIZE, "random")
    sent = sends(path, Pair, sar.Policy(constant_inputs="mapped"))
    alone = sends(path, gat, sar.Policy(constant_inputs="mapped"))
    assert sent[1] == 0, "the second layer's forward pass writes in the first epoch"
    assert sent[0] > 2 * alone[1] > 0 and not any(sent[1:])


def fitting(group: Any, path: str) -> tuple[int, list[int]]:
    """A budget in which 3 heads need the most rounds, and 2 fewer; the rounds of both."""
    plan = Part(group, path).graph._relation(None).plan
    sizes = [2 * 8 * heads * (WIDTH + 1) for heads in (2, 3)]
    budget = int(plan.rows_in_flight[-1]) * sizes[1]
    policy = sar.Policy(memory_budget=budget)
    return budget, [plan.fitting_rounds(policy, size) for size in sizes]


def test_layers_that_need_other_rounds_have_their_own_files(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 4, "random")
    budget, rounds = run_threads(4, fitting, path)[0]
    assert rounds[0] < rounds[1]
    policy = sar.Policy(constant_inputs="mapped", memory_budget=budget)
    sent = sends(path, lambda: Pair(heads=3), policy, size=4)
    assert all(sent[:2]) and not any(sent[2:])


def disagreeing(group: Any, path: str) -> None:
    mode = "mapped" if group.rank else "memory"
    part = Part(group, path)
    graph = part.graph.with_policy(sar.Policy(constant_inputs=mode))
    with pytest.raises(ValueError, match=r"constant_inputs.* are \[\(0,\), \(1,\), \(1,\)\]"):
        filled(gat)(graph, part.node_rows(features(0, EPOCHS), False))


def test_attention_refuses_ranks_with_different_modes(partitioned: Cutter) -> None:
    run_threads(SIZE, disagreeing, partitioned(mixed(), SIZE, "random"))


def dropping(group: Any, path: str) -> list[int]:
    part = Part(group, path, sar.Policy(constant_inputs="mapped"))
    layer, x = filled(lambda: gat(feat_drop=0.5)), part.node_rows(features(0, EPOCHS), False)
    sent, before = [], 0
    for _ in range(4):
        layer(part.graph, x).sum().backward()
        sent.append(group.counters.sent_bytes - before)
        before = group.counters.sent_bytes
    return sent


def test_feature_dropout_is_another_input_each_time(
    partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Tensor] = []
    monkeypatch.setattr(constant, "to_temporary_file", written.append)
    for sent in run_threads(SIZE, dropping, partitioned(mixed(), SIZE, "random")):
        assert sent[1:] == [sent[1]] * 3 and sent[1]
    assert not written
