"""The rows and edges that some layers need for the outputs of given nodes, as PyG's data."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sar import expect, registry
from sar.comm import current_group
from sar.config import Policy
from sar.frontends.pyg.data import check_library, data_of, graphs_of, is_unnamed
from sar.frontends.pyg.graph import EdgeGraph
from sar.graph.build import agree_data
from sar.graph.layer_blocks import blocks_of_rows
from sar.graph.store import Structure
from sar.partition.book import EType
from sar.partition.load import PartitionData

Seeds = Tensor | tuple[str, Tensor] | dict[str, Tensor]


def construct_neighborhood(
    partition_data: PartitionData,
    seed_nodes: Seeds,
    num_hops: int,
    policy: Policy | None = None,
) -> Any:
    """All that ``num_hops`` layers need for the outputs of some nodes, of this rank; collective.

    It is what PyG's ``NeighborLoader`` gives with all neighbors in one batch of all ranks' seeds:
    this rank's seeds, then hop by hop the rows of this rank that other rows of any rank read, and
    the edges that end in rows which are less than ``num_hops`` away. So the first ``batch_size``
    rows of ``model(data.x, data.edge_index)`` are the seeds'. Layers that read degrees of sources,
    as GCNConv does, see those of these edges: they need a hop more.

    ``torch_geometric.utils.trim_to_layer``, also inside of PyG's models that take
    ``num_sampled_nodes_per_hop``, leaves out what later layers do not need.

    Args:
        partition_data: what :func:`sar.load_partition_data` gave.
        seed_nodes: bool [num_nodes] of this rank's nodes, or int [n] distinct ids of some of them,
            the rows that they had in the graph which was cut; may be none. Of several types: (node
            type, such a tensor), or a dictionary of them by node type.
        num_hops: int of 1 or more, the number of layers.
        policy: how halos stream; ``None`` follows :class:`sar.Config` at each call.

    Returns:
        ``Data`` or ``HeteroData`` as of :func:`construct_full_graph`, with ``batch_size``, the
        seeds of this rank, and, per type, lists of int ``num_sampled_nodes`` [1 + num_hops] and
        ``num_sampled_edges`` [num_hops]: how many came with each hop.

    Raises:
        ValueError, TypeError: on every rank, for seeds of any rank that repeat or are not its own,
            or another ``num_hops``.
        PartitionError, MissingDependencyError, NotSupportedError, CommError: as
            :func:`construct_full_graph`.
    """
    check_library()
    registry.front_end("pyg").install()
    group = current_group()
    agree_data(partition_data, group, policy)
    with group.agreed("construct_neighborhood", {"num_hops": num_hops}):
        expect.integer(num_hops, "num_hops", at_least=1)
        rows = _rows_of_seeds(partition_data, seed_nodes)
    blocks = blocks_of_rows(partition_data, rows, num_hops, True, are_square=True)
    graphs = [graphs_of(block, policy) for block in blocks]
    places = [_positions(block, partition_data) for block in blocks]
    data = data_of(blocks[0], graphs[0], partition_data, places[0])
    for ntype, seeds in rows.items():
        store = _store(data, ntype, partition_data)
        store.batch_size = len(seeds)
        sizes = [len(block.src_rows[ntype]) for block in blocks[::-1]]
        store.num_sampled_nodes = [len(seeds), *_differences([len(seeds), *sizes])]
    for etype in partition_data.book.canonical_etypes:
        layers = [(graph[etype], known[etype]) for graph, known in zip(graphs, places, strict=True)]
        _trim(layers)
        sizes = [0, *(len(known) for _, known in layers[::-1])]
        _store(data, etype, partition_data).num_sampled_edges = _differences(sizes)
    return data


def _store(data: Any, kind: str | EType, given: PartitionData) -> Any:
    return data if is_unnamed(given.book.ntypes, given.book.canonical_etypes) else data[kind]


def _trim(layers: list[tuple[EdgeGraph, Tensor]]) -> None:
    """Let each layer's graph know the next one's, and which of its edges are left there."""
    for (outer, known), (inner, some) in [*pairwise(layers)][::-1]:
        outer.trim_with(inner, torch.searchsorted(known, some).to(outer.device))


def _differences(counts: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(counts)]


def _positions(block: Structure, given: PartitionData) -> dict[EType, Tensor]:
    """Ascending int64 positions of a block's edges among those of this rank, by relation."""
    starts = {etype: int(ids[given.part_id, 0]) for etype, ids in given.book.edge_ranges.items()}
    return {etype: ids() - starts[etype] for etype, ids in block.edge_ids.items()}


def _rows_of_seeds(given: PartitionData, seeds: Any) -> dict[str, Tensor]:
    """int64 [n] rows of this rank's nodes by type, in the order of the seeds."""
    ntypes = given.book.ntypes
    if isinstance(seeds, tuple) and len(seeds) == 2:
        seeds = dict([seeds])
    if not isinstance(seeds, dict):
        if len(ntypes) > 1:
            raise TypeError(
                f"seed_nodes: got {type(seeds).__name__}, expected (node type, seeds) or a "
                f"dictionary by node type, of {ntypes}"
            )
        seeds = {ntypes[0]: seeds}
    for ntype in seeds:
        expect.one_of(ntype, "seed_nodes", ntypes)
    none = torch.empty(0, dtype=torch.int64)
    return {ntype: _rows(given, ntype, seeds.get(ntype, none)) for ntype in ntypes}


def _rows(given: PartitionData, ntype: str, seeds: Tensor) -> Tensor:
    expect.tensor(seeds, "seed_nodes")
    seeds, count = seeds.cpu(), given.num_nodes(ntype)
    if seeds.dim() != 1 or seeds.is_floating_point() or seeds.is_complex():
        raise TypeError(
            f"seed_nodes: got {seeds.dtype} {list(seeds.shape)}, expected bool [{count}] of own "
            f"nodes, or integers [n]"
        )
    if seeds.dtype == torch.bool:
        if len(seeds) != count:
            raise ValueError(f"seed_nodes: got bool [{len(seeds)}], expected [{count}], own nodes")
        return seeds.nonzero().view(-1)
    ids = given.keys.node_names(ntype)[0]
    known, order = ids.sort()
    places = torch.searchsorted(known, seeds.long()).clamp(max=max(count - 1, 0))
    strange = seeds != known[places] if count else torch.ones_like(seeds, dtype=torch.bool)
    if strange.any():
        raise ValueError(
            f"seed_nodes: node {int(seeds[strange][0])} of type {ntype!r} is not this rank's; "
            "expected rows that its nodes had in the graph that was cut"
        )
    if len(seeds.unique()) != len(seeds):
        raise ValueError("seed_nodes: a node comes several times, expected distinct ones")
    return order[places] if count else places
