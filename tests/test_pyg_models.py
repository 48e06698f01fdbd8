"""Models of PyG, unmodified, on mini-batches, against the whole graph in one process."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from harness import run_threads
from harness.graphs import ETYPE_HOMO, GraphArrays, bibliography, looped, mixed
from harness.parts import Cutter
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GAT, GATConv, GATv2Conv, HGTConv
from torch_geometric.utils import trim_to_layer

import sar
from sar.comm import Group
from sar.sampling import NeighborLoader

SIZES = [1, 2]
LAYERS, CLASSES = 2, 4


@cache
def papers() -> GraphArrays:
    """Papers, authors and terms, all with features; each type has incoming relations."""
    graph = bibliography(60, seed=2)
    rng = torch.Generator().manual_seed(0)
    rows = {n: torch.randn(c, 16, generator=rng) for n, c in graph.num_nodes.items()}
    data = {n: dict(graph.node_data.get(n, {})) for n in graph.num_nodes}
    data = {n: {"feat": rows[n]} | columns for n, columns in data.items()}
    return replace(graph, name="papers", node_data=data)


class Stack(nn.Module):
    """A user's layers, called with an edge index."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.first = layer(6, 4, heads=2)
        self.second = layer(8, CLASSES, heads=1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(F.elu(self.first(x, edge_index)), edge_index)


class HGT(nn.Module):
    """The usual stack of heterogeneous graph transformers (Hu et al. 2020)."""

    def __init__(self, graph: GraphArrays) -> None:
        super().__init__()
        self.lins = nn.ModuleDict({n: nn.Linear(16, 8) for n in graph.num_nodes})
        metadata = list(graph.num_nodes), list(graph.edges)
        self.convs = nn.ModuleList(HGTConv(8, 8, metadata, heads=2) for _ in range(LAYERS))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: dict, edges: dict, nodes_of_hop: Any = None, edges_of_hop: Any = None):
        x = {n: self.lins[n](rows).relu() for n, rows in x.items()}
        for number, conv in enumerate(self.convs):
            if nodes_of_hop is not None:
                x, edges, _ = trim_to_layer(number, nodes_of_hop, edges_of_hop, x, edges)
            x = conv(x, edges)
        return self.last(x["paper"])


def gat() -> nn.Module:
    return GAT(6, 8, LAYERS, CLASSES, heads=2, v2=False, jk=None)


def gatv2() -> nn.Module:
    return GAT(6, 8, LAYERS, CLASSES, heads=2, v2=True, jk="last")


MODELS: dict[str, tuple[Callable[[], GraphArrays], Callable[[], nn.Module]]] = {
    "GAT": (mixed, gat),
    "GATv2": (mixed, gatv2),
    "GATConv": (mixed, lambda: Stack(GATConv)),
    "GATv2Conv without loops": (looped, lambda: Stack(no_loops)),
    "HGT": (papers, lambda: HGT(papers())),
}
TRIMMED = {"GAT", "GATv2", "HGT"}  # stacks that take how many came with each hop


def no_loops(*sizes: int, **options: Any) -> nn.Module:
    return GATv2Conv(*sizes, add_self_loops=False, **options)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][1]().double()


def on_the_whole(model: nn.Module, graph: GraphArrays) -> Tensor:
    """Logits of all nodes of the type that has labels, by original id."""
    feats = {n: columns["feat"].double() for n, columns in graph.node_data.items()}
    edges = {etype: torch.stack(ends) for etype, ends in graph.edges.items()}
    if graph.is_homogeneous:
        return model(feats["_N"], edges[ETYPE_HOMO])
    return model(feats, edges)


def on_a_batch(model: nn.Module, batch: Any, is_trimmed: bool) -> Tensor:
    """Logits of its seeds."""
    if not hasattr(batch, "node_types"):
        words = batch.x.double(), batch.edge_index
        hops = ("num_sampled_nodes", "num_sampled_edges") if is_trimmed else ()
        return model(*words, **{f"{n}_per_hop": batch[n] for n in hops})[: batch.batch_size]
    x = {n: rows.double() for n, rows in batch.x_dict.items()}
    hops = (batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict) if is_trimmed else ()
    return model(x, batch.edge_index_dict, *hops)[: batch["paper"].batch_size]


def loader_of(data: Any, fanouts: list[int], **options: Any) -> NeighborLoader:
    """Of this rank's training nodes."""
    ntype = "_N" if len(data.book.ntypes) == 1 else "paper"
    mask = data.node_features[f"{ntype}/train_mask"].bool()
    return NeighborLoader(data, fanouts, (ntype, mask), as_="pyg", **options)


def labelled(batch: Any) -> Any:
    """Where a batch keeps its seeds."""
    return batch["paper"] if hasattr(batch, "node_types") else batch


@pytest.mark.parametrize("is_trimmed", [False, True], ids=["all rows", "trimmed"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_all_neighbors_give_the_whole_graph(
    name: str, size: int, is_trimmed: bool, partitioned: Cutter
) -> None:
    """Logits of seeds and gradients of the parameters, to rounding, over batches of all ranks."""
    if is_trimmed and name not in TRIMMED:
        pytest.skip("a plain stack takes no numbers of hops")
    graph, model = MODELS[name][0](), made(name)
    columns = graph.node_data["_N" if graph.is_homogeneous else "paper"]
    train = columns["train_mask"].bool()
    whole = on_the_whole(model, graph)
    F.cross_entropy(whole[train], columns["label"][train], reduction="sum").backward()

    def case(group: Group, path: str) -> tuple[list[int], list[Tensor]]:
        data, own, seen = sar.load_partition_data(path), deepcopy(model), []
        with loader_of(data, [-1] * LAYERS, batch_size=7) as loader:
            for batch in loader:
                store = labelled(batch)
                seeds, labels = store.n_id[: store.batch_size], store.y[: store.batch_size]
                logits = on_a_batch(own, batch, is_trimmed)
                torch.testing.assert_close(logits, whole[seeds].detach(), rtol=1e-12, atol=1e-12)
                F.cross_entropy(logits, labels, reduction="sum").backward()
                seen += seeds.tolist()
        sar.gather_grads(own)
        return seen, [p.grad for p in own.parameters()]

    results = run_threads(size, case, partitioned(graph, size))
    seen = sorted(node for nodes, _ in results for node in nodes)
    assert seen == train.nonzero().view(-1).tolist()
    for _, grads in results:
        for grad, parameter in zip(grads, model.parameters(), strict=True):
            want, zeros = parameter.grad, torch.zeros_like(parameter)  # no grad: not in the loss
            want, grad = (zeros if one is None else one for one in (want, grad))
            scale = 1e-12 * max(1.0, float(want.abs().max()))
            torch.testing.assert_close(grad, want, rtol=1e-12, atol=scale)
