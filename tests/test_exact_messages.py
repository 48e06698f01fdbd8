"""update_all and apply_edges for every built-in message, and for user functions, against DGL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl
import pytest
import torch
from dgl import function as fn
from harness import WorkerPool, assert_close, run_threads
from harness.covering import by_pairs
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, GraphArrays, mixed, to_dgl
from harness.parts import Cutter, global_order
from harness.rows import Part, eager, join_edges, join_nodes, whole
from test_edge_inputs import assert_exact
from torch import Tensor, nn

import sar

BINARY = [
    f"{lhs}_{op}_{rhs}"
    for op in ("add", "sub", "mul", "div", "dot")
    for lhs in "uve"
    for rhs in "uve"
    if lhs != rhs
]
MESSAGES = ["copy_u", "copy_e", *BINARY]
REDUCES = ["sum", "mean", "max", "min"]
# Feature shapes of u, v and e: equal, one number an edge, scalars, broadcast on both sides.
SHAPES = {
    "equal": ((5,), (5,), (5,)),
    "scalar edge": ((5,), (5,), (1,)),
    "no feature dimension": ((), (), ()),
    "broadcast": ((3, 1), (1, 4), (3, 4)),
    "scalar node": ((2, 3), (1,), (1, 1)),
}
POLICIES = [
    sar.Policy(rounds=1),
    sar.Policy(rounds=2, rematerialize=False),
    sar.Policy(),
    sar.Policy(rounds=1, rematerialize=False, block_bytes=64),
    sar.Policy(block_bytes=1000),
]


def message_function(name: str) -> Any:
    make = getattr(fn, name)
    if name.startswith("copy"):
        return make(name[-1], "m")
    return make(name[0], name[-1], "m")


def inputs(graph: GraphArrays, shapes: tuple) -> dict[str, Tensor]:
    num_nodes, num_edges = graph.num_nodes[NTYPE_HOMO], len(graph.edges[ETYPE_HOMO][0])
    counts = {"u": num_nodes, "v": num_nodes, "e": num_edges}
    return {
        side: whole(counts[side], shape, seed)
        for seed, (side, shape) in enumerate(zip("uve", shapes, strict=True))
    }


def weight_of(rows: Tensor) -> Tensor:
    """Different for every element, so that no gradient vanishes by symmetry."""
    steps = torch.arange(rows[:1].numel(), dtype=torch.float64).view(rows[:1].shape)
    return 1 + 0.37 * torch.cos(steps + 1)


def run_message(graph: Any, name: str, reduce: str, sides: dict[str, Tensor], ids: Tensor) -> dict:
    """Output of update_all (or, for ``edges``, apply_edges) and the gradients of all inputs."""
    used = set(name[-1]) if name.startswith("copy") else {name[0], name[-1]}
    with graph.local_scope():
        graph.srcdata["u"], graph.dstdata["v"] = sides["u"], sides["v"]
        graph.edata["e"] = sides["e"]
        if reduce == "edges":
            graph.apply_edges(message_function(name))
            out = eager(graph.edata["m"])
        else:
            graph.update_all(message_function(name), getattr(fn, reduce)("m", "out"))
            out = graph.dstdata["out"]
    scale = weight_of(out) * (1 + 0.1 * ids.double().cos()).view(-1, *[1] * (out.dim() - 1))
    wanted = [sides[side] for side in sorted(used)]
    grads = torch.autograd.grad((out * scale.to(out.dtype)).sum(), wanted)
    return {"out": out.detach(), **dict(zip(sorted(used), grads, strict=True))}


def case_message(
    group: Any, path: str, name: str, reduces: list[str], shapes: list[str], policy: sar.Policy,
    dtype: torch.dtype,
) -> dict:  # fmt: skip
    part = Part(group, path, policy)
    graph = mixed()
    results: dict[str, Any] = {"nodes": part.nodes, "edges": part.edges}
    for shape in shapes:
        values = {k: v.to(dtype) for k, v in inputs(graph, SHAPES[shape]).items()}
        sides = {s: part.node_rows(values[s]) for s in "uv"} | {"e": part.edge_rows(values["e"])}
        for reduce in reduces:
            ids = part.edges if reduce == "edges" else part.nodes
            found = run_message(part.graph, name, reduce, sides, ids)
            assert found["out"].dtype == dtype
            results |= {f"{shape} {reduce} {key}": value for key, value in found.items()}
    return results


def expected_message(
    name: str, reduces: list[str], shapes: list[str], dtype: torch.dtype
) -> dict[str, Tensor]:
    graph = mixed()
    one = to_dgl(graph)
    results = {}
    for shape in shapes:
        values = inputs(graph, SHAPES[shape])
        sides = {k: v.to(dtype).double().requires_grad_() for k, v in values.items()}
        for reduce in reduces:
            ids = torch.arange(one.num_edges() if reduce == "edges" else one.num_nodes())
            found = run_message(one, name, reduce, sides, ids)
            results |= {f"{shape} {reduce} {key}": value for key, value in found.items()}
    return results


def shapes_for(name: str) -> list[str]:
    """DGL's dot wants equal last dimensions; a broadcast copy is a copy."""
    if name.startswith("copy"):
        return ["equal", "no feature dimension", "broadcast"]
    return ["equal"] if "dot" in name else list(SHAPES)


def check_message(parts: list[dict], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    graph = mixed()
    for key, expected in want.items():
        *_, reduce, what = key.split()
        on_edges = what == "e" or (reduce == "edges" and what == "out")
        join = join_edges if on_edges else join_nodes
        total = len(graph.edges[ETYPE_HOMO][0]) if on_edges else graph.num_nodes[NTYPE_HOMO]
        got = join(parts, key, total)
        assert_close(got, expected, key, dtype)


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_and_reduction(name: str, partitioned: Cutter) -> None:
    number = MESSAGES.index(name)
    size, method = [(3, "random"), (4, "adversarial"), (2, "coarsen"), (1, "random")][number % 4]
    path = partitioned(mixed(), size, method)
    policy, shapes = POLICIES[number % len(POLICIES)], shapes_for(name)
    reduces = [*REDUCES, "edges"]
    parts = run_threads(size, case_message, path, name, reduces, shapes, policy, torch.float64)
    want = expected_message(name, reduces, shapes, torch.float64)
    check_message(parts, want, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["copy_u", "copy_e", "u_mul_e", "u_add_v", "v_sub_u", "u_dot_v", "e_div_u"]
)
def test_messages_keep_their_dtype(name: str, dtype: torch.dtype, partitioned: Cutter) -> None:
    path = partitioned(mixed(), 3, "random")
    shapes = shapes_for(name)[:2]
    # Rounding makes ties in bfloat16, which DGL gives to other edges: see the tests of ties.
    reduces = ["sum", "mean", "edges"] + (["max", "min"] if dtype == torch.float32 else [])
    parts = run_threads(3, case_message, path, name, reduces, shapes, sar.Policy(rounds=2), dtype)
    check_message(parts, expected_message(name, reduces, shapes, dtype), dtype)


# aggregate(), the same without DGL's names.


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("op", REDUCES)
def test_aggregate(op: str, weighted: bool, partitioned: Cutter) -> None:
    def run(graph: Any, x: Tensor, w: Tensor, _: Tensor) -> Tensor:
        if not isinstance(graph, dgl.DGLGraph):
            return graph.aggregate(x, op, edge_weight=w if weighted else None)
        graph.srcdata["x"], graph.edata["w"] = x, w.unsqueeze(1)
        message = fn.u_mul_e("x", "w", "m") if weighted else fn.copy_u("x", "m")
        graph.update_all(message, getattr(fn, op)("m", "out"))
        return graph.dstdata["out"]

    assert_exact(mixed(), lambda: (run, None), partitioned, (3,), rounds=2)


# User functions with parameters of their own.


class Scaled(torch.autograd.Function):
    """A product whose second factor no torch function shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, factor = ctx.saved_tensors
        return grad * factor, (grad * x).sum(0)


class EdgeNet(nn.Module):
    """A message of all three sides through layers that belong to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.both = nn.Linear(5, 6), nn.Linear(12, 6)
        self.edge, self.free = nn.Linear(5, 6, bias=False), nn.Parameter(torch.ones(6) * 0.7)
        self.hidden = nn.Parameter(torch.linspace(-1, 1, 6))
        self.double()

    def forward(self, graph: Any, u: Tensor, v: Tensor, e: Tensor, reduce: str) -> Tensor:
        derived = torch.tanh(self.free * 2)  # captured, but no leaf: its history lies outside
        hidden = torch.tanh(self.hidden * 2)  # its history is walked again by every block

        def message(edges: Any) -> dict[str, Tensor]:
            source = Scaled.apply(torch.tanh(self.source(edges.src["u"])), hidden)
            joint = torch.cat([source * derived, self.edge(edges.data["e"])], 1)
            return {"m": self.both(joint) * edges.dst["v"][:, :1], "other": source}

        with graph.local_scope():
            graph.srcdata["u"], graph.dstdata["v"], graph.edata["e"] = u, v, e
            if reduce == "edges":
                graph.apply_edges(message)
                return eager(torch.cat([graph.edata["m"], graph.edata["other"]], 1))
            graph.update_all(message, getattr(fn, reduce)("m", "out"))
            return graph.dstdata["out"] + derived


def edge_net() -> EdgeNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return EdgeNet()


@pytest.mark.parametrize("reduce", [*REDUCES, "edges"])
def test_user_messages_with_parameters(reduce: str, partitioned: Cutter) -> None:
    def make() -> tuple[Any, nn.Module]:
        net = edge_net()

        def run(graph: Any, x: Tensor, w: Tensor, types: Tensor) -> Tensor:
            e = w.unsqueeze(1) * torch.arange(1, 6)
            out = net(graph, x[:, :5], x[:, 1:].cos(), e, reduce)
            if reduce != "edges":
                return out
            graph.edata["m"] = out
            graph.update_all(fn.copy_e("m", "m"), fn.sum("m", "out"))
            return graph.dstdata["out"]

        return run, net

    for sizes, policy in (
        ((3, 4), {"rounds": 1}),
        ((3, 4), {"rematerialize": False, "block_bytes": 64}),
        ((1, 4), {"block_bytes": 1000}),
    ):
        assert_exact(mixed(), make, partitioned, sizes, **policy)


# apply_edges on a subset.


@pytest.mark.parametrize("kind", ["builtin", "udf", "keep"])
def test_apply_edges_on_some_edges(kind: str, partitioned: Cutter) -> None:
    """Those of types 1 and 2; others have zeros, or what they had."""

    def make() -> tuple[Any, nn.Module]:
        module = nn.Linear(6, 1, bias=False).double()
        nn.init.constant_(module.weight, 2.0)

        def run(graph: Any, x: Tensor, w: Tensor, types: Tensor) -> Tensor:
            graph.srcdata["x"], graph.dstdata["y"] = x, x * x
            if kind == "keep":
                graph.edata["m"] = w.unsqueeze(1).repeat(1, 6)
            for number in (1, 2):
                message: Any = fn.u_sub_v("x", "y", "m")
                if kind != "builtin":
                    message = lambda edges, n=number: {  # noqa: E731
                        "m": edges.src["x"] * module.weight * n + edges.dst["y"]
                    }
                graph.apply_edges(message, (types == number).nonzero().view(-1))
            graph.update_all(fn.copy_e("m", "s"), fn.sum("s", "sum"))
            graph.update_all(fn.copy_e("m", "s"), fn.max("s", "max"))
            return torch.cat([graph.dstdata["sum"], graph.dstdata["max"]], 1)

        return run, module

    assert_exact(mixed(), make, partitioned, (3, 4), rounds=1)


def test_some_edges_of_scopes_and_copies(partitioned: Cutter) -> None:
    """Functions read columns as they were when they were given, and edges that are not theirs keep
    what they had, be it lazy."""
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> None:
        graph = Part(group, path).graph
        every, some = torch.arange(graph.num_edges()), torch.tensor([0, 2])

        def write(graph: Any, eids: Tensor, value: float) -> None:
            graph.ndata["x"] = torch.full((graph.num_nodes(), 1), value)
            graph.apply_edges(lambda edges: {"m": edges.src["x"]}, eids)

        write(graph, every, 2.0)
        with graph.local_scope():
            write(graph, some, 5.0)
        copy = graph.local_var()
        write(copy, some, 5.0)
        graph.ndata["x"] = torch.zeros(graph.num_nodes(), 1)
        copy.apply_edges(lambda edges: {"m": edges.data["m"] * 3}, some[1:])
        want = torch.full((graph.num_edges(), 1), 2.0)
        assert torch.equal(graph.edata["m"].materialize(), want)
        want[0], want[2] = 5.0, 15.0
        assert torch.equal(copy.edata["m"].materialize(), want)

    run_threads(2, case)


# What differs from DGL on purpose: ties, and values that are not finite.

LEVELS = 3  # distinct values, so that most maxima are shared


def tied_inputs(graph: GraphArrays) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(9)
    nodes = torch.randint(LEVELS, (graph.num_nodes[NTYPE_HOMO], 4), generator=rng).double()
    edges = torch.randint(1, LEVELS, (len(graph.edges[ETYPE_HOMO][0]), 4), generator=rng).double()
    return nodes, edges


def case_ties(
    group: Any, path: str, reduce: str, weighted: bool, policy: sar.Policy, dtype: torch.dtype
) -> dict:
    part = Part(group, path, policy)
    nodes, edges = (t.to(dtype) for t in tied_inputs(mixed()))
    x, e = part.node_rows(nodes), part.edge_rows(edges)
    part.graph.srcdata["x"], part.graph.edata["e"] = x, e
    message = fn.u_mul_e("x", "e", "m") if weighted else fn.copy_u("x", "m")
    part.graph.update_all(message, getattr(fn, reduce)("m", "out"))
    out = part.graph.dstdata["out"]
    out.sum().backward()
    results = {"nodes": part.nodes, "edges": part.edges, "out": out.detach(), "x": x.grad}
    return results | ({"e": e.grad} if weighted else {})


def dgl_in_global_order(path: str, size: int, reduce: str, weighted: bool) -> dict[str, Tensor]:
    """float64 DGL on the graph rebuilt in global-id order, mapped back to original ids."""
    graph = mixed()
    nodes, edges = tied_inputs(graph)
    src, dst, eids = global_order(path, size, ETYPE_HOMO)
    from harness.parts import load_all

    nids = torch.cat([p.node_features[f"{NTYPE_HOMO}/orig_id"] for p in load_all(path, size)])
    one = dgl.graph((src, dst), num_nodes=len(nids))
    x, e = nodes[nids].requires_grad_(), edges[eids].requires_grad_()
    one.ndata["x"], one.edata["e"] = x, e
    message = fn.u_mul_e("x", "e", "m") if weighted else fn.copy_u("x", "m")
    one.update_all(message, getattr(fn, reduce)("m", "out"))
    one.ndata["out"].sum().backward()
    want = {"out": torch.empty_like(nodes), "x": torch.empty_like(nodes), "e": torch.zeros(0)}
    want["out"][nids], want["x"][nids] = one.ndata["out"].detach(), x.grad
    if weighted:
        want["e"] = torch.empty_like(edges)
        want["e"][eids] = e.grad
    return want


@by_pairs(
    reduce=["max", "min"],
    weighted=[False, True],
    dtype=[torch.float64, torch.float32, torch.bfloat16],
)
def test_ties_go_to_the_smallest_global_edge_id(
    reduce: str, weighted: bool, dtype: torch.dtype, partitioned: Cutter
) -> None:
    graph = mixed()
    num_nodes, num_edges = graph.num_nodes[NTYPE_HOMO], len(graph.edges[ETYPE_HOMO][0])
    cuts = [(1, "coarsen"), (2, "random"), (4, "random"), (8, "coarsen")]
    for number, (size, method) in enumerate(cuts):
        path = partitioned(graph, size, method)
        want = dgl_in_global_order(path, size, reduce, weighted)
        for policy in (POLICIES[number], POLICIES[number + 1]):
            parts = run_threads(size, case_ties, path, reduce, weighted, policy, dtype)
            for key, join, total in (
                ("out", join_nodes, num_nodes),
                ("x", join_nodes, num_nodes),
                ("e", join_edges, num_edges),
            ):
                if key != "e" or weighted:
                    assert torch.equal(join(parts, key, total).double(), want[key]), (key, size)


def case_not_finite(group: Any, path: str, values: Tensor, reduce: str, weighted: bool) -> dict:
    part = Part(group, path, sar.Policy(rounds=2))
    x = part.node_rows(values, grad=False)
    weight = torch.ones(part.graph.num_edges(), 1, dtype=values.dtype) if weighted else None
    return {"nodes": part.nodes, "out": part.graph.aggregate(x, reduce, edge_weight=weight)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce", REDUCES)
def test_infinities_and_nan_pass_through(
    reduce: str, dtype: torch.dtype, partitioned: Cutter
) -> None:
    graph = mixed()
    src, dst = graph.edges[ETYPE_HOMO]
    values = inputs(graph, SHAPES["equal"])["u"]
    values[::5, 0], values[1::5, 1], values[2::5, 2] = torch.nan, torch.inf, -torch.inf
    values[:, 3] = -torch.inf  # every message is: the result is, too, and 0 without messages
    values[::7, 4], values[1::7, 4] = torch.inf, -torch.inf  # their sum is NaN
    values = values.to(dtype)
    want = torch.zeros_like(values)
    for node in dst.unique().tolist():
        messages = values[src[dst == node]].double()
        result = {
            "sum": messages.sum(0), "mean": messages.mean(0),
            "max": messages.amax(0), "min": messages.amin(0),
        }[reduce]  # fmt: skip
        want[node] = result.to(dtype)
    for weighted in (False, True):
        path = partitioned(graph, 3, "random")
        parts = run_threads(3, case_not_finite, path, values, reduce, weighted)
        got = join_nodes(parts, "out", len(values))
        assert_close(got, want.double(), reduce, dtype)
        assert (got[[n for n in range(len(want)) if n not in set(dst.tolist())]] == 0).all()


def case_columns(group: Any, path: str) -> dict:
    """What the graph says about itself, and that scopes forget."""
    part = Part(group, path)
    graph = part.graph
    graph.ndata["h"] = torch.ones(graph.num_nodes(), 1)
    with graph.local_scope():
        graph.ndata["h"] = torch.zeros(graph.num_nodes(), 1)
        graph.ndata["new"] = torch.zeros(graph.num_nodes())
        graph.edata["w"] = torch.zeros(graph.num_edges())
    assert "new" not in graph.ndata and "w" not in graph.edata
    assert bool((graph.ndata["h"] == 1).all())
    other = graph.local_var()
    other.ndata["h"] = torch.zeros(graph.num_nodes(), 1)
    assert bool((graph.ndata["h"] == 1).all())
    eids = graph.edata[dgl.EID]
    assert torch.equal(eids, eids.sort().values)
    return {
        "nodes": part.nodes,
        "edges": part.edges,
        "in": graph.in_degrees(),
        "out": graph.out_degrees(),
        "counts": (
            graph.num_nodes(), graph.num_edges(), graph.num_nodes_global(),
            graph.num_edges_global(), graph.num_src_nodes(), graph.num_dst_nodes(),
        ),
        "flags": (
            graph.is_homogeneous, graph.is_block, graph.idtype, str(graph.device), graph.batch_size,
            graph.ntypes, graph.etypes, graph.canonical_etypes,
        ),
    }  # fmt: skip


@pytest.mark.parametrize(("size", "method"), [(1, "coarsen"), (3, "random"), (4, "adversarial")])
def test_counts_degrees_and_columns(size: int, method: str, partitioned: Cutter) -> None:
    graph = mixed()
    one = to_dgl(graph)
    parts = run_threads(size, case_columns, partitioned(graph, size, method))
    total = one.num_nodes()
    assert torch.equal(join_nodes(parts, "in", total), one.in_degrees())
    assert torch.equal(join_nodes(parts, "out", total), one.out_degrees())
    for part in parts:
        nodes, edges, *whole_counts, src, dst = part["counts"]
        assert (nodes, edges) == (len(part["nodes"]), len(part["edges"]))
        assert whole_counts == [total, one.num_edges()] and src == dst == nodes
        assert part["flags"][:5] == (True, False, torch.int64, "cpu", 1)
        assert part["flags"][5:] == (["_N"], ["_E"], [ETYPE_HOMO])


BAD: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "unknown column": (
        lambda g: g.update_all(fn.copy_u("nothing", "m"), fn.sum("m", "o")), KeyError, "nothing"),
    "shapes that do not fit": (
        lambda g: g.update_all(fn.u_add_v("a", "b", "m"), fn.sum("m", "o")), ValueError, "a"),
    "another message name": (
        lambda g: g.update_all(fn.copy_u("a", "m"), fn.sum("x", "o")), ValueError, "x"),
    "a reduce function on a reversed graph": (
        lambda g: g.reverse().update_all(
            fn.copy_u("a", "m"), lambda nodes: {"o": nodes.mailbox["m"].sum(1)}
        ),
        ValueError, "reversed"),
    "rows of another graph": (
        lambda g: g.ndata.__setitem__("c", torch.zeros(g.num_nodes() + 1)), ValueError, "rows"),
    "integer features": (
        lambda g: g.aggregate(torch.zeros(g.num_nodes(), 2, dtype=torch.int64)),
        TypeError, "int64"),
    "unknown reduction": (
        lambda g: g.aggregate(torch.zeros(g.num_nodes(), 2), "median"), ValueError, "median"),
    "too many rows": (
        lambda g: g.aggregate(torch.zeros(g.num_nodes() + 1, 2)), ValueError, "rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_say_what_is_wrong(name: str, partitioned: Cutter) -> None:
    call, kind, word = BAD[name]

    def case(group: Any) -> str:
        graph = Part(group, path).graph
        graph.ndata["a"] = torch.zeros(graph.num_nodes(), 3)
        graph.ndata["b"] = torch.zeros(graph.num_nodes(), 4)
        with pytest.raises(kind, match=word) as error:
            call(graph)
        return str(error.value)

    path = partitioned(mixed(), 2, "random")
    assert all(run_threads(2, case))


def case_autocast(group: Any, path: str) -> tuple[set, set]:
    """Types of the messages in the forward and in the backward pass."""
    part = Part(group, path)
    graph, seen = part.graph, []
    x = part.node_rows(inputs(mixed(), SHAPES["equal"])["u"].float())
    weight = torch.ones(5, 5, requires_grad=True)

    def message(edges: Any) -> dict[str, Tensor]:
        out = torch.tanh(edges.src["x"] @ weight)
        seen.append(out.dtype)
        return {"m": out}

    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph.srcdata["x"] = x
        graph.update_all(message, fn.sum("m", "out"))
    forward, out = set(seen), graph.dstdata["out"]
    seen.clear()
    out.float().sum().backward()
    assert seen, "backward computes the messages again"
    return forward, set(seen)


def test_backward_computes_under_the_autocast_of_the_forward(partitioned: Cutter) -> None:
    kinds = {torch.bfloat16}
    assert run_threads(2, case_autocast, partitioned(mixed(), 2, "random")) == [(kinds, kinds)] * 2


def case_random(group: Any, path: str) -> int:
    part = Part(group, path)
    graph = part.graph
    graph.srcdata["x"] = part.node_rows(inputs(mixed(), SHAPES["equal"])["u"])
    graph.apply_edges(lambda edges: {"m": torch.rand(len(edges.src["x"])).double()})
    return len(part.edges) - len(eager(graph.edata["m"]).unique())


def test_blocks_draw_random_numbers_of_their_own(
    partitioned: Cutter, processes: WorkerPool
) -> None:
    """In processes, because threads share torch's random state."""
    assert max(processes.run(3, case_random, partitioned(mixed(), 3, "random"))) <= 1


def test_what_a_tried_function_draws_is_not_missing_afterwards(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 1, "random")

    def case(group: Any) -> None:
        graph, following = Part(group, path).graph, []
        graph.srcdata["x"] = torch.ones(graph.num_nodes(), 2)
        for count in (1, 5):
            torch.manual_seed(0)
            graph.apply_edges(lambda edges, n=count: {"m": edges.src["x"] * torch.rand(n).sum()})
            following.append(torch.rand(1))
        assert torch.equal(*following)

    run_threads(1, case)


FILLS = [
    {},
    {"fill_data": 3},
    {"fill_data": "sum", "edge_feat_names": ["w", "v"]},
    {"fill_data": "mean", "edge_feat_names": ["w"]},
]


def loops_of(graph: Any, options: dict[str, Any]) -> dict[str, Tensor]:
    """What nodes get over their edges, with loops added by DGL's function."""
    graph = dgl.remove_self_loop(dgl.add_self_loop(graph, **options))
    graph = dgl.add_self_loop(graph, **options)
    sums = {}
    for name in ("w", "v"):
        graph.update_all(fn.copy_e(name, "m"), fn.sum("m", "sum"))
        sums[name] = graph.dstdata["sum"]
    return sums


@pytest.mark.parametrize("options", FILLS, ids=str)
def test_self_loops_by_dgls_functions(options: dict[str, Any], partitioned: Cutter) -> None:
    def run(graph: Any, x: Tensor, w: Tensor, _: Tensor) -> Tensor:
        w = w.detach()
        graph.edata["w"], graph.edata["v"] = w, torch.stack([w, w], 1)
        sums = loops_of(graph, options)
        if not isinstance(graph, dgl.DGLGraph):
            with pytest.raises(ValueError, match="fill_data: got 'prod', expected a number or one"):
                dgl.add_self_loop(graph, fill_data="prod")
        return torch.cat([sums["w"].view(-1, 1), sums["v"]], 1) * x[:, :1]

    assert_exact(mixed(), lambda: (run, None), partitioned, (3,))
