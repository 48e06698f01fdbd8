"""Mini-batches from partitions, against brute force, DGL and PyG on the whole graph."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from typing import Any

import dgl
import pytest
import torch
from harness import run_threads
from harness.covering import by_pairs
from harness.graphs import ETYPE_HOMO, GraphArrays, hetero, mixed
from harness.parts import Cutter
from harness.pool import WorkerPool
from torch import Tensor

import sar
from sar.comm import Group
from sar.sampling import NeighborLoader

CUTS = [(1, "random"), (2, "coarsen"), (3, "random"), (4, "adversarial")]


def draws_of(group: Group, path: str, ntype: str, fan: list, options: dict) -> dict:
    """Original ids of the edges that two steps draw per step, hop, relation and drawing node."""
    found: dict[tuple, list[int]] = {}

    def add(etype: tuple[str, str, str], drawing: Tensor, eid: Tensor, *place: int) -> None:
        for node in drawing.unique().tolist():
            found[(*place, etype, node)] = sorted(eid[drawing == node].tolist())

    data, steps = sar.load_partition_data(path), list[Any]()
    with NeighborLoader(data, fan, ntype, batch_size=1000, seed=3, **options) as loader:
        steps += [next(iter(loader)), next(iter(loader))]
    near = 0 if "direction" in options else 2
    for step, batch in enumerate(steps):
        if options["as_"] == "dgl":
            for hop, block in enumerate(reversed(batch[2])):
                for etype in block.canonical_etypes:
                    ids = block.dstnodes[etype[2]].data[dgl.NID]
                    eid = block.edges[etype].data[dgl.EID]
                    add(etype, ids[block.edges(etype=etype)[1]], eid, step, hop)
            continue
        for etype, rows in batch.edge_data.items():
            drawn = [hop[etype] for hop in batch.edges if etype in hop]
            eids = rows["orig_eid"].split([len(one.eid) for one in drawn]) if drawn else ()
            for hop, (edges, eid) in enumerate(zip(drawn, eids)):
                add(etype, batch.node_ids[etype[near]][edges[near // 2]], eid, step, hop)
    return found


KINDS = {"blocks": {"as_": "dgl"}, "in": {"as_": "tensors"},
         "out": {"as_": "tensors", "direction": "out"}}  # fmt: skip


@by_pairs(name=["one type", "several"], kind=KINDS, fanout=[3, -1, "replace"])
def test_draws_do_not_depend_on_the_cut(
    name: str, kind: str, fanout: int | str, partitioned: Cutter
) -> None:
    """Ranks together draw what one process does for all of their seeds: edges of theirs, as many
    as there are or were asked for."""
    graph, ntype = (mixed(), "_N") if name == "one type" else (hetero(), "item")
    options, want = {**KINDS[kind], "replace": fanout == "replace"}, {}
    number = 3 if isinstance(fanout, str) else fanout
    for size, method in CUTS:
        path = partitioned(graph, size, method)
        parts = run_threads(size, draws_of, path, ntype, [number] * 2, options)
        found: dict[tuple, list[int]] = {}
        for part in parts:
            for key, edges in part.items():
                assert found.setdefault(key, edges) == edges, "two ranks, two draws"
        want = want or found
        # A seed of one rank may be a neighbor on another, which then draws for it a hop later.
        assert found == want if kind == "blocks" else want.items() <= found.items()
    near = 0 if kind == "out" else 1
    for etype, ends in graph.edges.items():
        degrees = torch.bincount(ends[near], minlength=graph.num_nodes[etype[2 * near]])
        of = {key: edges for key, edges in want.items() if key[2] == etype}
        assert etype[2 * near] != ntype or len({key[3] for key in of}) == int((degrees > 0).sum())
        for (*_, node), edges in of.items():
            assert (ends[near][edges] == node).all()
            most = int(degrees[node]) if number < 0 else min(3, int(degrees[node]))
            assert len(edges) == 3 if fanout == "replace" else len(set(edges)) == most


WEIGHTS = torch.tensor([1.0, 2.0, 0.0, 4.0, 1.0, 0.5, 3.0], dtype=torch.float64)


def inclusions(weights: list[float], fanout: int) -> list[float]:
    """Chances of each item to be among ``fanout`` that are drawn one after the other, each in
    proportion to its weight among those that are left."""
    chances = [0.0] * len(weights)
    for order in itertools.permutations(range(len(weights)), fanout):
        chance, left = 1.0, sum(weights)
        for item in order:
            chance *= weights[item] / left
            left -= weights[item]
        for item in order:
            chances[item] += chance
    return chances


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("replace", [False, True])
def test_frequencies_of_draws(replace: bool, weighted: bool, partitioned: Cutter) -> None:
    """Chi-square over many nodes and steps of what another rank draws: how often each in-edge
    comes. A seed is reached by many nodes, each of which by the same few."""
    degree, fanout, centers, epochs = 7, 3, 400, 10
    center, leaf = torch.arange(centers) + 1, torch.arange(degree)
    src = torch.cat([center, leaf.repeat(centers) + centers + 1])
    dst = torch.cat([center * 0, center.repeat_interleave(degree)])
    columns = {"w": torch.cat([torch.ones(centers), WEIGHTS.repeat(centers)])}
    columns["leaf"] = torch.cat([-torch.ones_like(center), leaf.repeat(centers)])
    nodes = {"_N": centers + degree + 1}
    graph = GraphArrays("stars", nodes, {ETYPE_HOMO: (src, dst)}, {}, {ETYPE_HOMO: columns})

    def case(group: Group) -> Counter:
        data, found = sar.load_partition_data(path), Counter()
        options = {"replace": replace, "weight_attr": "w" if weighted else None, "seed": 1}
        seed = data.node_features["_N/orig_id"] == 0
        with NeighborLoader(data, [-1, fanout], seed, as_="tensors", **options) as loader:
            for batch in itertools.chain(*[loader] * epochs):
                found.update(batch.edge_data[ETYPE_HOMO]["leaf"].tolist())
        return found

    path = partitioned(graph.with_orig_ids(), 2, [0] + [1] * centers + [0] * degree)
    counts, steps = run_threads(2, case)[0], centers * epochs
    assert counts.pop(-1) == steps
    weights = WEIGHTS.tolist() if weighted else [1.0] * degree
    chances = [fanout * w / sum(weights) for w in weights]
    chances = chances if replace else inclusions(weights, fanout)
    assert sum(counts.values()) == steps * fanout
    for edge, chance in enumerate(chances):
        spread = chance if replace else chance * (1 - chance)
        # Of each edge alone: 4 standard deviations, which 1 in 16,000 exceeds.
        assert abs(counts[edge] - steps * chance) <= 4 * (steps * spread) ** 0.5, edge


def test_uneven_ranks_take_as_many_steps(partitioned: Cutter) -> None:
    """A rank without seeds serves the others; nothing comes twice and nothing is left out, but of
    each epoch a last batch that is not full, where it is dropped."""

    def case(group: Group, path: str) -> list:
        data, found = sar.load_partition_data(path), []
        mask = torch.zeros(data.num_nodes("_N"), dtype=torch.bool)
        mask[: 11 if group.rank == 0 else 0] = True
        own = data.node_features["_N/orig_id"][mask].tolist()
        for drop_last in (False, True):
            loader = NeighborLoader(
                data, [2], mask, batch_size=4, as_="tensors", drop_last=drop_last, shuffle=True
            )
            epochs = [list(loader), list(loader)]
            seeds = [
                torch.cat([b.node_ids["_N"][: b.batch_size] for b in one]).tolist()
                for one in epochs
            ]
            assert len(set(seeds[0])) == len(seeds[0]) and set(seeds[0]) <= set(own)
            assert seeds[0] != seeds[1] or not own
            sizes = [[batch.batch_size for batch in one] for one in epochs]
            assert sizes[0] == sizes[1] and len(loader) == len(sizes[0])
            found.append((sizes[0], [batch.step for batch in epochs[1]]))
        return found

    for rank, (whole, dropped) in enumerate(
        run_threads(3, case, partitioned(mixed(), 3, [0] * 30 + [1] * 20 + [2] * 7))
    ):
        assert whole == ([0, 0, 0] if rank else [4, 4, 3], [3, 4, 5])
        assert dropped == ([0, 0] if rank else [4, 4], [2, 3])


def test_pyg_data(partitioned: Cutter) -> None:
    """With all neighbors the nodes of PyG's k-hop subgraph, and the edges that lead to seeds."""
    from torch_geometric.utils import k_hop_subgraph

    graph = mixed()
    index = torch.stack(graph.edges[ETYPE_HOMO])

    def case(group: Group, path: str) -> None:
        data = sar.load_partition_data(path)
        for batch in NeighborLoader(data, [-1, -1], batch_size=6, as_="pyg"):
            if not batch.batch_size:
                continue
            seeds = batch.n_id[: batch.batch_size]
            near, nodes = (k_hop_subgraph(seeds, k, index, num_nodes=57)[0] for k in (1, 2))
            assert torch.equal(batch.n_id.sort().values, nodes)
            edges = torch.isin(index[1], near).nonzero().view(-1)
            assert torch.equal(batch.e_id.sort().values, edges)
            assert torch.equal(batch.n_id[batch.edge_index], index[:, batch.e_id])
            assert torch.equal(batch.x, graph.node_data["_N"]["feat"][batch.n_id])
            assert torch.equal(batch.y, graph.node_data["_N"]["label"][batch.n_id])
            assert torch.equal(batch.weight, graph.edge_data[ETYPE_HOMO]["weight"][batch.e_id])
            assert sum(batch.num_sampled_nodes) == batch.num_nodes == len(batch.n_id)
            assert sum(batch.num_sampled_edges) == batch.num_edges

    for size, method in CUTS:
        run_threads(size, case, partitioned(graph, size, method))


# ---------------------------------------------------------------- trees, and time


def trees_of(group: Group, path: str, fan: list[int], options: dict) -> dict[int, list[int]]:
    """Per seed of this rank, the original ids of the edges of its tree, hop after hop."""
    data, found = sar.load_partition_data(path), dict[int, list[int]]()
    for batch in NeighborLoader(data, fan, as_="pyg", batch_size=57, **options):
        tree = batch.batch[batch.edge_index]
        assert torch.equal(tree[0], tree[1]), "an edge joins two trees"
        for number, node in enumerate(batch.n_id[: batch.batch_size].tolist()):
            assert node not in found
            found[node] = batch.e_id[tree[1] == number].tolist()
    return found


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"weight_attr": "weight"}], ids=str)
def test_trees_are_those_of_one_process(options: dict, partitioned: Cutter) -> None:
    """Bit for bit, whatever the cut: the draws of a tree are its seed's and step's alone."""
    graph, want = mixed(), None
    for size, method in CUTS:
        path, given = partitioned(graph, size, method), {"disjoint": True, **options}
        parts = run_threads(size, trees_of, path, [3, 2], given)
        found = {seed: edges for part in parts for seed, edges in part.items()}
        assert len(found) == 57
        want = want or found
        assert found == want


def aged(by_edge: bool) -> tuple[GraphArrays, Tensor]:
    """The mixed graph with times of edges or of nodes, and when each edge came."""
    graph, rng = mixed(), torch.Generator().manual_seed(5)
    src = graph.edges[ETYPE_HOMO][0]
    count = len(src) if by_edge else 57
    time = torch.randint(20, (count,), generator=rng)
    columns = {"time": time}
    node_data = graph.node_data["_N"] | ({} if by_edge else columns)
    edge_data = graph.edge_data[ETYPE_HOMO] | (columns if by_edge else {})
    name = f"aged-{by_edge}"
    made = GraphArrays(
        name, graph.num_nodes, graph.edges, {"_N": node_data}, {ETYPE_HOMO: edge_data}
    )
    return made.with_orig_ids(), time if by_edge else time[src]


@by_pairs(by_edge=[True, False], strategy=["uniform", "last"], fanout=[-1, 2])
def test_nothing_later_than_the_seed(
    by_edge: bool, strategy: str, fanout: int, partitioned: Cutter
) -> None:
    graph, came = aged(by_edge)
    src, dst = graph.edges[ETYPE_HOMO]

    def case(group: Group, path: str) -> int:
        data, seen = sar.load_partition_data(path), 0
        ids = data.node_features["_N/orig_id"]
        time = ids % 23 if by_edge else None
        loader = NeighborLoader(
            data, [fanout, fanout], None, time, time_attr="time", temporal_strategy=strategy,
            as_="pyg", batch_size=6,
        )  # fmt: skip
        for batch in loader:
            seeds = batch.n_id[: batch.batch_size]
            until = seeds % 23 if by_edge else graph.node_data["_N"]["time"][seeds]
            assert torch.equal(batch.seed_time, until)
            limit = until[batch.batch[batch.edge_index[1]]]
            assert bool((came[batch.e_id] <= limit).all())
            first = batch.num_sampled_edges[0]
            for number, node in enumerate(seeds.tolist()):
                drawn = batch.e_id[:first][batch.edge_index[1][:first] == number]
                able = ((dst == node) & (came <= until[number])).nonzero().view(-1)
                want = len(able) if fanout < 0 else min(fanout, len(able))
                assert len(drawn) == want and set(drawn.tolist()) <= set(able.tolist())
                if strategy == "last" and want:
                    rest = able[~torch.isin(able, drawn)]
                    assert not len(rest) or came[drawn].min() >= came[rest].max()
                seen += len(drawn)
        return seen

    for size, method in CUTS[:3]:
        assert sum(run_threads(size, case, partitioned(graph, size, method))) > 20


# ---------------------------------------------------------------- ranks that are processes


def case_beside(group: Group, path: str) -> list[tuple]:
    """A thread draws ahead while this one sums, each on connections of its own."""
    data, found = sar.load_partition_data(path), []
    with NeighborLoader(data, [3, 2], batch_size=2, as_="tensors", prefetch=2, group=group) as one:
        for batch in one:
            total = group.all_reduce(torch.tensor([float(batch.batch_size), group.rank, 1.0]))
            same = torch.equal(batch.node_data["_N"]["feat"], batch.node_data["_N"]["copy"])
            found.append((batch.node_ids["_N"].tolist(), total.tolist(), same))
    return found


def test_ranks_in_processes(partitioned: Cutter, either: WorkerPool) -> None:
    graph = mixed()
    columns = graph.node_data["_N"] | {"copy": graph.node_data["_N"]["feat"]}
    twice = GraphArrays("twice", graph.num_nodes, graph.edges, {"_N": columns})
    path = partitioned(twice.with_orig_ids(), 3)
    want = run_threads(3, case_beside, path)
    got = either.run(3, case_beside, path)
    assert got == want and all(same for one in got for _, _, same in one)


def case_starts_and_stops(group: Group, path: str, cycles: int) -> list[tuple[int, int, int]]:
    """What this process holds after a few loaders, and after all of them."""
    data, held = sar.load_partition_data(path), []
    for cycle in range(cycles):
        options = {"batch_size": 4, "as_": "tensors", "prefetch": cycle % 3, "group": group}
        with NeighborLoader(data, [3, 2], **options) as loader:
            for step, _ in enumerate(loader):
                if step == cycle % 5:
                    break
            if cycle % 2:  # the next epoch starts clean
                steps = [batch.step % len(loader) for batch in loader]
                assert steps == list(range(len(loader)))
        if cycle in (9, cycles - 1):
            group.all_reduce(torch.zeros(1))
            threads = [one.name for one in threading.enumerate()].count("sar-sampling")
            held.append((threads, len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm"))))
    return held


def test_many_loaders_leave_nothing(partitioned: Cutter, either: WorkerPool) -> None:
    for few, all_of_them in either.run(2, case_starts_and_stops, partitioned(mixed(), 2), 30):
        assert few == all_of_them and few[0] == 0
