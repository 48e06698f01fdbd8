"""Traffic and memory are as planned: bytes, collectives, saved tensors, buffers in flight."""

from __future__ import annotations

import gc
import time
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from dgl import function as fn
from harness import WorkerPool, models, run_threads
from harness.graphs import ETYPE_HOMO, GraphArrays, homogeneous, mixed
from harness.parts import Cutter, load_all
from harness.rows import Part, eager, whole
from harness.training import Setting, case_train, start_state
from torch import Tensor

import sar
from sar.comm.group import BufferPool

WIDTH = 5
ROW = WIDTH * 8  # bytes of a float64 row


def halo_rows(path: str, size: int) -> list[list[int]]:
    """[rank][peer] rows that the rank needs of the peer, counted from the edges."""
    counts = []
    for data in load_all(path, size):
        shard = data.edges[ETYPE_HOMO]
        spans = zip(shard.offsets[:-1], shard.offsets[1:])
        needed = [len(shard.src[a:b].unique()) for a, b in spans]
        needed[data.part_id] = 0
        counts.append(needed)
    return counts


def run(graph: Any, op: str, x: Tensor, e: Tensor) -> Tensor:
    graph.ndata["u"] = graph.ndata["v"] = x
    graph.edata["e"] = e
    *kind, name, reduce = op.split()
    if name == "udf":
        message: Any = lambda edges: {"m": torch.tanh(edges.src["u"])}  # noqa: E731
    elif name.startswith("copy"):
        message = getattr(fn, name)(name[-1], "m")
    else:
        message = getattr(fn, name)(name[0], name[-1], "m")
    if kind:  # a program of several steps
        graph.apply_edges(getattr(fn, name)(name[0], name[-1], "h"))
        graph.edata["h"] = torch.nn.functional.dropout(graph.edata["h"], 0.5)
        message = fn.copy_e("h", "m")
    if reduce == "edges":
        graph.apply_edges(message)
        return eager(graph.edata["m"])
    graph.update_all(message, getattr(fn, reduce)("m", "out"))
    return graph.dstdata["out"]


def case_traffic(
    group: Any, path: str, op: str, policy: sar.Policy, wants: tuple[bool, bool]
) -> list[tuple[int, int, int]]:
    """(sent, received, collectives) of the forward and of the backward pass."""
    part = Part(group, path, policy)
    x = part.node_rows(whole(mixed().total_nodes, (WIDTH,), 0), wants[0])
    e = part.edge_rows(whole(len(mixed().edges[ETYPE_HOMO][0]), (WIDTH,), 1), wants[1])
    if "weighted" in op:
        e = e[:, :1].detach().requires_grad_(wants[1])

    def counters() -> tuple[int, int, int]:
        c = group.counters
        return c.sent_bytes, c.received_bytes, c.collectives

    run(part.graph, op.removeprefix("weighted "), x, e)  # whatever is built on first use
    marks = [counters()]
    out = run(part.graph, op.removeprefix("weighted "), x, e)
    marks.append(counters())
    if out.requires_grad:
        out.sum().backward()
    marks.append(counters())
    return [tuple(b - a for a, b in zip(*pair)) for pair in zip(marks, marks[1:])]


# (operation, x wants a gradient, e wants one) -> passes in units of the halo: rows fetched in the
# forward pass, rows fetched again and gradients sent home in the backward pass (rematerializing).
TRAFFIC = [
    ("copy_u sum", (True, False), (1, 0, 1)),
    ("copy_u mean", (True, False), (1, 0, 1)),
    ("copy_u sum", (False, False), (1, 0, 0)),
    ("copy_u max", (True, False), (1, 0, 1)),
    ("copy_u max", (False, False), (1, 0, 0)),
    ("weighted u_mul_e sum", (True, False), (1, 0, 1)),
    ("u_mul_e sum", (True, False), (1, 0, 1)),
    ("u_mul_e sum", (False, True), (1, 1, 0)),
    ("u_mul_e sum", (True, True), (1, 1, 1)),
    ("u_add_v max", (True, False), (1, 0, 1)),
    ("v_sub_u sum", (True, False), (1, 0, 1)),
    ("u_sub_v edges", (True, False), (1, 0, 1)),
    ("u_mul_v sum", (True, False), (1, 1, 1)),
    ("udf sum", (True, False), (1, 1, 1)),
    ("copy_e sum", (False, True), (0, 0, 0)),
    ("lazy u_mul_e sum", (True, False), (1, 0, 1)),
    ("lazy u_mul_e sum", (False, True), (1, 1, 0)),
    ("lazy u_mul_e sum", (True, True), (1, 1, 1)),
    ("lazy u_add_v max", (True, False), (1, 0, 1)),
    ("lazy v_sub_u sum", (True, False), (1, 0, 1)),
    ("lazy u_mul_v sum", (True, False), (1, 1, 1)),
]


@pytest.mark.parametrize(("op", "wants", "passes"), TRAFFIC)
@pytest.mark.parametrize("rounds", [1, 2, None])
def test_bytes_and_collectives_equal_the_plan(
    op: str, wants: tuple[bool, bool], passes: tuple, rounds: int | None, partitioned: Cutter
) -> None:
    size = 4
    path = partitioned(mixed(), size, "random")
    needed = halo_rows(path, size)
    steps = rounds or size - 1
    for rematerialize in (True, False):
        policy = sar.Policy(
            rounds, rematerialize=rematerialize, constant_inputs="off", exchange="pull"
        )
        fetches, again, returns = passes
        again = again if rematerialize else 0
        for rank, found in enumerate(run_threads(size, case_traffic, path, op, policy, wants)):
            receives = ROW * sum(needed[rank])
            sends = ROW * sum(row[rank] for row in needed)
            forward, backward = found
            assert forward[:2] == (fetches * sends, fetches * receives), "forward"
            expected = (again * sends + returns * receives, again * receives + returns * sends)
            assert backward[:2] == expected, "backward: what is fetched goes home the other way"
            assert forward[2] == fetches * steps
            assert backward[2] == (again + returns) * steps


def test_all_ranks_take_part_in_equally_many_collectives(partitioned: Cutter) -> None:
    for model in ("SAGEConv-pool", "RelGraphConv-basis", "HeteroGraphConv-sum"):
        for mfgs in (False, True):
            setting = Setting(model, 2, mfgs)
            path = partitioned(setting.sample, 4, "adversarial")
            ranks = run_threads(4, case_train, path, setting, start_state(setting))
            assert len({rank.collectives for rank in ranks}) == 1


# Memory. Rank 0 owns the same nodes and edges each time; only how many rows it needs differs.

OWNED, DEGREE = 60, 4


def fan(distinct: int) -> GraphArrays:
    """Nodes 0 .. 59 get four edges each from ``distinct`` of the nodes 60 .. 299."""
    dst = torch.arange(OWNED).repeat_interleave(DEGREE)
    src = OWNED + torch.arange(OWNED * DEGREE) % distinct
    back = torch.arange(OWNED)  # and give something back
    ends = torch.cat([src, back]), torch.cat([dst, back + OWNED])
    return homogeneous(f"fan{distinct}", OWNED * (1 + DEGREE), *ends)


class CountingPool(BufferPool):
    """Knows the bytes that are out, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.out: dict[int, int] = {}
        self.most = 0

    def take(self, shape: tuple[int, ...], *how: Any) -> Tensor:
        buffer = super().take(shape, *how)
        if buffer.numel():
            self.out[buffer.data_ptr()] = buffer.numel() * buffer.element_size()
        self.most = max(self.most, sum(self.out.values()))
        return buffer

    def give(self, buffer: Tensor) -> None:
        self.out.pop(buffer.data_ptr(), None)
        super().give(buffer)


class Held:
    """A tensor that autograd holds for backward; gone as soon as autograd lets go."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def live_bytes() -> int:
    """Bytes of all tensors that Python can reach, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def settled_live_bytes() -> int:
    """The least of a few looks: gloo's thread lets go of a buffer a moment after it is done."""
    looks = []
    for _ in range(2):
        looks.append(live_bytes())
        time.sleep(0.05)
    return min(looks)


def case_saved(group: Any, path: str, model_name: str, policy: sar.Policy) -> dict[str, int]:
    """Bytes that a forward pass saves for backward, and bytes alive after it."""
    part = Part(group, path, policy)
    group.pool = CountingPool()
    model = models.make(model_name)
    x = {"_N": part.data.node_features["_N/feat"].requires_grad_()}
    edges = {name: part.data.edge_features[f"_N:_E:_N/{name}"] for name in ("weight", "type")}
    held: weakref.WeakSet[Held] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Held:
        each = Held(tensor)
        held.add(each)
        return each

    def forward() -> Tensor:
        return model([part.graph] * 2, x, [{ETYPE_HOMO: edges}] * 2)["_N"]

    forward().sum().backward()  # builds what is built on first use
    group.pool.clear()
    gc.collect()
    before = settled_live_bytes()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each.tensor):
        out = forward()
    storages = {each.tensor.untyped_storage() for each in held}
    saved = {storage.data_ptr(): storage.nbytes() for storage in storages}
    del storages
    group.pool.clear()
    after = settled_live_bytes()
    out.sum().backward()
    return {"saved": sum(saved.values()), "alive": after - before}


@pytest.mark.parametrize(
    "model", ["GraphConv-both", "SAGEConv-mean", "SAGEConv-pool", "GINConv-max", "EdgeConv",
              "RelGraphConv-basis", "SAGEConv-mean-weighted"],
)  # fmt: skip
def test_what_is_saved_does_not_depend_on_the_halo(
    model: str, partitioned: Cutter, processes: WorkerPool
) -> None:
    found = []
    for distinct in (1, OWNED * DEGREE):
        graph = fan(distinct)
        cut = [0] * OWNED + [1] * (OWNED * DEGREE)
        path = partitioned(graph, 2, cut)
        assert halo_rows(path, 2)[0][1] == distinct
        found.append(processes.run(2, case_saved, path, model, sar.Policy())[0])
    assert found[0] == found[1]


def case_window(group: Any, path: str, op: str, policy: sar.Policy) -> tuple[int, int]:
    """Most bytes of round buffers that were out at once, and the plan's own bound."""
    part = Part(group, path, policy)
    group.pool = CountingPool()
    x = part.node_rows(whole(mixed().total_nodes, (WIDTH,), 0))
    e = part.edge_rows(whole(len(mixed().edges[ETYPE_HOMO][0]), (WIDTH,), 1))
    run(part.graph, op, x, e).sum().backward()
    assert not group.pool.out, "a buffer was not given back"
    plan = part.graph._store.relations[ETYPE_HOMO].plan
    return group.pool.most, int(plan.rows_in_flight[plan.num_rounds(policy, ROW) - 1]) * ROW


@pytest.mark.parametrize(
    "op", ["copy_u sum", "copy_u max", "u_mul_v sum", "udf mean", "u_sub_v edges"]
)
@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_live_buffers_never_exceed_the_window(op: str, rounds: int, partitioned: Cutter) -> None:
    path = partitioned(mixed(), 8, "random")
    needed = halo_rows(path, 8)
    policy = sar.Policy(rounds=rounds)
    for rank, (most, bound) in enumerate(run_threads(8, case_window, path, op, policy)):
        whole_halo = ROW * (sum(needed[rank]) + sum(row[rank] for row in needed))
        assert 0 < most <= (2 if "mul_v" in op or "udf" in op else 1) * bound
        if rounds == 7 and op == "copy_u sum":
            assert most < whole_halo, "strict rounds hold less than everything"


@pytest.mark.parametrize("op", ["copy_u sum", "udf mean"])
def test_a_memory_budget_is_kept(op: str, partitioned: Cutter) -> None:
    path = partitioned(mixed(), 8, "random")
    largest = max(b for _, b in run_threads(8, case_window, path, op, sar.Policy(rounds=1)))
    # Backward fetches rows and sends gradients home at the same time; both count.
    largest *= 2 if op.startswith("udf") else 1
    for budget in (largest, largest // 2, largest * 3 // 8):
        policy = sar.Policy(memory_budget=budget)
        for most, _ in run_threads(8, case_window, path, op, policy):
            assert 0 < most <= budget


def test_a_budget_too_small_names_what_is_needed(partitioned: Cutter) -> None:
    """Two rounds of the busiest rank, what comes and what goes."""
    path = partitioned(mixed(), 4, "random")
    needed, ranks = halo_rows(path, 4), range(4)
    rounds = [[needed[r][(r + d) % 4] + needed[(r - d) % 4][r] for d in (1, 2, 3)] for r in ranks]
    least = ROW * max(a + b for one in rounds for a, b in pairwise(one))

    def case(group: Any) -> None:
        part = Part(group, path, sar.Policy(memory_budget=least - 1))
        x = part.node_rows(whole(mixed().total_nodes, (WIDTH,), 0))
        with pytest.raises(ValueError, match=f"got {least - 1} bytes.*at least {least} bytes"):
            part.graph.aggregate(x, "max")
        part.graph.with_policy(sar.Policy(memory_budget=least)).aggregate(x, "max")

    run_threads(4, case)
