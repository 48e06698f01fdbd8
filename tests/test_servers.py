"""Ranks that train on batches of ranks that hold the partitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_threads
from harness.compare import same
from harness.graphs import hetero, mixed
from harness.parts import Cutter, load_partition

from sar.comm import Group, use_group
from sar.errors import SarError
from sar.sampling import LinkNeighborLoader, NeighborLoader, Servers, serve

SHAPES = [(1, 1, "dgl"), (2, 2, "tensors"), (3, 1, "pyg"), (1, 3, "pyg"), (2, 3, "dgl")]


def world_of(path: str, num_servers: int, train: Any) -> Any:
    """A rank's case: a server, or a trainer that does ``train(servers)``."""

    def case(group: Group) -> Any:
        if group.rank < num_servers:
            return serve(load_partition(path, group.rank), group, num_servers)
        with Servers(group, num_servers, timeout=60) as servers:
            with use_group(servers.group):
                return train(servers)

    return case


@pytest.mark.parametrize(("num_servers", "num_trainers", "as_"), SHAPES)
def test_batches_are_those_of_ranks_with_partitions(
    num_servers: int, num_trainers: int, as_: str, partitioned: Cutter
) -> None:
    """Bit for bit: as many local ranks, each with the same seeds, get the same batches."""
    graph, fan = hetero(), [3, 2]
    options = {"batch_size": 4, "as_": as_, "seed": 3, "shuffle": True}

    def train(servers: Servers) -> list:
        seeds = servers.nodes("item")
        with servers.NeighborLoader(fan, "item", **options) as every:
            steps = len(every)
        with servers.NeighborLoader(fan, ("item", seeds), **options) as loader:
            assert len(loader) == steps
            return [seeds, list(loader), list(loader), steps]

    size = num_servers + num_trainers
    case = world_of(partitioned(graph, num_servers), num_servers, train)
    got = run_threads(size, case)[num_servers:]
    seeds = torch.cat([one[0] for one in got])
    assert sorted(seeds.tolist()) == list(range(graph.num_nodes["item"]))
    counts = [len(one[0]) for one in got]
    assert max(counts) - min(counts) <= 1

    def local(group: Group, path: str) -> list:
        data, mine = load_partition(path, group.rank), got[group.rank][0]
        assert torch.isin(mine, data.node_features["item/orig_id"]).all()
        loader = NeighborLoader(data, fan, ("item", mine), original_ids=True, **options)
        return [list(loader), list(loader)]

    cut = torch.zeros(sum(graph.num_nodes.values()), dtype=torch.int64)
    names = list(graph.num_nodes)
    first = sum(graph.num_nodes[n] for n in names[: names.index("item")])
    for trainer, one in enumerate(got):
        cut[first + one[0]] = trainer
    want = run_threads(num_trainers, local, partitioned(graph, num_trainers, cut.tolist()))
    for mine, theirs in zip(want, got):
        assert theirs[3] == len(mine[0])
        for own, other in zip(mine, theirs[1:3]):
            for one, two in zip(own, other, strict=True):
                assert same(plain(one), plain(two))


def plain(batch: Any) -> Any:
    """A batch as tensors, without the edges' ids that the cut gives them."""
    if hasattr(batch, "to_dict"):
        return batch.to_dict()
    if hasattr(batch, "_replace"):
        edges = [{e: one[:2] for e, one in hop.items()} for hop in batch.edges]
        return list(batch._replace(edges=edges))
    inputs, seeds, blocks = batch
    shown = []
    for block in blocks:
        ends = {e: block.edges(etype=e) for e in block.canonical_etypes}
        data = {e: dict(block.edges[e].data) for e in block.canonical_etypes}
        nodes = {n: dict(block.srcnodes[n].data) for n in block.srctypes}
        shown.append([ends, data, nodes, {n: dict(block.dstnodes[n].data) for n in block.dsttypes}])
    return [inputs, seeds, shown]


def test_link_batches(partitioned: Cutter) -> None:
    """Seed edges come once; their pairs are those of ranks with partitions."""
    graph = mixed()
    options: dict[str, Any] = {
        "neg_sampling": {"mode": "triplet", "amount": 2, "strict": True},
        "exclude": "self", "as_": "tensors", "batch_size": 50,
    }  # fmt: skip

    def train(servers: Servers) -> list:
        with servers.LinkNeighborLoader([2], servers.edges(), **options) as loader:
            return list(loader)

    def local(group: Group, path: str, pairs: torch.Tensor) -> list:
        data = load_partition(path, group.rank)
        mine = pairs[group.rank].T
        return list(LinkNeighborLoader(data, [2], mine, original_ids=True, **options))

    case = world_of(partitioned(graph, 2), 2, train)
    got = run_threads(4, case)[2:]

    def seeds(batch: Any) -> torch.Tensor:
        ids, links = batch.node_ids["_N"], batch.links
        return torch.stack([ids[links.src], ids[links.dst]], dim=1)

    ends = [torch.cat(list(map(seeds, batches))) for batches in got]
    want = torch.stack(graph.edges["_N", "_E", "_N"], dim=1).tolist()
    assert sorted(torch.cat(ends).tolist()) == sorted(want)
    mine = run_threads(2, local, partitioned(graph, 2), ends)
    for own, other in zip(mine, got):
        for one, two in zip(own, other, strict=True):
            assert same(plain(one), plain(two))


def test_masks_epochs_left_half_way_and_two_loaders(partitioned: Cutter) -> None:
    graph = mixed()

    def train(servers: Servers) -> list:
        seeds = servers.nodes(mask="train_mask")
        first = servers.NeighborLoader([2], seeds, batch_size=3, as_="tensors", prefetch=1)
        other = servers.NeighborLoader([2], batch_size=9, as_="tensors", prefetch=0, bulk=2)
        whole = list(first)
        for _ in first:
            break
        again = list(first)
        assert [b.step for b in again] == [2 * len(first) + n for n in range(len(first))]
        ids = torch.cat([b.node_ids["_N"][: b.batch_size] for b in other])
        for one, two in zip(first, other):
            assert len(one.input_id) <= 3 and len(two.input_id) <= 9
        for _ in other:
            break
        other.close()
        first.close()
        first.close()
        return [torch.cat([b.node_ids["_N"][: b.batch_size] for b in whole]), ids, seeds]

    parts = run_threads(4, world_of(partitioned(graph, 2), 2, train))[2:]
    wanted = graph.node_data["_N"]["train_mask"].nonzero().view(-1)
    for at in (0, 2):
        assert torch.equal(torch.cat([one[at] for one in parts]).sort().values, wanted)
    assert torch.cat([one[1] for one in parts]).sort().values.tolist() == list(range(57))


BAD: list[tuple[dict, type, str]] = [
    ({"input_nodes": torch.tensor([99])}, ValueError, "node 99 is not in the graph"),
    ({"input_nodes": torch.ones(57, dtype=torch.bool)}, TypeError, "got a mask, expected ids"),
    ({"input_nodes": [3]}, TypeError, "seeds: got list, expected a tensor"),
    ({"rebalance": True}, ValueError, "servers deal seeds out already"),
    ({"filter": print}, SarError, "filter: got one, which servers cannot call"),
    ({"batchsize": 2}, TypeError, "unknown option 'batchsize'; did you mean 'batch_size'"),
]  # fmt: skip


def test_what_is_wrong_is_the_trainers_error(partitioned: Cutter) -> None:
    """On all of them, be it an option or a transform of one, and the servers go on."""

    def train(servers: Servers) -> int:
        for options, kind, text in BAD:
            with pytest.raises(kind, match=text):
                servers.NeighborLoader(**{"num_neighbors": [2], "as_": "tensors", **options})
        with pytest.raises(ValueError, match="mask: got '_N/no', expected one of"):
            servers.nodes(mask="no")
        calls = []

        def transform(batch: Any) -> Any:
            calls.append(batch)
            if servers.group.rank == 1 and len(calls) == 2:
                raise KeyError("mine")
            return batch

        for prefetch in (0, 2):
            calls.clear()
            loader = servers.NeighborLoader(
                [2], batch_size=5, as_="tensors", prefetch=prefetch, transform=transform
            )
            with pytest.raises((KeyError, SarError), match="mine"):
                list(loader)
            assert len(list(loader)) == 6
        return len(list(servers.NeighborLoader([2], batch_size=10, as_="tensors")))

    assert run_threads(4, world_of(partitioned(mixed(), 2), 2, train))[2:] == [3, 3]


@pytest.mark.parametrize("num_servers", [1, 3])
def test_widths_and_classes_are_asked_for(num_servers: int, partitioned: Cutter) -> None:
    """Those of the whole graph, also where a server has not the largest label."""

    def train(servers: Servers) -> list:
        with pytest.raises(ValueError, match="ntype: got none, expected one of"):
            servers.width()
        with pytest.raises(ValueError, match="name: got 'no', expected one of feat, label"):
            servers.width("no", "item")
        return [servers.width(ntype=n) for n in sorted(graph.num_nodes)] + [
            servers.num_classes(ntype="item")
        ]

    graph = hetero()
    want = [graph.node_data[n]["feat"].shape[1] for n in sorted(graph.num_nodes)]
    want.append(int(graph.node_data["item"]["label"].max()) + 1)
    case = world_of(partitioned(graph, num_servers), num_servers, train)
    assert run_threads(num_servers + 2, case)[num_servers:] == [want] * 2
