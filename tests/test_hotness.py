"""Expected draws against loops in plain Python, and where nodes come to lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sar.partition import progress
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from sar.partition.column import map_tensor
from sar.partition.cut import assign, find_method
from sar.partition.methods.base import Contiguous, CutOptions, Random
from sar.partition.methods.hotness import Draws, Hotness, place

HOMO = ({NTYPE_HOMO: 23}, [ETYPE_HOMO])
HETERO = (
    {"a": 11, "none": 0, "b": 17},
    [("a", "r", "b"), ("b", "s", "a"), ("b", "t", "b"), ("b", "u", "none")],
)
KINDS = {"one type": HOMO, "several": HETERO}


def random_graph(kind: str, num_edges: int, seed: int = 0, masks: bool = True) -> GraphArrays:
    """A graph with loops and multi-edges; a mask on the last node type."""
    rng = np.random.default_rng(seed)
    counts, etypes = KINDS[kind]
    edges = {}
    for src, relation, dst in etypes:
        most = num_edges if counts[src] and counts[dst] else 0
        ends = (rng.integers(0, max(counts[one], 1), most) for one in (src, dst))
        edges[src, relation, dst] = tuple(map(torch.from_numpy, ends))
    last = list(counts)[-1]
    data = {last: {"train_mask": torch.from_numpy(rng.random(counts[last]) < 0.4)}}
    return GraphArrays("g", dict(counts), edges, data if masks else {}).validate()


def seeds_of(graph: GraphArrays) -> np.ndarray:
    """bool [N] of the mask, types one after another."""
    masks = [
        graph.node_data.get(ntype, {}).get("train_mask", torch.zeros(count, dtype=torch.bool))
        for ntype, count in graph.num_nodes.items()
    ]
    return torch.cat(masks).numpy()


def chances(graph: GraphArrays, fanout: int) -> list[tuple[int, int, float]]:
    """Source, destination and the probability that the destination draws it, of each edge."""
    found, offsets = [], graph.node_offsets()
    for (src_type, _, dst_type), (src, dst) in graph.edges.items():
        ends = dst.tolist()
        for u, v in zip(src.tolist(), ends):
            chance = 1.0 if fanout < 0 else min(1.0, fanout / ends.count(v))
            found.append((u + offsets[src_type], v + offsets[dst_type], chance))
    return found


def expected_reached(
    graph: GraphArrays, parts: np.ndarray, seeds: np.ndarray, num_parts: int, fanouts: list[int]
) -> list[list[float]]:
    """A walk forward, for one part after another."""
    total = [[0.0] * num_parts for _ in parts]
    for p in range(num_parts):
        now = [float(seed and part == p) for seed, part in zip(seeds, parts)]
        for fanout in [*fanouts, None]:
            for node, times in enumerate(now):
                total[node][p] += times
            if fanout is not None:
                new = [0.0] * len(parts)
                for u, v, chance in chances(graph, fanout):
                    new[u] += now[v] * chance
                now = new
    return total


def expected_near(
    graph: GraphArrays, parts: np.ndarray, num_parts: int, fanouts: list[int]
) -> list[list[float]]:
    """What each node reaches as the only seed, by the part that owns it."""
    found = []
    for node in range(len(parts)):
        alone = np.arange(len(parts)) == node
        reached = expected_reached(graph, np.zeros_like(parts), alone, 1, fanouts)
        row = [0.0] * num_parts
        for other, (times,) in enumerate(reached):
            row[parts[other]] += times - (other == node)
        found.append(row)
    return found


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(list(KINDS)), st.integers(0, 60), st.integers(1, 8),
    st.lists(st.integers(-1, 4), max_size=3), st.integers(0, 99),
)  # fmt: skip
def test_draws_are_those_of_loops(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    num_edges: int,
    num_parts: int,
    fanouts: list[int],
    seed: int,
) -> None:
    graph, folder = random_graph(kind, num_edges, seed), tmp_path_factory.mktemp("draws")
    rng, seeds = np.random.default_rng(seed), seeds_of(graph)
    parts = rng.integers(0, num_parts, graph.total_nodes).astype(np.int16)
    draws = Draws(graph, fanouts, num_parts, folder)
    for _ in range(2):  # nothing is left of what was computed before
        reached = draws.reached(parts, seeds).copy()
        expected = expected_reached(graph, parts, seeds, num_parts, fanouts)
        np.testing.assert_allclose(reached, expected, rtol=1e-5)
        near = draws.near(parts).copy()
        np.testing.assert_allclose(near, expected_near(graph, parts, num_parts, fanouts), rtol=1e-5)
    owned = [reached[parts == p].sum() - seeds[parts == p].sum() for p in range(num_parts)]
    np.testing.assert_allclose(near[seeds].sum(0), owned, rtol=1e-4, atol=1e-4)


def test_draws_of_mapped_edges_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph("several", 60)
    parts, seeds = np.arange(graph.total_nodes, dtype=np.int16) % 3, seeds_of(graph)
    expected = Draws(graph, (2, 3), 3, tmp_path).reached(parts, seeds).copy()
    monkeypatch.setattr(progress, "BLOCK", 7)
    for number, (etype, ends) in enumerate(graph.edges.items()):
        paths = [tmp_path / f"{number}-{side}.npy" for side in "sd"]
        for path, ids in zip(paths, ends):
            np.save(path, ids.numpy())
        graph.edges[etype] = tuple(map(map_tensor, paths))
    assert np.array_equal(Draws(graph, (2, 3), 3, tmp_path).reached(parts, seeds), expected)


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
    graph = random_graph(kind, 150, masks=masks)
    for num_parts in range(1, 9):
        for base in (Random(), Contiguous()):
            parts = assign(graph, num_parts, Hotness((3, 2), base=base))
            check_balance(graph, parts, num_parts)
            again = assign(graph, num_parts, Hotness((3, 2), base=base))
            assert np.array_equal(parts, again)


def test_by_name_it_begins_with_a_cut() -> None:
    graph = random_graph("one type", 100)
    method = find_method("hotness")
    assert isinstance(method, Hotness) and method.base.name == "coarsen"
    parts = assign(graph, 3, "hotness", balance=["train"])
    check_balance(graph, parts, 3)
    assert np.array_equal(parts, assign(graph, 3, "hotness"))


def test_without_training_nodes_all_are() -> None:
    graph = random_graph("one type", 100, masks=False)
    expected = assign(graph, 4, Hotness(base=Random()))
    for value in (True, False):  # a mask of none, too
        mask = torch.full((graph.total_nodes,), value)
        graph.node_data = {NTYPE_HOMO: {"train_mask": mask}}
        assert np.array_equal(assign(graph, 4, Hotness(base=Random())), expected)


@pytest.mark.parametrize("kind", list(KINDS))
def test_without_edges(kind: str) -> None:
    graph = random_graph(kind, 0)
    check_balance(graph, assign(graph, 3, Hotness(base=Random())), 3)
    graph.edges = {}
    check_balance(graph, assign(graph, 3, Hotness(base=Random())), 3)


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
    options = CutOptions(4, tmp_path)
    seeds = seeds_of(graph)
    parts = Hotness((-1,), rounds=0, base=_Alternate()).assign(graph, options)
    assert np.array_equal(parts, np.arange(graph.total_nodes) % 4), "a group for each part"
    parts = Hotness((-1,), rounds=0, base=Contiguous()).assign(graph, options)
    fitted = Contiguous().assign(graph, options)[seeds]
    moved = parts[seeds] != fitted
    assert np.bincount(parts[seeds]).tolist() == [5] * 4 and moved.sum() == np.sum(
        np.maximum(np.bincount(fitted, minlength=4) - 5, 0)
    )


def test_rounds_bring_groups_together() -> None:
    graph = groups(3, 8, 30)
    parts = assign(graph, 3, Hotness((-1,), base=Random()), seed=1)
    src, dst = (one.numpy() for one in graph.edges[ETYPE_HOMO])
    first = assign(graph, 3, Hotness((-1,), rounds=0, base=Random()), seed=1)
    assert (parts[src] != parts[dst]).sum() < (first[src] != first[dst]).sum() / 2


def test_the_most_decided_choose_first() -> None:
    values = np.array([[1, 5], [1, 9], [0, 2], [0, 0], [3, 3], [7, 0]], np.float32)
    parts = np.array([0, 0, 0, 0, 1, 0], np.int16)
    moving = np.ones(6, bool)
    place(values, parts, moving, moving, [6])
    assert parts.tolist() == [1, 1, 1, 0, 0, 0]  # the equal ones come last: one part has no room
    values[:] = 0
    parts[:] = [1, 1, 0, 0, 1, 0]
    place(values, parts, moving, moving, [6])
    assert parts.tolist() == [1, 1, 0, 0, 1, 0], "nobody draws them: they stay"


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


class _Alternate(Contiguous):
    name = "alternate"

    def assign(self, graph: GraphArrays, options: CutOptions) -> np.ndarray:
        return np.arange(graph.total_nodes) % options.num_parts
