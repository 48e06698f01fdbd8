"""Sums with the fewest rows on the wire: the cover, what travels, and unchanged results."""

from __future__ import annotations

from typing import Any

import dgl
import numpy as np
import pytest
import torch
from harness import run_threads
from harness.compare import assert_close
from harness.covering import by_pairs
from harness.graphs import mixed
from harness.parts import Cutter, joined, load_all
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sar
from sar.partition.arrays import ETYPE_HOMO, GraphArrays
from sar.partition.cover import cover_size, pulled_sources

ENDS = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, 12)), max_size=40)
    )
)


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


@given(ENDS)
@settings(max_examples=200, deadline=None)
def test_the_cover_covers_and_is_as_small_as_a_matching(case: tuple) -> None:
    num_src, edges = case
    src, dst = np.asarray(edges, dtype=np.int32).reshape(-1, 2).T
    pulled = pulled_sources(src, dst, num_src)
    assert pulled.shape == (num_src,) and pulled.dtype == bool
    slots = {v for u, v in edges if not pulled[u]}
    assert all(pulled[u] or v in slots for u, v in edges)
    assert int(pulled.sum()) + len(slots) == cover_size(src, dst, pulled) == matching_size(edges)


def long_path(length: int) -> list[tuple[int, int]]:
    """One source more than destinations; every alternating path goes through all of them."""
    return [(i, i) for i in range(length)] + [(i + 1, i) for i in range(length)]


@pytest.mark.parametrize(
    ("edges", "pulled", "slots"),
    [
        ([(0, v) for v in range(9)], 1, 0),  # one source of many
        ([(u, 0) for u in range(9)], 0, 1),  # one destination of many
        ([(u, v) for u in range(4) for v in range(7)], 4, 0),
        ([(u, v) for u in range(7) for v in range(4)], 0, 4),
        ([(0, v) for v in range(9)] + [(u, 9) for u in range(1, 9)], 1, 1),
        (long_path(3000), 0, 3000),
    ],
)
def test_covers_of_known_graphs(edges: list, pulled: int, slots: int) -> None:
    src, dst = np.asarray(edges, dtype=np.int32).T
    found = pulled_sources(src, dst, int(src.max()) + 1)
    assert (int(found.sum()), cover_size(src, dst, found)) == (pulled, pulled + slots)


def stars() -> GraphArrays:
    """Parts {0..5}, {6..11}, {12..17}: 0 -> all of the second, all of the first -> 12, and each
    of the second -> each of the third. Edges inside parts as well, one of them twice."""
    pairs = [(0, v) for v in range(6, 12)] + [(u, 12) for u in range(6)]
    pairs += [(u, v) for u in range(6, 12) for v in range(12, 15)] + [(1, 2), (1, 2), (7, 7)]
    src, dst = torch.tensor(pairs).t().contiguous()
    return GraphArrays(
        "stars", {"_N": 18}, {ETYPE_HOMO: (src, dst)}, {"_N": {}}, {}
    ).with_orig_ids()


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
    cut=[(2, "metis"), (3, "random"), (4, "adversarial")],
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


def test_stars_send_one_row_and_empty_pairs_none(partitioned: Cutter) -> None:
    graph = stars()
    path = partitioned(graph, 3, [0] * 6 + [1] * 6 + [2] * 6)
    want = reference(graph, "mean", torch.float64)
    for rounds, structure in ((1, "both"), (2, "both"), (1, "one"), (2, "one")):
        policy = sar.Policy(rounds=rounds, structure=structure)
        out, grad, sent = sums(path, 3, graph, "mean", policy, torch.float64)
        assert_close(out, want[0], "mean", torch.float64)
        assert_close(grad, want[1], "gradient", torch.float64)
        assert sent == [(1 + 1 + 3) * 5 * 8] * 2


def test_a_rank_of_another_mind_is_named(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        policy = sar.Policy(exchange="pull" if group.rank else "auto")
        graph = sar.construct_full_graph(data, policy=policy)
        with pytest.raises(ValueError, match=r"ranks differ; .*\(8, 1\), \(8, 0\)"):
            graph.aggregate(torch.ones(graph.num_nodes(), 2), "sum")

    run_threads(2, case)
