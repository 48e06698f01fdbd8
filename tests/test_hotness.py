"""Expected draws against products of matrices, and where nodes come to lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from graphs_to_cut import KINDS, small
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from harness.parts import assign
from hypothesis import given, settings
from hypothesis import strategies as st

from sar.partition.methods.base import Contiguous, CutOptions, Given, Random
from sar.partition.methods.hotness import Draws, Hotness


def seeds_of(graph: GraphArrays) -> np.ndarray:
    """bool [N] of the mask, which the last type has, if any."""
    seeds = np.zeros(graph.total_nodes, bool)
    for data in graph.node_data.values():
        seeds[len(seeds) - len(data["train_mask"]) :] = data["train_mask"]
    return seeds


def expected(graph: GraphArrays, fanouts: list[int]) -> np.ndarray:
    """[N, N] how often a node (row) is drawn for a seed (column), itself in the beginning."""
    now = total = np.eye(graph.total_nodes)
    offsets = graph.node_offsets()
    for fanout in fanouts:
        chance = np.zeros_like(total)
        for (src_type, _, dst_type), (src, dst) in graph.edges.items():
            ends = dst.tolist()
            for u, v in zip(src.tolist(), ends):
                drawn = 1.0 if fanout < 0 else min(1.0, fanout / ends.count(v))
                chance[u + offsets[src_type], v + offsets[dst_type]] += drawn
        now = chance @ now
        total = total + now
    return total


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(list(KINDS)), st.integers(0, 60), st.integers(1, 8),
    st.lists(st.integers(-1, 4), max_size=3), st.integers(0, 99),
)  # fmt: skip
def test_draws_are_those_of_matrices(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    num_edges: int,
    num_parts: int,
    fanouts: list[int],
    seed: int,
) -> None:
    graph, folder = small(kind, num_edges, seed), tmp_path_factory.mktemp("draws")
    rng, seeds = np.random.default_rng(seed), seeds_of(graph)
    parts = rng.integers(0, num_parts, graph.total_nodes).astype(np.int16)
    draws = Draws(graph, fanouts, num_parts, folder)
    drawn, owned = expected(graph, fanouts), np.eye(num_parts)[parts]
    for _ in range(2):  # nothing is left of what was computed before
        reached = drawn @ (owned * seeds[:, None])
        np.testing.assert_allclose(draws.reached(parts, seeds), reached, rtol=1e-5)
        near = (drawn - np.eye(len(parts))).T @ owned
        np.testing.assert_allclose(draws.near(parts), near, rtol=1e-5, atol=1e-6)


def check_balance(graph: GraphArrays, parts: np.ndarray, num_parts: int) -> None:
    """Every node type and its training nodes within 3 %, or as well as whole nodes can be."""
    seeds, first = seeds_of(graph), 0
    for count in graph.num_nodes.values():
        own, first = slice(first, first + count), first + count
        for found in (parts[own], parts[own][seeds[own]]):
            most = max(int(1.03 * len(found) / num_parts), -(-len(found) // num_parts))
            assert np.bincount(found, minlength=1).max() <= most


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("masks", [True, False])
def test_parts_are_balanced_and_the_same_again(kind: str, masks: bool) -> None:
    for graph in (small(kind, 0), GraphArrays("g", dict(KINDS[kind][0]), {})):
        check_balance(graph, assign(graph, 3, Hotness(base=Random())), 3)
    graph = small(kind, 150, masks=masks)
    check_balance(graph, assign(graph, 3, "hotness", balance=["train"]), 3)
    for num_parts in range(1, 9):
        for base in (Random(), Contiguous()):
            parts = assign(graph, num_parts, Hotness((3, 2), base=base))
            check_balance(graph, parts, num_parts)
            again = assign(graph, num_parts, Hotness((3, 2), base=base))
            assert np.array_equal(parts, again)


def test_without_training_nodes_all_are() -> None:
    graph = small("one type", 100, masks=False)
    expected = assign(graph, 4, Hotness(base=Random()))
    for value in (True, False):  # a mask of none, too
        mask = torch.full((graph.total_nodes,), value)
        graph.node_data = {NTYPE_HOMO: {"train_mask": mask}}
        assert np.array_equal(assign(graph, 4, Hotness(base=Random())), expected)


def groups(num_groups: int, seeds: int, drawn: int) -> GraphArrays:
    """Each seed draws all nodes of its group; groups are numbered alternately."""
    rows = np.arange(num_groups * (seeds + drawn)) % num_groups
    is_seed = np.arange(len(rows)) < num_groups * seeds
    pairs = [
        (u, v)
        for v in np.flatnonzero(is_seed)
        for u in np.flatnonzero(~is_seed & (rows == rows[v]))
    ]
    src, dst = torch.tensor(np.array(pairs)).T
    data = {NTYPE_HOMO: {"train_mask": torch.from_numpy(is_seed)}}
    return GraphArrays("groups", {NTYPE_HOMO: len(rows)}, {ETYPE_HOMO: (src, dst)}, data)


def test_training_nodes_stay_without_rounds_and_others_follow(tmp_path: Path) -> None:
    graph = groups(4, 5, 10)
    alternate = Given(np.arange(graph.total_nodes) % 4)
    parts = Hotness((-1,), rounds=0, base=alternate).assign(graph, CutOptions(4, tmp_path))
    assert np.array_equal(parts, np.arange(graph.total_nodes) % 4), "a group for each part"
    first = assign(graph, 4, Contiguous())[seeds_of(graph)]
    found = Hotness((-1,), rounds=0, base=Contiguous()).assign(graph, CutOptions(4, tmp_path))
    parts = found[seeds_of(graph)]
    assert np.bincount(parts).tolist() == [5] * 4
    assert (parts != first).sum() == np.maximum(np.bincount(first, minlength=4) - 5, 0).sum()


def test_rounds_bring_groups_together() -> None:
    graph = groups(3, 8, 30)
    parts = assign(graph, 3, Hotness((-1,), base=Random()), seed=1)
    src, dst = (one.numpy() for one in graph.edges[ETYPE_HOMO])
    first = assign(graph, 3, Hotness((-1,), rounds=0, base=Random()), seed=1)
    assert (parts[src] != parts[dst]).sum() < (first[src] != first[dst]).sum() / 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fanouts": (5, -2)}, "fanouts: got -2"),
        ({"fanouts": (5, True)}, "fanouts: got True"),
        ({"rounds": -1}, "rounds: got -1"),
        ({"rounds": 1.5}, "rounds: got 1.5"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Hotness(**arguments)
