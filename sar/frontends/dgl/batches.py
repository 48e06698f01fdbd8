"""Mini-batches as DGL's loaders give them: blocks, or a graph between all nodes of a batch.

``dgl.create_block`` looks for the largest id and makes a graph of each relation first: four times
what the block takes itself, half of which are its edge ids. Arrays that are known to fit spare it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sar._private import dgl_makers
from sar.partition.arrays import ORIG_EID
from sar.partition.book import EType
from sar.partition.require import require_dgl
from sar.sampling.batch import NO_EDGES, Drawn, SampledBatch, Types, columns_by_hop, tensors
from sar.sampling.sample import Edges

Ends = tuple[Tensor, Tensor]
_FORMATS = ["coo", "csr", "csc"]  # that DGL may make of the one it gets


def make_block(
    edges: Mapping[EType, Ends],
    starts: Mapping[EType, Tensor],
    sources: Mapping[str, int],
    targets: Mapping[str, int],
) -> Any:
    """What ``dgl.create_block`` gives for edges, int64 ends by relation, that are in range.

    ``starts``, of relations whose edges are sorted by destination, is int64 [n + 1] where those of
    each destination begin; ``sources`` and ``targets`` count the nodes of each type.
    """
    require_dgl("DGL's blocks")
    dgl = dgl_makers()
    relations, ntypes = sorted(edges), sorted(sources)
    made = []
    for etype in relations:
        (src, dst), counts = edges[etype], (sources[etype[0]], targets[etype[2]])
        if etype in starts:
            ids = torch.arange(len(src))  # without, DGL refuses to read rows of edges
            given = starts[etype], src, ids, _FORMATS, True
            made.append(dgl.from_csr(2, *counts, *given))
        else:
            made.append(dgl.from_coo(2, *counts, src, dst, _FORMATS))
    nodes = [*(sources[n] for n in ntypes), *(targets[n] for n in ntypes)]
    index = dgl.from_relations(
        _meta_graph(tuple(ntypes), tuple(relations)), made, dgl.to_index(nodes, "int64")
    )
    return dgl.block(index, (ntypes, ntypes), [etype[1] for etype in relations])


@cache
def _meta_graph(ntypes: tuple[str, ...], relations: tuple[EType, ...]) -> Any:
    """The graph of types: each type as a source, then as a destination, an edge for a relation."""
    src = [ntypes.index(etype[0]) for etype in relations]
    dst = [len(ntypes) + ntypes.index(etype[2]) for etype in relations]
    return dgl_makers().meta_graph(2 * len(ntypes), src, dst, True)


def dgl_blocks(drawn: Drawn) -> tuple[Any, ...]:
    """(input nodes, seeds, blocks), as DGL's loaders give them; the input layer's block is first.

    The first block has the features of its sources, the last those of the seeds and ``input_id``,
    each the columns of its edges, and ``dgl.NID`` and ``dgl.EID``. Ids are tensors where the graph
    has one node type, else dictionaries by type. Of seed edges it is (input nodes, graph of the
    seed edges, graph of those that are none if there are any, blocks); the graphs are between the
    seeds.
    """
    dgl, batch = require_dgl("DGL's blocks"), tensors(drawn)
    counts = {n: one[0] for n, one in batch.num_nodes.items()}
    blocks: list[Any] = []
    for hop, (edges, columns) in enumerate(zip(batch.edges, columns_by_hop(batch))):
        after = {n: count + batch.num_nodes[n][hop + 1] for n, count in counts.items()}
        block = make_block(_ends(edges, drawn.types), drawn.sample.starts[hop], after, counts)
        for ntype, ids in batch.node_ids.items():
            block.srcnodes[ntype].data[dgl.NID] = ids[: after[ntype]]
            block.dstnodes[ntype].data[dgl.NID] = ids[: counts[ntype]]
        _put(block, columns, dgl.EID)
        blocks.insert(0, block)
        counts = after
    for ntype, fields in batch.node_data.items():
        blocks[0].srcnodes[ntype].data.update(fields)
        seeds = {name: values[: batch.num_nodes[ntype][0]] for name, values in fields.items()}
        blocks[-1].dstnodes[ntype].data.update(seeds)
    if batch.links is None:
        blocks[-1].dstnodes[batch.input_type].data["input_id"] = batch.input_id
    return *_around(batch, drawn.types), blocks


def dgl_subgraph(drawn: Drawn) -> tuple[Any, ...]:
    """As :func:`dgl_blocks`, one graph between all nodes of the batch in place of blocks."""
    dgl, batch = require_dgl("DGL's graphs"), tensors(drawn)
    edges = batch.edges[0]
    counts = {n: len(ids) for n, ids in batch.node_ids.items()}
    graph = dgl.heterograph(_ends(edges, drawn.types), counts)
    for ntype, ids in batch.node_ids.items():
        graph.nodes[ntype].data[dgl.NID] = ids
        graph.nodes[ntype].data.update(batch.node_data[ntype])
    _put(graph, next(columns_by_hop(batch)), dgl.EID)
    return *_around(batch, drawn.types), graph


def _ends(edges: dict[EType, Edges], types: Types) -> dict[EType, tuple[Any, ...]]:
    return {etype: edges.get(etype, NO_EDGES)[:2] for etype in types.canonical_etypes}


def _around(batch: SampledBatch, types: Types) -> tuple[Any, ...]:
    """Input nodes, and seeds or the graphs of seed edges."""
    counts = {n: one[0] for n, one in batch.num_nodes.items()}
    seeds = {n: ids[: counts[n]] for n, ids in batch.node_ids.items()}
    is_one = len(types.ntypes) == 1
    inputs = batch.node_ids[types.ntypes[0]] if is_one else batch.node_ids
    if batch.links is None:
        return inputs, seeds[types.ntypes[0]] if is_one else seeds
    return inputs, *_pair_graphs(batch, seeds)


def _pair_graphs(batch: SampledBatch, seeds: dict[str, Tensor]) -> list[Any]:
    """Graphs of the seed edges and of negative pairs, between the seeds, as DGL's loaders give."""
    dgl, links, count = require_dgl("DGL's graphs"), batch.links, batch.batch_size
    if links is None:
        return []
    pairs = [(links.src[:count], links.dst[:count])]
    if links.negative is not None:
        amount = links.negative.shape[1]
        pairs.append((links.src.repeat_interleave(amount), links.negative.reshape(-1)))
    elif links.has_negatives:
        pairs.append((links.src[count:], links.dst[count:]))
    graphs = []
    for ends in pairs:
        etype = batch.input_type
        graph = dgl.heterograph({etype: ends}, {n: len(seeds[n]) for n in {etype[0], etype[2]}})
        for ntype in graph.ntypes:
            graph.nodes[ntype].data[dgl.NID] = seeds[ntype]
        graphs.append(graph)
    graphs[0].edata["input_id"] = batch.input_id
    graphs[0].edata["label"] = links.label[:count]
    return graphs


def _put(graph: Any, columns: dict[EType, dict[str, Tensor]], eid: str) -> None:
    """Store columns of edges in a graph of DGL's, their ids under ``eid``."""
    for etype, found in columns.items():
        graph.edges[etype].data[eid] = found.pop(ORIG_EID)
        graph.edges[etype].data.update(found)
