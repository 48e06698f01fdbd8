"""Options of loaders: who keeps what, whose seeds, which way edges go; never what is drawn."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import dgl
import pytest
import torch
from harness import run_threads
from harness.compare import same
from harness.graphs import ETYPE_HOMO, hetero, mixed, to_dgl
from harness.parts import Cutter

import sar
from sar.comm import Group
from sar.sampling import LinkNeighborLoader, NeighborLoader, Sample, SubgraphLoader

CUTS = [(1, "random"), (2, "coarsen"), (3, "random"), (4, "adversarial")]


def epochs(group: Group, path: str, ntype: str, options: dict) -> list:
    """Two epochs as tensors; this rank reads every row against its id."""
    data = sar.load_partition_data(path)
    with NeighborLoader(data, [3, 2], ntype, as_="tensors", shuffle=True, **options) as loader:
        counters = loader._exchange.group.counters
        before = counters.received_bytes
        return [list(loader), list(loader), loader.cache, counters.received_bytes - before]


KEPT = [
    {"topology": "replicated"},
    {"cache": 2000},
    {"cache": "1GiB", "bulk": 3},
    {"cache": 700, "topology": "replicated", "bulk": 2, "prefetch": 0},
]


@pytest.mark.parametrize("name", ["one type", "several"])
@pytest.mark.parametrize("options", KEPT, ids=str)
def test_what_ranks_keep_changes_no_batch(options: dict, name: str, partitioned: Cutter) -> None:
    graph, ntype = (mixed(), "_N") if name == "one type" else (hetero(), "item")
    for size, method in CUTS:
        path = partitioned(graph, size, method)
        want = run_threads(size, epochs, path, ntype, {"batch_size": 4})
        got = run_threads(size, epochs, path, ntype, {"batch_size": 4, **options})
        for plain, other in zip(want, got):
            assert same(plain[:2], other[:2])
            assert plain[2].nbytes == 0
            if "cache" not in options or size == 1:
                continue
            cache = other[2]
            budget = options["cache"] if isinstance(options["cache"], int) else 2**30
            assert cache.nbytes <= budget and 0 <= cache.had <= cache.needed
            if budget == 2**30:
                assert cache.hit_rate > 0.8 or not cache.needed
            if "topology" not in options:  # the rows that it had do not travel
                assert plain[3] - other[3] >= cache.had * 6 * 4


def test_a_cache_of_no_rows(partitioned: Cutter) -> None:
    def case(group: Group, path: str) -> None:
        data = sar.load_partition_data(path)
        fields: Any = {"_E": ["weight"]}
        with NeighborLoader(data, [2], as_="tensors", cache="1MiB", fields=fields) as loader:
            assert len(list(loader)) == len(loader) and loader.cache.needed == 0

    run_threads(2, case, partitioned(mixed(), 2, "random"))


def test_ids_are_original_where_fields_name_them(partitioned: Cutter) -> None:
    """Else those of the partitioning, by which rows of a learned table are not to be looked up."""

    def case(group: Group, path: str) -> None:
        data = sar.load_partition_data(path)
        own = data.node_features["_N/orig_id"]
        start = int(data.book.node_ranges["_N"][group.rank][0])
        numbers = torch.arange(start, start + len(own))
        for fields, ids in ((None, own), (["feat", "orig_id"], own), (["feat"], numbers)):
            chosen = None if fields is None else {"_N": fields}
            loader = NeighborLoader(data, [2], batch_size=99, as_="pyg", fields=chosen)
            (batch,) = loader
            assert torch.equal(batch.n_id[: batch.batch_size], ids)

    run_threads(2, case, partitioned(mixed(), 2, "random"))


FIELDS = [
    ({"users": ["feat"]}, "got 'users', expected one of 'item', 'tag', 'user' or a relation"),
    ({"user": ["feat"], "bys": ["weight"]}, "got 'bys', expected .*: etype: 'bys' is unknown"),
    ({"user": "feat"}, "got 'feat' of 'user', expected a list of names"),
    ({"buys": [], ("user", "buys", "item"): []}, "got .*'buys'.*, expected each relation once"),
    ({("user", "buys", "user"): []}, "got .*'user', 'buys', 'user'.*, expected"),
]


def test_fields_name_relations_as_fanouts_do(partitioned: Cutter) -> None:
    def case(group: Group, path: str) -> None:
        data = sar.load_partition_data(path)
        for relation in ("buys", ("user", "buys", "item"), "user:buys:item"):
            given: Any = {"user": ["feat"], relation: ["weight", "orig_eid"]}
            loader = NeighborLoader(data, {relation: [3]}, "item", as_="tensors", fields=given)
            with loader:
                batch = next(iter(loader))
            names = {n: set(rows) for n, rows in batch.node_data.items() if rows}
            assert names == {"user": {"feat"}}
            columns = {e: set(rows) for e, rows in batch.edge_data.items() if rows}
            assert columns == {("user", "buys", "item"): {"weight", "orig_eid"}}
        for fields, text in FIELDS:
            with pytest.raises(ValueError, match=f"fields: {text}"):
                NeighborLoader(data, [2], "user", fields=fields)  # type: ignore[arg-type]

    run_threads(2, case, partitioned(hetero(), 2))


@pytest.mark.parametrize("replace_", [False, True])
@pytest.mark.parametrize("fanout", [2, 100, -1])
def test_edges_of_weight_zero(fanout: int, replace_: bool, partitioned: Cutter) -> None:
    """Never drawn, as by ``dgl.sampling``; a node whose edges all have it draws none."""
    graph = mixed()
    src, dst = graph.edges[ETYPE_HOMO]
    weight = torch.where((torch.arange(len(src)) % 3 == 0) | (dst % 5 == 1), 0.0, 1.0 + src)
    columns = {**graph.edge_data[ETYPE_HOMO], "weight": weight}
    graph = replace(graph, name="weighted", edge_data={ETYPE_HOMO: columns})
    whole = to_dgl(graph)
    given = whole, torch.arange(57), fanout, "in", "weight", replace_
    want = dgl.sampling.sample_neighbors(*given).in_degrees()

    def case(group: Group, path: str) -> None:
        data = sar.load_partition_data(path)
        options: Any = {"batch_size": 60, "weight_attr": "weight", "replace": replace_}
        with NeighborLoader(data, [fanout], as_="tensors", **options) as loader:
            (batch,) = loader
        ((_, to, eid),) = (hop[ETYPE_HOMO] for hop in batch.edges)
        seeds = batch.node_ids["_N"][: batch.batch_size]
        assert (batch.edge_data[ETYPE_HOMO]["weight"] > 0).all() and len(eid)
        assert torch.equal(torch.bincount(to, minlength=len(seeds)), want[seeds])
        with SubgraphLoader(data, [fanout], as_="tensors", **options) as loader:
            (batch,) = loader  # which asks for all edges between the nodes
        nodes = batch.node_ids["_N"]
        inside = torch.isin(src, nodes) & torch.isin(dst, nodes)
        assert len(batch.edges[0][ETYPE_HOMO].eid) == int(inside.sum())

    for size in (1, 3):
        run_threads(size, case, partitioned(graph, size))


@pytest.mark.parametrize("is_original", [False, True])
def test_seeds_are_dealt_out(is_original: bool, partitioned: Cutter) -> None:
    """Each comes once, wherever it lies and whoever gave it; ranks have as many, or one more."""
    graph = mixed()

    def case(group: Group, path: str) -> list:
        data = sar.load_partition_data(path)
        seeds = torch.arange(57)[: 57 if group.rank == 0 else 0]  # global ids: anybody's
        loader = NeighborLoader(
            data, [-1], seeds, batch_size=5, as_="pyg", rebalance=True, original_ids=is_original
        )
        return [(b.n_id[: b.batch_size].tolist(), b.input_id.tolist(), b.num_edges) for b in loader]

    degrees = torch.bincount(graph.edges[ETYPE_HOMO][1], minlength=57)
    for size, method in CUTS:
        parts = run_threads(size, case, partitioned(graph, size, method))
        counts = [sum(len(ids) for ids, _, _ in part) for part in parts]
        assert max(counts) - min(counts) <= 1
        nodes = [node for part in parts for ids, _, _ in part for node in ids]
        inputs = [one for part in parts for _, ids, _ in part for one in ids]
        assert sorted(nodes) == sorted(inputs) == list(range(57))
        assert not is_original or nodes == inputs
        assert all(e == degrees[ids].sum() for part in parts for ids, _, e in part)


def test_original_ids_of_others(partitioned: Cutter) -> None:
    """Are refused, by name, unless they are dealt out."""

    def case(group: Group, path: str) -> None:
        data = sar.load_partition_data(path)
        own = data.node_features["_N/orig_id"].flip(0)  # in an order that sar itself does not give
        data.node_features["_N/orig_id"] = own
        loader = NeighborLoader(data, [2], own[:4], original_ids=True, as_="tensors")
        seeds = [int(b.node_ids["_N"][0]) for b in loader if b.batch_size]
        assert seeds == own[:4].tolist()
        foreign = int((~torch.isin(torch.arange(57), own)).nonzero()[0])
        with pytest.raises(ValueError, match="node .* is not this rank's; expected its own, or re"):
            NeighborLoader(data, [2], torch.tensor([foreign]), original_ids=True)

    run_threads(2, case, partitioned(mixed(), 2))


@pytest.mark.parametrize("as_", ["dgl", "pyg"])
def test_induced_subgraphs(as_: str, partitioned: Cutter) -> None:
    """All edges between the nodes of the k-hop neighborhood, as PyG finds them."""
    from torch_geometric.utils import k_hop_subgraph

    graph = mixed()
    index = torch.stack(graph.edges[ETYPE_HOMO])

    def case(group: Group, path: str) -> int:
        data, seeds_seen = sar.load_partition_data(path), 0
        for batch in SubgraphLoader(data, [-1, -1], batch_size=4, as_=as_):
            if as_ == "dgl":
                nodes, seeds, sub = batch
                ends, eid, x = torch.stack(sub.edges()), sub.edata["_ID"], sub.ndata["feat"]
            else:
                nodes, seeds, eid = batch.n_id, batch.n_id[: batch.batch_size], batch.e_id
                ends, x = batch.edge_index, batch.x
            near, _, _, mask = k_hop_subgraph(seeds, 2, index, num_nodes=57)
            inside = torch.isin(index[0], near) & torch.isin(index[1], near)
            assert torch.equal(nodes.sort().values, near)
            assert torch.equal(eid.sort().values, inside.nonzero().view(-1))
            assert torch.equal(nodes[ends], index[:, eid])
            assert torch.equal(x, graph.node_data["_N"]["feat"][nodes])
            seeds_seen += len(seeds)
        return seeds_seen

    for size, method in CUTS:
        assert sum(run_threads(size, case, partitioned(graph, size, method))) == 57


def test_induced_trees_stay_apart(partitioned: Cutter) -> None:
    """No edge joins two trees, and none is from the future."""
    graph = mixed()
    came = torch.arange(57) % 7
    columns = {**graph.node_data["_N"], "time": came}
    graph = replace(graph, name="timed", node_data={"_N": columns})

    def case(group: Group, path: str) -> None:
        data = sar.load_partition_data(path)
        loader = SubgraphLoader(data, [3, 3], batch_size=8, as_="pyg", time_attr="time")
        for batch in loader:
            trees = batch.batch[batch.edge_index]
            assert torch.equal(trees[0], trees[1])
            assert (batch.time[batch.edge_index[0]] <= batch.seed_time[trees[0]]).all()

    run_threads(2, case, partitioned(graph, 2))


def test_bidirectional_subgraphs(partitioned: Cutter) -> None:
    """As PyG makes them of the edges that were drawn."""
    from torch_geometric.sampler import SamplerOutput

    def case(group: Group, path: str) -> None:
        data = sar.load_partition_data(path)
        plain, both = (
            list(NeighborLoader(data, [3, 2], batch_size=6, as_="pyg", subgraph_type=kind))
            for kind in ("directional", "bidirectional")
        )
        for one, two in zip(plain, both, strict=True):
            assert torch.equal(one.n_id, two.n_id)
            out = SamplerOutput(one.n_id, *one.edge_index, one.e_id).to_bidirectional()
            want = torch.stack([out.row, out.col])
            assert torch.equal(want[:, key(want)], two.edge_index[:, key(two.edge_index)])
            assert "num_sampled_edges" not in two
            ids = dict[tuple[int, ...], set[int]]()
            for ends, eid in zip(zip(*one.edge_index.tolist()), one.e_id.tolist(), strict=True):
                ids.setdefault(ends, set()).add(eid)
            for ends, eid in zip(zip(*two.edge_index.tolist()), two.e_id.tolist(), strict=True):
                assert eid in (ids.get(ends) or ids[ends[::-1]])

    def key(index: torch.Tensor) -> torch.Tensor:
        return (index[0] * 1000 + index[1]).argsort()

    run_threads(2, case, partitioned(mixed(), 2))


def test_a_filter_changes_what_was_drawn(partitioned: Cutter) -> None:
    """Before rows are fetched: here it drops every edge of the last hop."""

    def last_hop(sample: Sample) -> Sample:
        sample.hops[-1] = {
            e: type(one)(*(x[:0] for x in one)) for e, one in sample.hops[-1].items()
        }
        return sample

    def case(group: Group, path: str) -> None:
        data = sar.load_partition_data(path)
        for batch in NeighborLoader(data, [2, 2], batch_size=9, as_="tensors", filter=last_hop):
            first, last = (len(hop[ETYPE_HOMO].src) for hop in batch.edges)
            assert last == 0 and len(batch.edge_data[ETYPE_HOMO]["weight"]) == first

    run_threads(2, case, partitioned(mixed(), 2))


def test_without_original_ids_it_is_said_once(partitioned: Cutter) -> None:
    """That draws follow the cut; on rank 0, and not where ids are there or one rank is alone."""

    def case(group: Group, path: str, forget: bool) -> list[str]:
        data = sar.load_partition_data(path)
        if forget:
            del data.node_features["_N/orig_id"]
            with pytest.raises(ValueError, match="the partitions hold no '_N/orig_id'"):
                NeighborLoader(data, [2], original_ids=True)
        NeighborLoader(data, [2], as_="tensors").close()
        LinkNeighborLoader(data, [2], as_="tensors").close()
        return []

    for size, forget, count in ((2, True, 1), (2, False, 0), (1, True, 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            run_threads(size, case, partitioned(mixed(), size), forget)
        told = [str(one.message) for one in caught if "original ids" in str(one.message)]
        assert len(told) >= count and bool(told) == bool(count)


HUGE = [
    {"weight_attr": "weight"},
    {"time_attr": "type", "temporal_strategy": "last"},
    {"bulk": 10**12, "prefetch": 0},
    {"bulk": 1, "topology": "replicated"},
]


@pytest.mark.parametrize("options", HUGE, ids=str)
def test_more_than_there_is_takes_what_there_is(options: dict, partitioned: Cutter) -> None:
    """Memory and bytes on the wire are by the degrees and by the steps of an epoch."""
    path = partitioned(mixed(), 2, "random")

    def case(group: Group, fanout: int, options: dict) -> tuple[list, int]:
        data = sar.load_partition_data(path)
        if "time_attr" in options:
            options = options | {"input_time": torch.full((data.num_nodes("_N"),), 9)}
        given: dict[str, Any] = {"num_neighbors": [fanout] * 2, "fields": {"_N": ["label"]}}
        loader = NeighborLoader(data, batch_size=9, as_="tensors", **given | options)
        return list(loader), loader._exchange.group.counters.received_bytes

    want = run_threads(2, case, 64, options | {"bulk": 2})
    for fanout in (10**4, 2**31 - 1):
        for (one, few), (other, many) in zip(want, run_threads(2, case, fanout, options)):
            assert same(one, other) and many <= few
