"""Rows of other ranks for layers of one's own: what one process gives, with its gradients."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from harness import WorkerPool
from harness.graphs import mixed, sample
from harness.parts import Cutter
from harness.rows import Part, whole
from harness.threads import run_threads
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import sar
from sar.partition.arrays import ETYPE_HOMO

POLICIES = {
    "strict": sar.Policy(),
    "one-shot": sar.Policy(rounds=1),
    "two rounds": sar.Policy(rounds=2),
    "kept": sar.Policy(rematerialize=False),
}


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def ends_of(part: Part, arrays: Any) -> tuple[Tensor, Tensor]:
    """Both ends of this rank's edges, as ids of the graph that was cut."""
    src, dst = arrays.edges[ETYPE_HOMO]
    return src[part.edges], dst[part.edges]


@pytest.mark.parametrize(
    ("ranks", "cut"), [(1, "random"), (2, "random"), (3, "random"), (4, "adversarial")]
)
@pytest.mark.parametrize("name", ["mixed", "no_edges", "star", "loops", "mostly_isolated"])
def test_halo_has_the_rows_that_edges_start_in(
    name: str, ranks: int, cut: str, partitioned: Cutter
) -> None:
    arrays = sample(name)
    values = whole(arrays.total_nodes, (3, 2), seed=1)
    factors = whole(len(arrays.edges[ETYPE_HOMO][0]), (3, 2), seed=2)
    src, dst = arrays.edges[ETYPE_HOMO]
    want = torch.zeros_like(values).index_add(0, src, factors).index_add(0, dst, factors.cos())
    path = partitioned(arrays, ranks, cut)

    def case(group: Any) -> None:
        part = Part(group, path, POLICIES["one-shot" if ranks == 3 else "strict"])
        x = part.node_rows(values)
        rows = torch.cat([x, sar.halo(part.graph, x)])
        mine = sar.local_edges(part.graph)
        assert mine.dtype == torch.int64 and mine.shape == (2, part.graph.num_edges())
        theirs = ends_of(part, arrays)
        assert torch.equal(rows[mine[0]], values[theirs[0]])
        assert torch.equal(x[mine[1]], values[theirs[1]])
        assert len(rows[len(x) :].unique(dim=0)) == len(rows) - len(x)  # each once
        own = factors[part.edges]
        loss = (rows[mine[0]] * own).sum() + (x[mine[1]] * own.cos()).sum()
        loss.backward(retain_graph=True)
        close(x.grad, want[part.nodes])
        loss.backward()
        close(x.grad, 2 * want[part.nodes])

    run_threads(ranks, case)


def attention(rows: Tensor, x: Tensor, src: Tensor, dst: Tensor, score: Any) -> Tensor:
    """Softmax-weighted means, by hand; 0 where no edge ends."""
    weights = torch.nn.functional.leaky_relu(score(torch.cat([rows[src], x[dst]], 1))).exp()
    total = x.new_zeros(len(x), 1).index_add(0, dst, weights)
    out = torch.zeros_like(x).index_add(0, dst, weights * rows[src])
    return out / total.clamp(min=1e-9)


def test_attention_by_hand_in_two_layers(partitioned: Cutter) -> None:
    """Halo used twice, once recomputed by a checkpoint, as one process computes it."""
    arrays = mixed()
    values = whole(arrays.total_nodes, (4,), seed=3)
    torch.manual_seed(0)
    score = torch.nn.Linear(8, 1).double()

    def model(halo: Any, edges: Tensor, x: Tensor) -> Tensor:
        def layer(x: Tensor) -> Tensor:
            return attention(torch.cat([x, halo(x)]), x, *edges, score).tanh()

        return layer(checkpoint(layer, x, use_reentrant=False)) + layer(x)

    x = values.clone().requires_grad_()
    out = model(lambda x: x[:0], torch.stack(arrays.edges[ETYPE_HOMO]), x)
    out.square().sum().backward()
    want = score.weight.grad.clone()
    path = partitioned(arrays, 3, "random")

    def case(group: Any) -> None:
        part = Part(group, path)
        mine = part.node_rows(values)
        got = model(part.graph.halo, part.graph.local_edges(), mine)
        close(got, out[part.nodes])
        found = torch.autograd.grad(got.square().sum(), [mine, score.weight])
        close(found[0], x.grad[part.nodes])
        close(group.all_reduce(found[1]), want)

    run_threads(3, case)


class Gated(torch.nn.Module):
    """Messages gated by both ends and the edge, by parameters that no argument names."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(9, 4).double()
        self.drop = torch.nn.Dropout(0.0)

    def forward(
        self, rows: Tensor, src: Tensor, dst: Tensor, positions: Tensor, x: Tensor, w: Tensor
    ) -> Tensor:
        both = torch.cat([rows[src], x[dst], w[positions]], dim=1)
        gated = rows[src] * torch.sigmoid(self.gate(self.drop(both)))
        return rows.new_zeros(len(x), 4).index_add(0, dst, gated)


@pytest.mark.parametrize(
    ("ranks", "cut", "policy"),
    [
        (1, "random", "strict"), (2, "random", "kept"), (3, "random", "one-shot"),
        (4, "random", "two rounds"), (4, "adversarial", "strict"), (4, "adversarial", "kept"),
    ],
)  # fmt: skip
def test_rounds_are_summed(ranks: int, cut: str, policy: str, partitioned: Cutter) -> None:
    arrays = mixed()
    values = whole(arrays.total_nodes, (4,), seed=3)
    weights = whole(len(arrays.edges[ETYPE_HOMO][0]), (1,), seed=4)
    torch.manual_seed(0)
    model = Gated()

    x, w = (t.clone().requires_grad_() for t in (values, weights))
    out = model(x, *arrays.edges[ETYPE_HOMO], torch.arange(len(w)), x, w)
    want = torch.autograd.grad(out.square().sum(), [x, w, model.gate.weight])
    path = partitioned(arrays, ranks, cut)

    def case(group: Any) -> None:
        part = Part(group, path, POLICIES[policy])
        x, w = part.node_rows(values), part.edge_rows(weights)
        got = part.graph.sum_rounds(model, x, x, w)
        close(got, out[part.nodes])
        for _ in range(2):
            found = torch.autograd.grad(
                got.square().sum(), [x, w, model.gate.weight], retain_graph=True
            )
            close(found[0], want[0][part.nodes])
            close(found[1], want[1][part.edges])
            close(group.all_reduce(found[2]), want[2])

    run_threads(ranks, case)


@pytest.mark.parametrize(
    ("ranks", "cut"), [(1, "random"), (2, "random"), (3, "random"), (4, "adversarial")]
)
@pytest.mark.parametrize("original", [True, False])
def test_rows_of_any_nodes(ranks: int, cut: str, original: bool, partitioned: Cutter) -> None:
    """What indexing gives in one process; no id on a rank, each of them, and one many times."""
    arrays = mixed()
    values = whole(arrays.total_nodes, (2, 3), seed=1)
    count = len(values)
    asked = [torch.arange(0), torch.tensor(count - 1).expand(9), torch.randint(count, (4, 5))]
    asked = [asked[(number + ranks) % 3] for number in range(ranks)]
    factors = [whole(len(ids), (), seed=9) for ids in asked]
    x = values.clone().requires_grad_()
    for ids, factor in zip(asked, factors, strict=True):
        (x[ids].sum((-1, -2)).movedim(0, -1) * factor).sum().backward()
    path = partitioned(arrays, ranks, cut)

    def case(group: Any) -> None:
        part = Part(group, path)
        mine, ids = part.node_rows(values), asked[group.rank]
        names = torch.cat(group_ids(group, part.nodes))  # by the partitioning's own ids
        given = ids if original else names.argsort()[ids]
        got = sar.fetch(part.graph, mine, given.int(), original=original)
        assert torch.equal(got, values[ids])
        (got.sum((-1, -2)).movedim(0, -1) * factors[group.rank]).sum().backward()
        assert x.grad is not None
        close(mine.grad, x.grad[part.nodes])

    run_threads(ranks, case)


def group_ids(group: Any, ids: Tensor) -> list[Tensor]:
    """Tensors of several lengths, of all ranks."""
    counts = group.all_gather(torch.tensor(len(ids)))
    padded = torch.zeros(int(max(counts)), dtype=torch.int64)
    padded[: len(ids)] = ids
    return [one[:n] for one, n in zip(group.all_gather(padded), counts, strict=True)]


class Doubled(torch.autograd.Function):
    """Reads its weight where no torch function is seen."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return 2 * rows * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        return 2 * grad * weight, (2 * grad * rows).sum(0)


USES = {
    "a parameter": lambda w, rows: rows * w,
    "with a hook": lambda w, rows: rows * w,
    "what was computed of it": lambda w, rows: rows * w.exp(),
    "inside a function": lambda w, rows: Doubled.apply(rows, w),
    "both": lambda w, rows: Doubled.apply(rows, w) * w,
    "through itself alone": lambda w, rows: w.expand(len(rows), -1),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("trained", [True, False])
def test_parameters_that_no_argument_names(use: str, trained: bool, partitioned: Cutter) -> None:
    arrays = mixed()
    values = whole(arrays.total_nodes, (4,), seed=3)
    src, dst = arrays.edges[ETYPE_HOMO]

    def weight() -> tuple[Tensor, Tensor]:
        leaf = torch.linspace(0.5, 1, 4, dtype=torch.float64).requires_grad_()
        if use == "with a hook":
            leaf.register_hook(lambda grad: 3 * grad)
        return leaf, leaf.sin() if use.startswith("what was") else leaf

    x, (leaf, made) = values.clone().requires_grad_(trained), weight()
    scale = torch.tensor(2.0, dtype=torch.float64).requires_grad_(trained)
    out = torch.zeros_like(x).index_add(0, dst, USES[use](made, x[src]).square() * scale)
    (out.square().sum() + made.sum()).backward()
    path = partitioned(arrays, 4, "adversarial")

    def case(group: Any) -> None:
        part, (mine, w) = Part(group, path), weight()
        x2 = part.node_rows(values, trained)

        factor = scale.detach().clone().requires_grad_(trained)

        def function(rows: Tensor, src: Tensor, dst: Tensor, _: Tensor, factor: Tensor) -> Tensor:
            sums = torch.zeros_like(x2, requires_grad=False)
            if not len(src):
                return sums  # no parameter is seen on a rank without edges
            return sums.index_add(0, dst, USES[use](w, rows[src]).square() * factor)

        got = sar.sum_rounds(part.graph, function, x2, factor)
        close(got, out[part.nodes])
        (got.square().sum() + (w.sum() if group.rank == 0 else 0)).backward()
        for one, want in ((mine, leaf), (factor, scale)):
            if want.grad is not None:
                grad = torch.zeros_like(want) if one.grad is None else one.grad
                close(group.all_reduce(grad), want.grad)
        if trained:
            close(x2.grad, (0 * x if x.grad is None else x.grad)[part.nodes])

    run_threads(4, case)


def products(rows: Tensor, src: Tensor, dst: Tensor, _: Any, x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, dst, torch.tanh(rows[src] * x[dst]))


def by_halo(graph: Any, x: Tensor) -> Tensor:
    return products(torch.cat([x, sar.halo(graph, x)]), *sar.local_edges(graph), None, x)


def by_rounds(graph: Any, x: Tensor) -> Tensor:
    return sar.sum_rounds(graph, products, x, x)


def of_all(graph: Any, x: Tensor) -> Tensor:
    return sar.fetch(graph, x, torch.arange(graph.num_nodes_global())).tanh().sum(0) * x


def alone(call: Any, values: Tensor) -> tuple[Tensor, Tensor]:
    """What ``call`` gives in one process, and the gradient of its squares' sum."""
    x = values.clone().requires_grad_()
    src, dst = mixed().edges[ETYPE_HOMO]
    out = x.tanh().sum(0) * x if call is of_all else products(x, src, dst, None, x)
    return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]


CALLS = {"halo": by_halo, "sum_rounds": by_rounds, "fetch": of_all}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_make_it_again(name: str, reentrant: bool, partitioned: Cutter) -> None:
    values = whole(57, (4,), seed=3)
    want, dwant = alone(CALLS[name], values)
    path = partitioned(mixed(), 4, "adversarial")

    def case(group: Any) -> None:
        part = Part(group, path)
        x = part.node_rows(values)

        def call(x: Tensor) -> Tensor:
            return CALLS[name](part.graph, x)

        out = checkpoint(call, x, use_reentrant=reentrant)
        close(out, want[part.nodes])
        out.square().sum().backward()
        close(x.grad, dwant[part.nodes])
        with pytest.raises(sar.NotSupportedError, match="create_graph"):
            torch.autograd.grad(call(x).square().sum(), x, create_graph=True)

    run_threads(4, case)


def case_of_processes(group: Any, path: str, values: Tensor) -> dict[str, tuple[Tensor, ...]]:
    part = Part(group, path, POLICIES["two rounds"])
    found = {}
    for name, call in CALLS.items():
        x = part.node_rows(values)
        out = call(part.graph, x)
        found[name] = part.nodes, out.detach(), torch.autograd.grad(out.square().sum(), x)[0]
    return found


def test_processes(partitioned: Cutter, either: WorkerPool) -> None:
    values = whole(57, (4,), seed=3)
    ranks = either.run(3, case_of_processes, partitioned(mixed(), 3, "random"), values)
    for name, call in CALLS.items():
        want, dwant = alone(call, values)
        for nodes, out, dx in (rank[name] for rank in ranks):
            close(out, want[nodes])
            close(dx, dwant[nodes])


def case_killed(group: Any, path: str, name: str, when: str) -> tuple[str, float]:
    """Rank 1 is killed; the others tell what they got, and when."""
    part = Part(group, path)
    x = part.node_rows(whole(57, (4,), seed=3))
    out = CALLS[name](part.graph, x)
    begun = time.monotonic()
    if group.rank == 1 and when == "forward":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        again = CALLS[name](part.graph, x) if when == "forward" else out
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        again.sum().backward()
    except sar.CommError as error:
        return str(error), time.monotonic() - begun
    return "nothing", 0.0


@pytest.mark.parametrize(
    ("name", "when"), [("halo", "forward"), ("sum_rounds", "backward"), ("fetch", "backward")]
)
def test_a_killed_rank_ends_the_others(
    name: str, when: str, partitioned: Cutter, sockets: WorkerPool
) -> None:
    path = partitioned(mixed(), 2, "random")
    results = sockets.run(2, case_killed, path, name, when, timeout=30.0, may_die={1})
    words, seconds = results[0]
    assert words.startswith("rank 0: ") and "rank 1: died or left early" in words
    assert seconds < 25, "before the timeout"


def test_random_numbers_are_those_of_forward(partitioned: Cutter) -> None:
    """Of a function that is linear in its rows, <dx, x> is the sum of the results."""
    path = partitioned(mixed(), 3, "random")

    def case(group: Any) -> None:
        part = Part(group, path)
        x = part.node_rows(whole(57, (4,), seed=3))

        drop = sar.convert_dropout(torch.nn.Sequential(torch.nn.Dropout(0.5)), part.graph)

        def dropped(rows: Tensor, src: Tensor, dst: Tensor, _: Tensor) -> Tensor:
            sums = torch.zeros(len(x), 4, dtype=rows.dtype)
            return sums.index_add(0, dst, drop(rows[src]))

        out = sar.sum_rounds(part.graph, dropped, x)
        assert not torch.allclose(out, part.graph.aggregate(x, "sum"))
        out.sum().backward()
        close(group.all_reduce((x.grad * x).sum().detach()), group.all_reduce(out.sum().detach()))

    run_threads(3, case)
