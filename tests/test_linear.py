"""Sums with the fewest rows on the wire: the cover, what travels, and unchanged results."""

from __future__ import annotations

from typing import Any

import dgl
import pytest
import torch
from harness import run_threads
from harness.compare import assert_close
from harness.covering import by_pairs
from harness.graphs import ETYPE_HOMO, GraphArrays, mixed
from harness.parts import Cutter, joined, load_all
from torch import Tensor

import sar


def matching_size(edges: list[tuple[int, int]]) -> int:
    """Of a largest matching, by augmenting paths, one source after the other."""
    partner: dict[int, int] = {}

    def augment(u: int, seen: set[int]) -> bool:
        for source, v in edges:
            if source == u and v not in seen:
                seen.add(v)
                if v not in partner or augment(partner[v], seen):
                    partner[v] = u
                    return True
        return False

    return sum(augment(u, set()) for u in {u for u, _ in edges})


def rows_of(name: str, graph: GraphArrays, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(graph.total_nodes, 5, generator=generator, dtype=torch.float64).to(dtype)


def reference(graph: GraphArrays, op: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = rows_of("x", graph, dtype).requires_grad_()
    whole = dgl.graph(next(iter(graph.edges.values())), num_nodes=graph.total_nodes)
    whole.srcdata["x"] = x
    whole.update_all(dgl.function.copy_u("x", "m"), getattr(dgl.function, op)("m", "out"))
    out = whole.dstdata["out"]
    (out * rows_of("dout", graph, dtype)).sum().backward()
    return out.detach(), x.grad


def case_sum(group: Any, path: str, graph: GraphArrays, op: str, policy: Any, dtype: Any) -> tuple:
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    sharded = sar.construct_full_graph(data, policy=policy)
    nids = data.node_features["_N/orig_id"]
    x = rows_of("x", graph, dtype)[nids].requires_grad_()
    sharded.aggregate(x, op)  # what is built on first use is not counted
    marks = [group.counters.sent_bytes]
    out = sharded.aggregate(x, op)
    marks.append(group.counters.sent_bytes)
    (out * rows_of("dout", graph, dtype)[nids]).sum().backward()
    marks.append(group.counters.sent_bytes)
    return nids, out.detach(), x.grad, marks[1] - marks[0], marks[2] - marks[1]


def sums(path: str, size: int, *args: Any) -> tuple[Tensor, Tensor, list[int]]:
    """Rows and gradients in original order, bytes sent forward and backward."""
    ranks = run_threads(size, case_sum, path, *args)
    nids, total = [one[0] for one in ranks], args[0].total_nodes
    out, grad = (joined([one[i] for one in ranks], nids, total) for i in (1, 2))
    return out, grad, [sum(one[i] for one in ranks) for i in (3, 4)]


def fewest_rows(path: str, size: int) -> int:
    """Counted from the files: a largest matching for each pair of ranks."""
    total = 0
    for data in load_all(path, size):
        shard = data.edges[ETYPE_HOMO]
        for peer in range(size):
            span = slice(shard.offsets[peer], shard.offsets[peer + 1])
            if peer != data.part_id:
                edges = zip(shard.src[span].tolist(), shard.dst[span].tolist(), strict=True)
                total += matching_size(list(edges))
    return total


@by_pairs(
    cut=[(2, "coarsen"), (3, "random"), (4, "adversarial")],
    op=["sum", "mean"],
    dtype=[torch.float64, torch.float32],
)
def test_sums_equal_dgl_and_bytes_the_matching(
    cut: tuple[int, str], op: str, dtype: torch.dtype, partitioned: Cutter
) -> None:
    graph, size = mixed(), cut[0]
    path, want = partitioned(graph, *cut), reference(graph, op, dtype)
    expected = fewest_rows(path, size) * 5 * dtype.itemsize
    for rounds in range(1, size):
        out, grad, sent = sums(path, size, graph, op, sar.Policy(rounds=rounds), dtype)
        assert_close(out, want[0], "sum", dtype)
        assert_close(grad, want[1], "gradient", dtype)
        assert sent == [expected, expected]


def test_a_rank_of_another_mind_is_named(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        policy = sar.Policy(exchange="pull" if group.rank else "auto")
        graph = sar.construct_full_graph(data, policy=policy)
        with pytest.raises(ValueError, match=r"ranks differ; .*\(8, 1\), \(8, 0\)"):
            graph.aggregate(torch.ones(graph.num_nodes(), 2), "sum")

    run_threads(2, case)
