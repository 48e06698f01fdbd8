"""Seed edges that no rank draws: which edges are left out, and what telling it costs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from harness import run_threads
from harness.covering import by_pairs
from harness.graphs import ETYPE_HOMO, GraphArrays, hetero, homogeneous, mixed
from harness.parts import Cutter

import sar
from sar.comm import Group
from sar.sampling import LinkNeighborLoader

OPTIONS: list[dict[str, Any]] = [
    {}, {"direction": "out"}, {"topology": "replicated", "bulk": 3}, {"disjoint": True},
    {"replace": True, "direction": "out", "disjoint": True, "shuffle": True},
]  # fmt: skip
BATCH, HEAD = 256, (2 + 2) * 8  # seeds, bytes of an exchange's status and sizes


def both_ways() -> GraphArrays:
    src, dst = mixed().edges[ETYPE_HOMO]
    return homogeneous("both-ways", 57, torch.cat([src, dst]), torch.cat([dst, src]))


def with_reverse() -> GraphArrays:
    """Some edges of a relation come the other way round in another one."""
    graph = hetero()
    etype, (src, dst) = next(iter(graph.edges.items()))
    back = etype[2], "back", etype[0]
    edges = {**graph.edges, back: (dst[::2].clone(), src[::2].clone())}
    data = {one: graph.edge_data[one] for one in graph.edges}
    data[back] = {name: rows[::2].clone() for name, rows in graph.edge_data[etype].items()}
    return GraphArrays("with-reverse", graph.num_nodes, edges, graph.node_data, data)


def drawn(group: Group, path: str, etype: Any, options: dict) -> list[tuple[set, dict]]:
    """By step: seed pairs, and the edges of the first hop; all by original ids."""
    data, steps = sar.load_partition_data(path), list[tuple[set, dict]]()
    with LinkNeighborLoader(
        data, [4], (etype, None), as_="tensors", batch_size=9, seed=3, **options
    ) as loader:
        for batch in loader:
            ids, links = batch.node_ids, batch.links
            seeds = set(zip(ids[etype[0]][links.src].tolist(), ids[etype[2]][links.dst].tolist()))
            found = dict[Any, Counter]()
            for one, (src, dst, _) in batch.edges[0].items():
                ends = [ids[one[0]][src].tolist(), ids[one[2]][dst].tolist()]
                trees = batch.trees[one[2]][dst].tolist() if batch.trees else [0] * len(src)
                found[one] = Counter(zip(trees, *ends))
            steps.append((seeds, found))
    return steps


@by_pairs(
    kind=["self", "reverse", "reverse relation"],
    options=OPTIONS,
    cut=[(2, "random"), (4, "adversarial")],
)
def test_what_is_drawn_less_the_seed_edges_of_all_ranks(
    kind: str, options: dict, cut: tuple[int, str], partitioned: Cutter
) -> None:
    graph = with_reverse() if kind == "reverse relation" else both_ways()
    etype, more = next(iter(graph.edges)), {"exclude": kind.partition(" ")[0]}
    gone_of = {etype: False}
    if kind == "reverse relation":
        more["reverse_etype"] = (etype[2], "back", etype[0])
        gone_of[etype[2], "back", etype[0]] = True
    path = partitioned(graph, *cut)
    whole = run_threads(cut[0], drawn, path, etype, options)
    left = run_threads(cut[0], drawn, path, etype, options | more)
    missing = 0
    for step in range(len(whole[0])):
        pairs = set[tuple[int, int]]().union(*(rank[step][0] for rank in whole))
        turned = {(dst, src) for src, dst in pairs}
        for rank in range(cut[0]):
            for one, found in whole[rank][step][1].items():
                gone = (turned if gone_of.get(one) else pairs) if one in gone_of else set()
                gone = gone | turned if kind == "reverse" else gone
                want = Counter({edge: n for edge, n in found.items() if edge[1:] not in gone})
                assert left[rank][step][1][one] == want
                missing += found.total() - want.total()
    assert missing


def sent(group: Group, path: str, exclude: str | None) -> int:
    """Bytes that this rank sends in an epoch of one step."""
    data = sar.load_partition_data(path)
    with LinkNeighborLoader(
        data, [0], exclude=exclude, as_="tensors", fields={}, batch_size=BATCH, prefetch=0, bulk=1
    ) as loader:
        counters = loader._exchange.group.counters
        before = counters.sent_bytes
        assert [batch.batch_size for batch in loader] == [BATCH]
        return counters.sent_bytes - before


@pytest.mark.parametrize("exclude", ["self", "reverse"])
def test_bytes_of_excluded_pairs_do_not_grow_with_the_ranks(
    exclude: str, partitioned: Cutter
) -> None:
    """A rank has ``BATCH`` seeds: it sends their pairs once a direction, and a head to each."""
    for size in (2, 4, 8, 16):
        count = size * BATCH
        src = torch.arange(count)
        graph = homogeneous(f"arcs-{size}", count, src, (src * 7 + 1) % count)
        path = partitioned(graph, size, [int(node) % size for node in range(count)])
        plain = run_threads(size, sent, path, None)
        told = run_threads(size, sent, path, exclude)
        pairs = 8 * BATCH * (2 if exclude == "reverse" else 1)
        for before, after in zip(plain, told):
            assert 0 < after - before <= pairs + HEAD * (size - 1)
