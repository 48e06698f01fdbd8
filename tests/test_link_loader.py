"""Mini-batches of edges: what they hold, which pairs are drawn beside them, what is left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_threads
from harness.graphs import ETYPE_HOMO, GraphArrays, hetero, homogeneous, mixed
from harness.parts import Cutter
from torch import Tensor

import sar
from sar.comm import Group
from sar.sampling import LinkNeighborLoader, NegativeSampling, NeighborLoader

CUTS = [(1, "random"), (2, "coarsen"), (3, "random"), (4, "adversarial")]


def pairs_of(batch: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Original ids of both ends of the seed edges, and of the pairs that are none."""
    etype, links, count = batch.input_type, batch.links, batch.batch_size
    src, dst = batch.node_ids[etype[0]], batch.node_ids[etype[2]]
    own = list(zip(src[links.src[:count]].tolist(), dst[links.dst[:count]].tolist()))
    if links.negative is None:
        rest = zip(src[links.src[count:]].tolist(), dst[links.dst[count:]].tolist())
        return own, list(rest)
    again = links.src.repeat_interleave(links.negative.shape[1])
    return own, list(zip(src[again].tolist(), dst[links.negative.reshape(-1)].tolist()))


def batches_of(group: Group, path: str, seeds: Any, options: dict, size: int = 10**6) -> list[Any]:
    """Of an epoch; a rank's seeds are those of its edges whose original ids are given."""
    data, options = sar.load_partition_data(path), dict(options)
    etype = options.pop("etype", ETYPE_HOMO)
    own = data.edge_features[":".join(etype) + "/orig_eid"]
    mask = torch.isin(own, seeds) if seeds is not None else None
    with LinkNeighborLoader(
        data, [2, 2], (etype, mask), as_="tensors", batch_size=size, **options
    ) as loader:
        return list(loader)


def test_seed_edges_and_what_is_drawn_around_them(partitioned: Cutter) -> None:
    """Every seed edge comes once; every drawn edge exists; rows are those of the tables."""
    graph = mixed()
    ends = torch.stack(graph.edges[ETYPE_HOMO])
    for size, method in CUTS:
        path = partitioned(graph, size, method)
        parts = run_threads(size, batches_of, path, None, {}, 16)
        found: Counter = Counter()
        for batch in (one for part in parts for one in part):
            own, rest = pairs_of(batch)
            assert not rest and (batch.links.label == 1).all()
            found.update(own)
            for hop in batch.edges:
                src, dst, _ = hop[ETYPE_HOMO]
                assert int(max(src.max(), dst.max())) < len(batch.node_ids["_N"]) if len(src) else 1
            eid = batch.edge_data[ETYPE_HOMO]["orig_eid"]
            drawn = [torch.cat([h[ETYPE_HOMO][k] for h in batch.edges]) for k in (0, 1)]
            ids = torch.stack([batch.node_ids["_N"][one] for one in drawn])
            assert torch.equal(ids, ends[:, eid])
            feat = graph.node_data["_N"]["feat"][batch.node_ids["_N"]]
            assert torch.equal(batch.node_data["_N"]["feat"], feat)
        assert found == Counter(map(tuple, ends.T.tolist()))


NEGATIVES: list[dict] = [
    {"mode": "binary", "amount": 2},
    {"mode": "binary", "amount": 1, "keep_src": True, "strict": True},
    {"mode": "triplet", "amount": 3, "dst_weight": "weight"},
    {"mode": "binary", "amount": 1, "src_weight": "weight", "strict": True},
]


def weighted(graph: GraphArrays) -> GraphArrays:
    rng, columns = torch.Generator().manual_seed(3), {}
    for ntype, count in graph.num_nodes.items():
        weight = torch.rand(count, generator=rng).pow(3)
        columns[ntype] = {**graph.node_data[ntype], "weight": weight}
    return replace(graph, name=f"weighted-{graph.name}", node_data=columns)


@pytest.mark.parametrize("name", ["one type", "several"])
@pytest.mark.parametrize("negatives", NEGATIVES, ids=lambda one: "-".join(map(str, one.values())))
def test_pairs_are_those_of_one_process(negatives: dict, name: str, partitioned: Cutter) -> None:
    """Bit for bit, whatever the cut; strict ones are no edges; sources are kept where asked."""
    graph = weighted(mixed() if name == "one type" else hetero())
    etype = ETYPE_HOMO if name == "one type" else next(iter(graph.edges))
    there = set(zip(*(end.tolist() for end in graph.edges[etype])))
    seeds = torch.randperm(len(graph.edges[etype][0]))[:20]
    want = None
    for size, method in CUTS:
        path = partitioned(graph, size, method)
        options = {"neg_sampling": negatives, "etype": etype, "seed": 5}
        parts = run_threads(size, run_options, path, seeds, options)
        own = Counter(pair for part in parts for pair in part[0])
        rest = Counter(pair for part in parts for pair in part[1])
        assert own.total() == 20 and rest.total() == 20 * negatives["amount"]
        if negatives.get("strict"):
            assert not there & set(rest)
        if negatives.get("keep_src") or negatives["mode"] == "triplet":
            sources = Counter(src for src, _ in own.elements())
            amount = negatives["amount"]
            assert Counter(s for s, _ in rest.elements()) == Counter(
                {s: amount * n for s, n in sources.items()}
            )
        want = want or (own, rest)
        assert (own, rest) == want


def run_options(group: Group, path: str, seeds: Tensor, options: dict) -> tuple[list, list]:
    found: tuple[list, list] = [], []
    for batch in batches_of(group, path, seeds, options):
        for to, pairs in zip(found, pairs_of(batch)):
            to.extend(pairs)
    return found


def test_frequencies_of_weighted_pairs(partitioned: Cutter) -> None:
    """A chi-square test of how often each destination is drawn."""
    graph = weighted(mixed())
    weight = graph.node_data["_N"]["weight"].double()
    path = partitioned(graph, 2, "random")
    negatives = {"mode": "triplet", "amount": 200, "dst_weight": "weight"}
    parts = run_threads(2, run_options, path, torch.arange(50), {"neg_sampling": negatives})
    drawn = torch.tensor([dst for part in parts for _, dst in part[1]])
    count = torch.bincount(drawn, minlength=57)
    want = weight / weight.sum() * len(drawn)
    usual = want >= 5
    statistic = ((count - want)[usual] ** 2 / want[usual]).sum()
    degrees = int(usual.sum()) - 1
    assert len(drawn) == 10_000
    assert abs(statistic - degrees) < 4 * (2 * degrees) ** 0.5


def test_no_negative_from_the_future(partitioned: Cutter) -> None:
    """Destinations came at the seed edge's time or before, each of them alike often."""
    graph = mixed()
    rng = torch.Generator().manual_seed(3)
    came = torch.randint(20, (57,), generator=rng)
    came[0] = 0
    columns = {**graph.node_data["_N"], "time": came}
    graph = replace(graph, name="aged", node_data={"_N": columns})
    count = len(graph.edges[ETYPE_HOMO][0])
    time = torch.randint(20, (count,), generator=rng)
    want = None

    def case(group: Group, path: str) -> dict:
        data, found = sar.load_partition_data(path), {}
        own = data.edge_features["_N:_E:_N/orig_eid"]
        loader = LinkNeighborLoader(
            data, [3, 3], None, None, time[own], neg_sampling={"mode": "triplet", "amount": 5},
            time_attr="time", as_="pyg", batch_size=count,
        )  # fmt: skip
        for batch in loader:
            for tree, edge in enumerate(own[batch.input_id].tolist()):
                nodes = batch.n_id[batch.dst_neg_index[tree]]
                assert (came[nodes] <= time[edge]).all()
                assert (batch.batch[batch.dst_neg_index[tree]] == tree).all()
                assert int(batch.seed_time[tree]) == int(time[edge])
                drawn = batch.n_id[batch.edge_index[0]][batch.batch[batch.edge_index[0]] == tree]
                assert (came[drawn] <= time[edge]).all()
                found[edge] = (
                    nodes.tolist(),
                    batch.e_id[batch.batch[batch.edge_index[1]] == tree].sort().values.tolist(),
                )
        return found

    for size, method in CUTS:
        parts = run_threads(size, case, partitioned(graph, size, method))
        found = {edge: drawn for part in parts for edge, drawn in part.items()}
        assert len(found) == count
        want = want or found
        assert found == want


@pytest.mark.parametrize("exclude", ["self", "reverse"])
def test_seed_edges_are_left_out(exclude: str, partitioned: Cutter) -> None:
    """On every rank those of every rank, and with -1 all others are there."""
    graph = mixed()
    src, dst = graph.edges[ETYPE_HOMO]
    graph = homogeneous("both-ways", 57, torch.cat([src, dst]), torch.cat([dst, src]))
    ends = torch.stack(graph.edges[ETYPE_HOMO])
    seeds = torch.arange(0, ends.shape[1], 7)
    gone = set(map(tuple, ends[:, seeds].T.tolist()))
    if exclude == "reverse":
        gone |= {(b, a) for a, b in gone}

    def case(group: Group, path: str) -> None:
        data = sar.load_partition_data(path)
        mask = torch.isin(data.edge_features["_N:_E:_N/orig_eid"], seeds)
        loader = LinkNeighborLoader(
            data, [-1], mask, exclude=exclude, as_="pyg", batch_size=1000, prefetch=0
        )
        for batch in loader:
            near = batch.n_id[: batch.num_sampled_nodes[0]]
            found = Counter(map(tuple, batch.n_id[batch.edge_index].T.tolist()))
            into = ends[:, torch.isin(ends[1], near)].T.tolist()
            assert found == Counter(pair for pair in map(tuple, into) if pair not in gone)

    for size, method in CUTS:
        run_threads(size, case, partitioned(graph, size, method))


def test_pairs_by_original_ids_and_labels(partitioned: Cutter) -> None:
    """Of any rank's nodes; labels come back, one higher beside negatives, as PyG's do."""
    graph = mixed()
    pairs = torch.tensor([[0, 5, 5, 56, 3], [9, 1, 1, 0, 3]])
    label = torch.tensor([0, 1, 2, 1, 0])

    def case(group: Group, path: str) -> list:
        data, found = sar.load_partition_data(path), []
        mine = slice(group.rank, None, group.size)
        loader = LinkNeighborLoader(
            data, [2], pairs[:, mine], label[mine], neg_sampling_ratio=1.0, original_ids=True,
            as_="pyg", batch_size=2, rebalance=group.size == 4,
        )  # fmt: skip
        for batch in loader:
            count = len(batch.input_id)
            assert batch.edge_label_index.shape == (2, 2 * count)
            assert (batch.edge_label[count:] == 0).all()
            ends = batch.n_id[batch.edge_label_index[:, :count]].T.tolist()
            found += [(*ends, one) for ends, one in zip(ends, batch.edge_label[:count].tolist())]
        return found

    for size, method in CUTS:
        parts = run_threads(size, case, partitioned(graph, size, method))
        found = [tuple(one) for part in parts for one in part]
        want = [(*ends, one + 1) for ends, one in zip(pairs.T.tolist(), label.tolist())]
        assert Counter(found) == Counter(want)


def test_dgl_pair_graphs(partitioned: Cutter) -> None:
    """As DGL's loaders of edges give them: between the seeds, whose ids the last block has."""
    graph = hetero()
    etype = next(iter(graph.edges))
    there = set(zip(*(end.tolist() for end in graph.edges[etype])))

    def case(group: Group, path: str) -> int:
        data, count = sar.load_partition_data(path), 0
        loader = LinkNeighborLoader(
            data, [2, 2], etype, neg_sampling="binary", as_="dgl", batch_size=5
        )
        for inputs, pairs, none, blocks in loader:
            for ntype in {etype[0], etype[2]}:
                ids = pairs.nodes[ntype].data["_ID"]
                assert torch.equal(ids, blocks[-1].dstnodes[ntype].data["_ID"])
                assert torch.equal(inputs[ntype][: len(ids)], ids)
            src, dst = pairs.edges(etype=etype)
            ends = pairs.nodes[etype[0]].data["_ID"][src], pairs.nodes[etype[2]].data["_ID"][dst]
            assert set(zip(*(end.tolist() for end in ends))) <= there
            assert none.num_edges(etype) == pairs.num_edges(etype) == len(pairs.edata["input_id"])
            count += pairs.num_edges(etype)
        return count

    for size, method in CUTS:
        counts = run_threads(size, case, partitioned(graph, size, method))
        assert sum(counts) == len(graph.edges[etype][0])


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_weights_of_pairs_that_are_none(bad: float, partitioned: Cutter) -> None:
    """Nor weights of edges, on whichever rank they are."""
    graph = weighted(mixed())
    graph.node_data["_N"]["weight"][3] = bad
    edge_data = {k: v.clone() for k, v in graph.edge_data[ETYPE_HOMO].items()}
    edge_data["weight"][3] = bad
    graph = replace(graph, name=f"weighted-{bad}", edge_data={ETYPE_HOMO: edge_data})
    path, wrong = partitioned(graph, 2), f"is {bad} in row .*, 1 of them below 0 or not finite"

    def case(group: Group) -> None:
        data = sar.load_partition_data(path)
        with pytest.raises(ValueError, match=f"neg_sampling: '_N/weight' {wrong}"):
            LinkNeighborLoader(data, [2], neg_sampling={"dst_weight": "weight"})
        with pytest.raises(ValueError, match=f"weight_attr: '_N:_E:_N/weight' {wrong}"):
            LinkNeighborLoader(data, [2], as_="tensors", weight_attr="weight")

    run_threads(2, case)


def test_strict_pairs_of_a_full_relation(partitioned: Cutter) -> None:
    """Every rank raises, and says why."""
    full = homogeneous("full", 4, *torch.cartesian_prod(torch.arange(4), torch.arange(4)).T)

    def case(group: Group, path: str) -> None:
        data = sar.load_partition_data(path)
        negatives = NegativeSampling(strict=True)
        mask = torch.full((data.num_edges(ETYPE_HOMO),), group.rank == 0)
        loader = LinkNeighborLoader(data, [1], mask, neg_sampling=negatives, as_="tensors")
        with pytest.raises(sar.SarError, match="100 draws .* expected strict=False"):
            list(loader)

    run_threads(2, case, partitioned(full, 2))


@pytest.mark.parametrize("size", [1, 3])
def test_rows_by_id(size: int, partitioned: Cutter) -> None:
    """In place of ``lookup_features``: any rank's nodes, also twice, in the order of the ids."""
    graph = mixed()

    def case(group: Group, path: str) -> None:
        data = sar.load_partition_data(path)
        ids = torch.tensor([50, 3, 3, 0, 56, 20])[: 6 - 3 * group.rank]  # none on rank 2
        pairs = torch.stack([ids, ids])
        options = {"original_ids": True, "as_": "pyg", "batch_size": 4}
        with LinkNeighborLoader(data, [0], pairs, **options) as loader:
            rows = torch.cat([batch.x[batch.edge_label_index[0]] for batch in loader])
        assert torch.equal(rows, graph.node_data["_N"]["feat"][ids])

    run_threads(size, case, partitioned(graph, size))


def test_rows_by_id_of_one_type(partitioned: Cutter) -> None:
    def case(group: Group, path: str) -> None:
        data, ids = sar.load_partition_data(path), torch.tensor([4, 30, group.rank])
        etype = "user", "buys", "item"
        given = etype, torch.stack([ids, torch.zeros_like(ids)])
        with LinkNeighborLoader(data, [0], given, original_ids=True, as_="pyg") as loader:
            rows = [batch["user"].x[batch[etype].edge_label_index[0]] for batch in loader]
        assert torch.equal(torch.cat(rows), hetero().node_data["user"]["feat"][ids])

    run_threads(2, case, partitioned(hetero(), 2))


def test_data_of_pyg_on_one_machine(tmp_path: Path) -> None:
    """PyG's data is one part; a loader in one process, with the edges' ids as they were."""
    from torch_geometric.data import Data

    graph = mixed()
    index, x = torch.stack(graph.edges[ETYPE_HOMO]), graph.node_data["_N"]["feat"]
    given = Data(x=x, y=graph.node_data["_N"]["label"], edge_index=index)
    data = sar.load_partition_data(sar.partition_graph(given, tmp_path / "parts", 1))
    with NeighborLoader(data, [3, 2], torch.arange(9), original_ids=True, as_="pyg") as loader:
        for batch in loader:
            assert torch.equal(batch.n_id[batch.edge_index], index[:, batch.e_id])
            assert torch.equal(batch.x, x[batch.n_id])
