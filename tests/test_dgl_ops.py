"""Every function of ``dgl.ops`` on a sharded graph gives DGL's rows and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl
import pytest
import torch
from dgl import ops
from harness import run_threads
from harness.graphs import hetero, looped, mixed, to_dgl
from harness.parts import Cutter
from harness.rows import eager
from test_edge_inputs import assert_exact
from torch import Tensor

import sar

GRAPHLESS = {"segment_reduce", "segment_softmax", "segment_mm", "gather_mm", "gather_mm_idx_b"}


def operators() -> dict[str, Callable[[Any, dict[str, Tensor]], Tensor]]:
    """A call of each public function, with rows of the sides that its name tells."""
    calls: dict[str, Callable[[Any, dict[str, Tensor]], Tensor]] = {}
    for name in sorted(set(ops.__all__ if hasattr(ops, "__all__") else dir(ops))):
        function = getattr(ops, name)
        words = name.split("_")
        if not callable(function) or name.startswith("_") or name in GRAPHLESS:
            continue
        if words[0] == "copy" and words[1] in "uve":
            calls[name] = lambda g, x, f=function, side=words[1]: f(g, x[side])
        elif words[0] in "uve" and len(words) >= 3:
            calls[name] = lambda g, x, f=function, w=words: f(g, x[w[0]], x[w[2]])
    for norm_by in ("dst", "src"):
        calls[f"edge_softmax-{norm_by}"] = lambda g, x, n=norm_by: ops.edge_softmax(
            g, x["e"], norm_by=n
        )
    calls["gspmm"] = lambda g, x: ops.gspmm(g, "mul", "sum", x["u"], x["scalar"])
    calls["gsddmm"] = lambda g, x: ops.gsddmm(g, "dot", x["heads"], x["heads2"])
    calls["gspmm-copy_lhs"] = lambda g, x: ops.gspmm(g, "copy_lhs", "mean", x["u"], None)
    calls["gsddmm-uv"] = lambda g, x: ops.gsddmm(g, "mul", x["u"], x["scalar"], "u", "e")
    return calls


CALLS = operators()


def columns(node: Tensor, edge: Tensor) -> dict[str, Tensor]:
    """Rows, none near zero, from [n, 6] and [E]."""
    u, w = node + 4, edge.unsqueeze(1)
    return {
        "u": u,
        "v": u.flip(1) * 2,
        "e": w * torch.arange(1, 7),
        "scalar": w,
        "heads": u.view(-1, 2, 3),
        "heads2": u.view(-1, 2, 3) * 0.5 + 1,
    }


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_of_dgl(name: str, partitioned: Cutter) -> None:
    def run(graph: Any, x: Tensor, w: Tensor, _: Tensor) -> Tensor:
        rows = eager(CALLS[name](graph, columns(x, w)))
        if len(rows) != graph.num_edges():
            return rows
        graph.edata["r"] = (
            rows * w.view(-1, *[1] * (rows.dim() - 1)) / 64
        )  # small, as sines are taken
        graph.update_all(dgl.function.copy_e("r", "m"), dgl.function.sum("m", "out"))
        return graph.dstdata["out"]

    arrays = mixed() if "softmax" in name or "sum" in name else looped()
    assert_exact(arrays, lambda: (run, None), partitioned, (3,), block_bytes=4096)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_rows_without_edges(reduce: str, partitioned: Cutter) -> None:
    """DGL's operators give infinity there, its ``update_all`` 0."""
    whole = to_dgl(mixed())
    want = getattr(ops, f"copy_u_{reduce}")(whole, whole.ndata["feat"])

    def case(group: Any) -> tuple[Tensor, Tensor]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph, x = sar.construct_full_graph(data), data.node_features["_N/feat"]
        return getattr(ops, f"copy_u_{reduce}")(graph, x), data.node_features["_N/orig_id"]

    path = partitioned(mixed(), 2, "random")
    for got, ids in run_threads(2, case):
        torch.testing.assert_close(got, want[ids])


def test_operators_on_several_relations_name_the_way(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph = sar.construct_full_graph(data)
        x = torch.ones(graph.num_src_nodes("user"), 2)
        with pytest.raises(NotImplementedError, match=r"graph\[etype\]"):
            dgl.ops.copy_u_sum(graph, [x, x, x])
        out = dgl.ops.copy_u_sum(graph["buys"], x)
        assert torch.equal(out[:, 0], graph["buys"].in_degrees().float())

    path = partitioned(hetero(), 2, "random")
    run_threads(2, case)
