"""The sampling names of the original, over :class:`sar.sampling.NeighborLoader`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sar.edges import as_stored
from sar.edges.build import edge_ends
from sar.frontends.dgl import ShardedGraph
from sar.partition.arrays import ORIG_EID
from sar.partition.features import FeatureStore
from sar.partition.load import PartitionData
from sar.partition.require import require_dgl
from sar.partition.shards import ShardEdges
from sar.sampling import NeighborLoader
from sar.tracing.lazy import eager

_INPUT, _OUTPUT = "input:", "output:"  # before names of features, which may be both


class DistNeighborSampler:
    """How blocks are drawn; :func:`DataLoader` draws them.

    Args:
        fanouts: neighbors that a node draws for each layer, the input layer's first.
        prob: the column of ``graph.edata`` that chances are in proportion to.
        replace: draw with replacement.
        copy_edata: give blocks the columns of their edges.
        input_node_features: [n, ...] each, of this rank's nodes, for the first block's sources.
        output_node_features: the same for the last block's destinations.
        output_device: where blocks are put.
        use_hybrid_partitioning: keep the edges of the whole graph on every rank.
        batch_comm_overlap: accepted; batches are made ahead in any case.
    """

    def __init__(
        self,
        fanouts: Sequence[int],
        prob: str | None = None,
        replace: bool = False,
        copy_edata: bool = True,
        input_node_features: Mapping[str, Tensor] | None = None,
        output_node_features: Mapping[str, Tensor] | None = None,
        output_device: torch.device | str | None = None,
        use_hybrid_partitioning: bool = False,
        batch_comm_overlap: bool = False,
    ) -> None:
        self.fanouts, self.prob, self.replace = list(fanouts), prob, replace
        self.copy_edata, self.output_device = copy_edata, output_device
        self.input_node_features = dict(input_node_features or {})
        self.output_node_features = dict(output_node_features or {})
        self.use_hybrid_partitioning = use_hybrid_partitioning


def DataLoader(
    full_graph_manager: ShardedGraph,
    seed_nodes: Tensor,
    graph_sampler: DistNeighborSampler,
    batch_size: int = 1,
    drop_last: bool = False,
    shuffle: bool = False,
    precompute_optimized_batches: bool = True,
    optimized_batches_cache: str | None = None,
    num_workers: int = 0,
    batch_comm_overlap: bool = False,
) -> NeighborLoader:
    """Iterates over lists of blocks, the input layer's first; made collectively.

    Args:
        full_graph_manager: the whole graph, of one node type.
        seed_nodes: int64 [s] global ids of this rank's nodes.
        precompute_optimized_batches, optimized_batches_cache: not there: batches are of seeds in
            their order, or shuffled.
        num_workers, batch_comm_overlap: accepted; a thread makes batches ahead.
    """
    if optimized_batches_cache is not None:
        warnings.warn(
            "optimized_batches_cache: batches are not precomputed; seeds come in their order, or "
            "shuffled",
            stacklevel=2,
        )
    sampler, group = graph_sampler, full_graph_manager.group
    data, error = None, None
    try:
        data = _as_partition(full_graph_manager, sampler)
    except Exception as caught:  # any, too little memory as well: the others would wait
        error = caught
    group.agree(error, "DataLoader")
    if data is None:
        raise TypeError("full_graph_manager: got nothing")
    ntype, etype = data.book.ntypes[0], data.book.canonical_etypes[0]
    names: dict[Any, list[str]] = {ntype: [_name(key) for key in data.node_features]}
    names |= {etype: [_name(key) for key in data.edge_features]} if sampler.copy_edata else {}
    return NeighborLoader(
        data, sampler.fanouts[::-1], seed_nodes, batch_size=batch_size, shuffle=shuffle,
        drop_last=drop_last, replace=sampler.replace, weight_attr=sampler.prob, as_="dgl",
        fields=names, topology="replicated" if sampler.use_hybrid_partitioning else "partitioned",
        transform=partial(_finished, device=sampler.output_device), group=group,
    )  # fmt: skip


def _as_partition(graph: ShardedGraph, sampler: DistNeighborSampler) -> PartitionData:
    """A partition of the edges of a graph and their columns, with the features of the sampler."""
    if not isinstance(graph, ShardedGraph) or graph.is_block or len(graph.canonical_etypes) != 1:
        raise ValueError(f"full_graph_manager: got {graph!r}, expected a whole graph of one type")
    store, group = graph._store, graph.group
    etype, ends = graph.canonical_etypes[0], edge_ends(as_stored(graph.scope().relation, "edges"))
    order = torch.argsort(ends.owner, stable=True)
    counts = torch.bincount(ends.owner, minlength=group.size).cumsum(0)
    edges = ShardEdges(ends.src[order], ends.dst[order], order, [0, *counts.tolist()])
    nodes, columns = FeatureStore({}), FeatureStore({})
    for before, given in (
        (_INPUT, sampler.input_node_features),
        (_OUTPUT, sampler.output_node_features),
    ):
        for name, rows in given.items():
            nodes[f"{etype[0]}/{before}{name}"] = rows.detach().cpu()
    for name in graph.edata if sampler.copy_edata or sampler.prob else ():
        if name == ORIG_EID:  # ids of edges are the graph's own here
            continue
        columns[f"{':'.join(etype)}/{name}"] = eager(graph.edata[name]).detach().cpu()
    data = PartitionData(store.book, group.rank, {etype: edges}, nodes, columns)
    vars(data)["keys"] = store.keys  # the graph's, by original ids where it knows them
    return data


def _name(key: str) -> str:
    return key.partition("/")[2]


def _finished(batch: tuple[Any, Any, list[Any]], device: Any) -> list[Any]:
    """The blocks, with features where the original has them, on ``device`` if it is given."""
    require_dgl("DGL's blocks")
    blocks = batch[2]
    for frame, mine in ((blocks[0].srcdata, _INPUT), (blocks[-1].dstdata, _OUTPUT)):
        for name in [one for one in frame if one.startswith((_INPUT, _OUTPUT))]:
            rows = frame.pop(name)
            if name.startswith(mine):
                frame[name.removeprefix(mine)] = rows
    return blocks if device is None else [block.to(device) for block in blocks]
