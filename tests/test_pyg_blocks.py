"""Neighborhoods of seeds under PyG's models, against the whole graph in one process."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from harness import run_threads
from harness.covering import by_pairs
from harness.graphs import ETYPE_HOMO, GraphArrays, hetero, mixed
from harness.parts import Cutter
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GAT, GCN, GIN, GraphConv, GraphSAGE, HeteroConv, SAGEConv
from torch_geometric.utils import trim_to_layer

import sar
import sar.pyg
from sar.sampling import NeighborLoader

LAYERS, CLASSES = 2, 3


class Weighted(nn.Module):
    """Layers of a user's, trimmed by hand, that read weights of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GraphConv(6, 5), GraphConv(5, CLASSES)])

    def forward(self, x: Tensor, edges: Tensor, *hops: Any, weight: Tensor) -> Tensor:
        for layer, conv in enumerate(self.convs):
            if hops:
                x, edges, weight = trim_to_layer(layer, *hops, x, edges, weight)
            x = conv(x, edges, weight).tanh()
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GraphSAGE": lambda: GraphSAGE(6, 5, LAYERS, CLASSES),
    "GAT": lambda: GAT(6, 6, LAYERS, CLASSES, heads=2, jk="last"),
    "GIN": lambda: GIN(6, 5, LAYERS, CLASSES),
    "weighted": Weighted,
}
SEEDS = {"some": 0.2, "one": 0.0, "all": 1.0}
CUTS = [(1, "random"), (2, "coarsen"), (3, "random"), (4, "adversarial")]


def made(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model().double()


def chosen(count: int, seeds: str) -> Tensor:
    """bool [count] by original id; in no case are there some on each of the ranks."""
    share = torch.rand(count, generator=torch.Generator().manual_seed(4))
    mask = share < SEEDS[seeds]
    mask[3] = True
    return mask


def probe(ids: Tensor) -> Tensor:
    return torch.sin(ids.double().unsqueeze(1) * 0.7 + torch.arange(CLASSES) * 1.3)


def wanted(model: nn.Module, graph: GraphArrays, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs of the whole graph's nodes, and gradients of those that are chosen."""
    x, weight = (
        columns[name].double()
        for columns, name in (
            (graph.node_data["_N"], "feat"),
            (graph.edge_data[ETYPE_HOMO], "weight"),
        )
    )
    edges = torch.stack(graph.edges[ETYPE_HOMO])
    out = model(x, edges, weight=weight) if isinstance(model, Weighted) else model(x, edges)
    (out * probe(torch.arange(len(x))))[mask].sum().backward()
    return out.detach(), [p.grad for p in model.parameters()]


def summed(ranks: list[list[Tensor]]) -> list[Tensor]:
    return [sum(one) for one in zip(*ranks, strict=True)]  # type: ignore[misc]


@by_pairs(name=list(MODELS), cut=CUTS, seeds=list(SEEDS), is_trimmed=[False, True])
def test_seeds_get_what_the_whole_graph_gives(
    name: str, cut: tuple[int, str], seeds: str, is_trimmed: bool, partitioned: Cutter
) -> None:
    graph, model = mixed(), made(MODELS[name])
    mask, path = chosen(57, seeds), partitioned(graph, *cut)
    out, grads = wanted(deepcopy(model), graph, mask)

    def case(group: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        part, own = sar.load_partition_data(path), deepcopy(model)
        mine = mask[part.node_features["_N/orig_id"]]
        data = sar.pyg.construct_neighborhood(part, mine, LAYERS)
        hops = [data.num_sampled_nodes, data.num_sampled_edges]
        assert sum(hops[0]) == data.num_nodes and sum(hops[1]) == data.num_edges
        words = {"weight": data.weight.double()} if name == "weighted" else {}
        if is_trimmed and name != "weighted":
            keys = "num_sampled_nodes_per_hop", "num_sampled_edges_per_hop"
            words |= dict(zip(keys, hops, strict=True))
            hops = []
        found = own(data.x.double(), data.edge_index, *(hops if is_trimmed else []), **words)
        found, ids = found[: data.batch_size], data.n_id[: data.batch_size]
        (found * probe(ids)).sum().backward()
        return found.detach(), ids, [p.grad for p in own.parameters()]

    ranks = run_threads(cut[0], case)
    ids = torch.cat([ids for _, ids, _ in ranks])
    assert torch.equal(ids.sort().values, mask.nonzero().view(-1))
    torch.testing.assert_close(torch.cat([found for found, _, _ in ranks]), out[ids])
    torch.testing.assert_close(summed([grad for *_, grad in ranks]), grads)


def test_degrees_of_sources_need_a_hop_more(partitioned: Cutter) -> None:
    """GCNConv divides by them; and ids of seeds keep their order."""
    graph, model = mixed(), made(lambda: GCN(6, 5, LAYERS, CLASSES))
    mask, path = chosen(57, "some"), partitioned(graph, 3, "random")
    out, _ = wanted(model, graph, mask)

    def case(group: Any) -> None:
        part = sar.load_partition_data(path)
        whole = sar.pyg.construct_full_graph(part)
        ids = whole.n_id[mask[whole.n_id]].flip(0)
        for hops, is_exact in ((LAYERS, False), (LAYERS + 1, True)):
            data = sar.pyg.construct_neighborhood(part, ids, hops)
            assert torch.equal(data.n_id[: data.batch_size], ids)
            assert torch.equal(
                data.y[: data.batch_size].long(), graph.node_data["_N"]["label"][ids]
            )
            found = model(data.x.double(), data.edge_index)[: data.batch_size]
            differ = group.all_reduce((found - out[ids]).abs().sum().detach()) > 1e-9
            assert bool(differ) != is_exact

    run_threads(3, case)


def step(model: nn.Module, optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    sar.gather_grads(model)
    optimizer.step()


@pytest.mark.parametrize("cut", [(1, "random"), (4, "adversarial")], ids=str)
def test_sampled_then_exact(cut: tuple[int, str], partitioned: Cutter) -> None:
    """One model, warmed on mini-batches, evaluates and goes on as it would in one process."""
    graph = mixed()
    path, label = partitioned(graph, *cut), graph.node_data["_N"]["label"]
    train = graph.node_data["_N"]["train_mask"]
    x, edges = graph.node_data["_N"]["feat"].double(), torch.stack(graph.edges[ETYPE_HOMO])

    cold = made(lambda: GraphSAGE(6, 8, LAYERS, 4))

    def case(group: Any) -> Any:
        part, model = sar.load_partition_data(path), deepcopy(cold)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        mine = part.node_features["_N/train_mask"]
        with NeighborLoader(part, [3, 2], mine, as_="pyg", batch_size=5) as loader:
            for batch in loader:
                found = model(
                    batch.x.double(),
                    batch.edge_index,
                    num_sampled_nodes_per_hop=batch.num_sampled_nodes,
                    num_sampled_edges_per_hop=batch.num_sampled_edges,
                )[: batch.batch_size]
                seeds = batch.y[: batch.batch_size]
                step(model, optimizer, F.cross_entropy(found, seeds, reduction="sum"))
        data, warm = sar.pyg.construct_full_graph(part), deepcopy(model)
        settings = deepcopy(optimizer.state_dict())
        losses = []
        for _ in range(3):
            found = model(data.x.double(), data.edge_index)
            loss = F.cross_entropy(found[mine], data.y[mine], reduction="sum")
            step(model, optimizer, loss)
            losses.append(float(group.all_reduce(loss.detach())))
        return warm, settings, losses

    ranks = run_threads(cut[0], case)
    warm, settings, losses = ranks[0]
    assert not torch.equal(next(cold.parameters()), next(warm.parameters()))
    optimizer = torch.optim.Adam(warm.parameters(), lr=0.02)
    optimizer.load_state_dict(settings)
    for number, want in enumerate(losses):
        loss = F.cross_entropy(warm(x, edges)[train], label[train], reduction="sum")
        assert float(loss.detach()) == pytest.approx(want, rel=1e-9), number
        step_alone(optimizer, loss)
    assert all(one[2] == losses for one in ranks)


def step_alone(optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_dropout_knows_trimmed_rows(partitioned: Cutter) -> None:
    """The same masks on any number of ranks, also behind a layer that is left out of."""

    whole = made(lambda: GraphSAGE(6, 8, 3, CLASSES, dropout=0.5))

    def case(group: Any) -> tuple[Tensor, Tensor]:
        model = sar.nn.convert_dropout(deepcopy(whole))
        sar.manual_seed(7)
        part = sar.load_partition_data(path)
        mask = part.node_features["_N/orig_id"] % 5 == 0
        data = sar.pyg.construct_neighborhood(part, mask, 3)
        hops = data.num_sampled_nodes, data.num_sampled_edges
        keys = "num_sampled_nodes_per_hop", "num_sampled_edges_per_hop"
        found = model(data.x.double(), data.edge_index, **dict(zip(keys, hops, strict=True)))
        return found.detach()[: data.batch_size], data.n_id[: data.batch_size]

    got = []
    for parts in (1, 3):
        path = partitioned(mixed(), parts)
        rows, ids = (torch.cat(one) for one in zip(*run_threads(parts, case), strict=True))
        got.append(rows[ids.argsort()])
    torch.testing.assert_close(got[0], got[1])


class Relations(nn.Module):
    """Layers over several types, trimmed where numbers of hops are given."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(6, 5), (5, CLASSES)]
        self.convs = nn.ModuleList(
            HeteroConv({e: SAGEConv(size[0], size[1]) for e in hetero().edges}, aggr="sum")
            for size in sizes
        )

    def forward(self, x: dict, edges: dict, *hops: Any) -> dict:
        for layer, conv in enumerate(self.convs):
            if hops:
                x, edges, _ = trim_to_layer(layer, *hops, x, edges)
            x = {**{n: rows[:, :0] for n, rows in x.items()}, **conv(x, edges)}
            x = {
                n: rows if rows.shape[1] else rows.new_zeros(len(rows), 5) for n, rows in x.items()
            }
        return x


@pytest.mark.parametrize("form", ["pair", "both types"])
@pytest.mark.parametrize("parts", [1, 3])
def test_several_types(parts: int, form: str, partitioned: Cutter) -> None:
    graph, model = hetero(), made(Relations)
    feats = {n: columns["feat"].double() for n, columns in graph.node_data.items()}
    out = model(feats, {etype: torch.stack(ends) for etype, ends in graph.edges.items()})
    path, types = partitioned(graph, parts, "random"), ["user"]
    types += ["item"] if form == "both types" else []

    def case(group: Any) -> None:
        part = sar.load_partition_data(path)
        masks = {n: part.node_features[f"{n}/orig_id"] % 3 == 0 for n in types}
        seeds = masks if form == "both types" else ("user", masks["user"])
        data = sar.pyg.construct_neighborhood(part, seeds, LAYERS)
        x = {n: rows.double() for n, rows in data.x_dict.items()}
        hops = data.num_sampled_nodes_dict, data.num_sampled_edges_dict
        for found in (model(x, data.edge_index_dict), model(x, data.edge_index_dict, *hops)):
            for ntype in types:
                size, ids = data[ntype].batch_size, data[ntype].n_id
                assert size == int(masks[ntype].sum())
                torch.testing.assert_close(found[ntype][:size], out[ntype][ids[:size]])

    run_threads(parts, case)


BAD: dict[str, tuple[Any, Any, str]] = {
    "ids of others": (torch.arange(57), 2, "is not this rank's"),
    "twice": (None, 2, "comes several times"),
    "floats": (torch.rand(3), 2, "integers"),
    "mask": (torch.ones(99, dtype=torch.bool), 2, "own nodes"),
    "type": (("paper", torch.arange(3)), 2, "paper"),
    "no tensor": ([3], 2, "seed_nodes"),
    "no hops": (torch.arange(0), 0, "num_hops"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_seeds_raise_on_every_rank(kind: str, partitioned: Cutter) -> None:
    path, (seeds, hops, words) = partitioned(mixed(), 2, "random"), BAD[kind]

    def case(group: Any) -> None:
        part = sar.load_partition_data(path)
        own = part.node_features["_N/orig_id"]
        given = torch.cat([own, own]) if seeds is None else seeds
        if group.rank == 0:
            given = own
        sar.pyg.construct_neighborhood(part, given, hops)

    with pytest.raises((ValueError, TypeError), match=words):
        run_threads(2, case)


def test_edges_that_nobody_trims_say_so(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        trim_to_layer(1, [0, 0], [0, 0], data.x, data.edge_index)

    path = partitioned(mixed(), 2, "random")
    with pytest.raises(sar.NotSupportedError, match="construct_neighborhood"):
        run_threads(2, case)
