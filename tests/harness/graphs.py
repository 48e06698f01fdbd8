"""Small graphs with everything that goes wrong in large ones, and their DGL twins."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from sar.partition.sources.generate import bibliography_graph, community_graph

NUM_CLASSES = 4
NUM_FEATURES = 6
EDGE_TYPES = 3


def community(nodes: int, edges: int, seed: int = 0, **options: Any) -> GraphArrays:
    """What ``synthetic:`` is on the command line."""
    return community_graph(nodes, edges, seed, **options)


def bibliography(papers: int, seed: int = 0, **options: Any) -> GraphArrays:
    """What ``bibliography:`` is on the command line."""
    return bibliography_graph(papers, seed, **options)


def homogeneous(name: str, num_nodes: int, src: Any, dst: Any, seed: int = 0) -> GraphArrays:
    """A graph of one type with features, labels, a training mask and edge features."""
    edges = (torch.as_tensor(src, dtype=torch.int64), torch.as_tensor(dst, dtype=torch.int64))
    rng = torch.Generator().manual_seed(seed)
    return GraphArrays(
        name,
        {NTYPE_HOMO: num_nodes},
        {ETYPE_HOMO: edges},
        {NTYPE_HOMO: _node_data(num_nodes, rng)},
        {ETYPE_HOMO: _edge_data(len(edges[0]), rng)},
    ).with_orig_ids()


def _node_data(count: int, rng: torch.Generator) -> dict[str, torch.Tensor]:
    train = torch.rand(count, generator=rng) < 0.6
    if count:
        train[0] = True
    return {
        "feat": torch.randn(count, NUM_FEATURES, generator=rng),
        "label": torch.randint(NUM_CLASSES, (count,), generator=rng),
        "train_mask": train,
    }


def _edge_data(count: int, rng: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.rand(count, generator=rng) + 0.5,
        "type": torch.randint(EDGE_TYPES, (count,), generator=rng),
        "orig_eid": torch.arange(count),
    }


@cache
def mixed(num_nodes: int = 57, seed: int = 1) -> GraphArrays:
    """Communities with skewed degrees, multi-edges, self loops, isolated and sourceless nodes."""
    rng = np.random.default_rng(seed)
    connected = num_nodes - 5
    block = rng.integers(0, 4, connected)
    popularity = 1.0 / np.arange(1, connected + 1)
    src = rng.integers(0, connected, 6 * connected)
    dst = rng.choice(connected, len(src), p=popularity / popularity.sum())
    keep = (block[src] == block[dst]) | (rng.random(len(src)) < 0.4)
    src, dst = src[keep], dst[keep]
    loops = rng.choice(connected, 6, replace=False)
    again = rng.choice(len(src), 8, replace=False)
    only_source = np.full(3, connected)  # a node without edges into it
    src = np.concatenate([src, loops, src[again], only_source])
    dst = np.concatenate([dst, loops, dst[again], rng.choice(connected, 3, replace=False)])
    order = rng.permutation(len(src))
    return homogeneous("mixed", num_nodes, src[order], dst[order], seed)


@cache
def looped() -> GraphArrays:
    """The mixed graph with a self loop on every node, so that no in-degree is zero."""
    graph = mixed()
    src, dst = graph.edges[ETYPE_HOMO]
    nodes = torch.arange(graph.num_nodes[NTYPE_HOMO])
    ends = torch.cat([src, nodes]), torch.cat([dst, nodes])
    return homogeneous("looped", len(nodes), *ends, seed=2)


@cache
def loopless() -> GraphArrays:
    """The mixed graph without self loops, where no two ends of an edge are at one place."""
    src, dst = mixed().edges[ETYPE_HOMO]
    keep = src != dst
    return homogeneous("loopless", mixed().num_nodes[NTYPE_HOMO], src[keep], dst[keep], seed=4)


@cache
def typed() -> GraphArrays:
    """The mixed graph with its edges sorted by type, as layers with ``presorted`` want them."""
    graph = mixed()
    data = dict(graph.edge_data[ETYPE_HOMO])
    data["type"] = data["type"].sort().values
    return replace(graph, name="typed", edge_data={ETYPE_HOMO: data})


@cache
def hetero() -> GraphArrays:
    """Users, items and tags; bipartite relations, one back, one inside a type, one without edges
    into some items. Node type ``tag`` has no incoming relation."""
    rng = np.random.default_rng(3)
    counts = {"item": 23, "tag": 9, "user": 31}
    relations = {
        ("item", "bought_by", "user"): 70,  # in the order that DGL gives them
        ("tag", "marks", "item"): 30,
        ("user", "buys", "item"): 90,
        ("user", "follows", "user"): 80,
    }
    generator = torch.Generator().manual_seed(3)
    edges, edge_data = {}, {}
    for etype, count in relations.items():
        src = torch.as_tensor(rng.integers(0, counts[etype[0]], count))
        dst = torch.as_tensor(rng.integers(0, max(1, counts[etype[2]] - 3), count))
        edges[etype] = (src, dst)
        edge_data[etype] = _edge_data(count, generator)
    node_data = {ntype: _node_data(count, generator) for ntype, count in counts.items()}
    return GraphArrays("hetero", counts, edges, node_data, edge_data).with_orig_ids()


@cache
def no_edges() -> GraphArrays:
    """Isolated nodes only."""
    return homogeneous("no_edges", 9, [], [])


@cache
def mostly_isolated() -> GraphArrays:
    """Edges among the first nodes, and many nodes beside."""
    return homogeneous("mostly_isolated", 14, [0, 1, 2, 2], [1, 2, 0, 3])


@cache
def star() -> GraphArrays:
    """A hub that reaches all and is reached by all."""
    leaves = list(range(1, 16))
    hub = [0] * len(leaves)
    return homogeneous("star", 16, leaves + hub, hub + leaves)


@cache
def repeated() -> GraphArrays:
    """Few pairs of nodes, each joined by many edges."""
    return homogeneous("repeated", 6, [0, 1, 2, 3, 4, 0] * 12, [1, 2, 3, 4, 0, 3] * 12)


@cache
def loops() -> GraphArrays:
    """Nothing but self loops, two on some nodes."""
    return homogeneous("loops", 8, [*range(8), 1, 2], [*range(8), 1, 2])


@cache
def crossing() -> GraphArrays:
    """Two sides without an edge inside either; cut between them, every edge is cut."""
    rng = np.random.default_rng(6)
    left, right = rng.integers(0, 6, 40), rng.integers(6, 12, 40)
    return homogeneous("crossing", 12, [*left, *right[:20]], [*right, *left[:20]])


@cache
def ring() -> GraphArrays:
    """As many nodes as ranks: one each."""
    return homogeneous("ring", 4, [0, 1, 2, 3, 0], [1, 2, 3, 0, 2])


@cache
def all_alike() -> GraphArrays:
    """All features zero: every maximum is shared by all messages."""
    graph = mixed(21, seed=8)
    data = dict(graph.node_data[NTYPE_HOMO])
    data["feat"] = torch.zeros_like(data["feat"])
    return replace(graph, name="all_alike", node_data={NTYPE_HOMO: data})


@cache
def few_seeds() -> GraphArrays:
    """Training nodes only among the first ids: a rank that owns others has none."""
    graph = mixed(25, seed=9)
    data = dict(graph.node_data[NTYPE_HOMO])
    data["train_mask"] = torch.arange(25) < 5
    return replace(graph, name="few_seeds", node_data={NTYPE_HOMO: data})


@cache
def sparse_hetero() -> GraphArrays:
    """The hetero graph with relations of one edge, one without any, and a single tag.

    The relation without edges is one that is summed: DGL's max gives wrong gradients there.
    """
    graph = copy.deepcopy(hetero())
    counts = {**graph.num_nodes, "tag": 1}
    kept = {("user", "buys", "item"): 90, ("item", "bought_by", "user"): 0}
    kept |= {("tag", "marks", "item"): 1, ("user", "follows", "user"): 1}
    graph.edges["tag", "marks", "item"][0][0] = 0
    for etype in (("tag", "marks", "item"), ("user", "follows", "user")):
        graph.edges[etype][1][0] = 0  # a training node: the edge is in every block
    edges = {e: (s[: kept[e]], d[: kept[e]]) for e, (s, d) in graph.edges.items()}
    edge_data = {
        e: {key: value[: kept[e]] for key, value in data.items()}
        for e, data in graph.edge_data.items()
    }
    node_data = {
        t: {key: value[: counts[t]] for key, value in data.items()}
        for t, data in graph.node_data.items()
    }
    return GraphArrays("sparse_hetero", counts, edges, node_data, edge_data)


@cache
def shop() -> GraphArrays:
    """Three types and five relations, each type with edges into it and with nodes that have none;
    several relations out of users and out of items."""
    rng = np.random.default_rng(11)
    counts = {"item": 21, "tag": 10, "user": 27}
    relations = {
        ("item", "bought_by", "user"): 60,  # in the order that DGL gives them
        ("item", "carries", "tag"): 40,
        ("tag", "marks", "item"): 35,
        ("user", "buys", "item"): 60,
        ("user", "follows", "user"): 70,
    }
    generator = torch.Generator().manual_seed(11)
    edges, edge_data = {}, {}
    for etype, count in relations.items():
        src = torch.as_tensor(rng.integers(0, counts[etype[0]] - 1, count))
        dst = torch.as_tensor(rng.integers(0, counts[etype[2]] - 2, count))
        edges[etype] = (src, dst)
        edge_data[etype] = _edge_data(count, generator)
    node_data = {ntype: _node_data(count, generator) for ntype, count in counts.items()}
    return GraphArrays("shop", counts, edges, node_data, edge_data).with_orig_ids()


_ALL = (
    mixed, looped, loopless, typed, hetero, no_edges, mostly_isolated, star, repeated, loops,
    crossing, ring, all_alike, few_seeds, sparse_hetero, shop,
)  # fmt: skip


def sample(name: str) -> GraphArrays:
    """The graph of that name."""
    return next(make for make in _ALL if make.__name__ == name)()


def to_dgl(graph: GraphArrays) -> Any:
    """The same graph as one process has it, ids and order unchanged."""
    import dgl

    edges = {etype: ends for etype, ends in graph.edges.items()}
    whole = dgl.heterograph(edges, num_nodes_dict=dict(graph.num_nodes))
    for ntype, data in graph.node_data.items():
        for key, value in data.items():
            whole.nodes[ntype].data[key] = value
    for etype, data in graph.edge_data.items():
        for key, value in data.items():
            whole.edges[etype].data[key] = value
    return whole
