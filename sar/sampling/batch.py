"""What a loader gives: tensors, DGL's blocks, or PyG's data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.errors import MissingDependencyError
from sar.partition.arrays import ORIG_EID, ORIG_ID
from sar.partition.book import EType
from sar.partition.require import require_dgl
from sar.sampling.blocks import make_block
from sar.sampling.link_inputs import Links
from sar.sampling.options import LoaderOptions
from sar.sampling.sampler import Edges, Sample

Rows = dict[Any, dict[str, Tensor]]


class SampledBatch(NamedTuple):
    """A batch as tensors, by node type and relation.

    Attributes:
        node_ids: int64 [n], the original ids where the partitions hold them, else the
            partitioning's own inside the type; seeds first, then hop by hop.
        node_data, edge_data: per name, a row for each node, or for each edge of all hops.
        edges: per hop, local numbers of both ends and the edges' ids inside the relation; in one
            hop those of a subgraph.
        num_nodes: how many nodes are seeds, and how many came with each hop.
        input_type: the node type of the seeds, or the relation of the seed edges.
        input_id: int64 [batch_size], which of the loader's inputs the seeds are.
        step: of all ranks, counted from the loader's first batch.
        trees: of a disjoint loader, int64 [n], which of the seeds a node was drawn around.
        time: of a disjoint loader of nodes, int64 [batch_size], after which nothing was drawn.
        links: of a loader of edges, where the seed edges are.
    """

    node_ids: dict[str, Tensor]
    node_data: dict[str, dict[str, Tensor]]
    edges: list[dict[EType, Edges]]
    edge_data: dict[EType, dict[str, Tensor]]
    num_nodes: dict[str, list[int]]
    input_type: str | EType
    input_id: Tensor
    step: int
    trees: dict[str, Tensor]
    time: Tensor | None
    links: Links | None

    @property
    def batch_size(self) -> int:
        """How many seeds there are; 0 where a rank has none left."""
        return len(self.input_id)


@dataclass(frozen=True)
class Types:
    """The types of a graph, as a :class:`sar.partition.book.PartitionBook` names them."""

    ntypes: list[str]
    canonical_etypes: list[EType]

    @property
    def is_homogeneous(self) -> bool:
        """Whether there is one node type and one edge type."""
        return len(self.ntypes) == 1 and len(self.canonical_etypes) == 1


@dataclass(frozen=True)
class Drawn:
    """What the makers of batches get: a sample, its rows, and what is told of its inputs."""

    types: Types
    sample: Sample
    rows: Rows
    input_type: str | EType
    step: int
    told: dict[str, Any]
    is_by_hop: bool = True


def tensors(drawn: Drawn) -> SampledBatch:
    """A batch without any library's types."""
    sample, types, told = drawn.sample, drawn.types, drawn.told
    nodes = {n: drawn.rows.get(n, {}).get(ORIG_ID, ids) for n, ids in sample.nodes.items()}
    node_data = {n: _without(drawn.rows.get(n, {}), ORIG_ID) for n in types.ntypes}
    edge_data = {e: drawn.rows.get(e, {}) for e in types.canonical_etypes}
    return SampledBatch(
        nodes, node_data, sample.hops, edge_data, sample.num_nodes, drawn.input_type,
        told["input_id"], drawn.step, sample.trees, told.get("time"), told.get("links"),
    )  # fmt: skip


def _without(rows: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in rows.items() if key != name}


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
    rows = _EdgeRows(batch)
    for hop, edges in enumerate(batch.edges):
        after = {n: count + batch.num_nodes[n][hop + 1] for n, count in counts.items()}
        block = make_block(_ends(edges, drawn.types), drawn.sample.starts[hop], after, counts)
        for ntype, ids in batch.node_ids.items():
            block.srcnodes[ntype].data[dgl.NID] = ids[: after[ntype]]
            block.dstnodes[ntype].data[dgl.NID] = ids[: counts[ntype]]
        rows.put(block, edges, dgl.EID)
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
    _EdgeRows(batch).put(graph, edges, dgl.EID)
    return *_around(batch, drawn.types), graph


def _ends(edges: dict[EType, Edges], types: Types) -> dict[EType, tuple[Any, ...]]:
    return {etype: edges.get(etype, _NONE)[:2] for etype in types.canonical_etypes}


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
    """The seed edges, and pairs that are none, between the seeds, as DGL's loaders of edges do."""
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


_NONE = Edges(*[torch.empty(0, dtype=torch.int64)] * 3)


class _EdgeRows:
    """The columns of edges, hop by hop."""

    def __init__(self, batch: SampledBatch) -> None:
        self._data, self._at = batch.edge_data, dict.fromkeys(batch.edge_data, 0)

    def put(self, graph: Any, edges: dict[EType, Edges], eid: str) -> None:
        """The next ones, of these edges, into a graph of DGL's; their ids under ``eid``."""
        for etype, (src, _, ids) in edges.items():
            first = self._at.get(etype, 0)
            self._at[etype] = last = first + len(src)
            columns = {n: rows[first:last] for n, rows in self._data.get(etype, {}).items()}
            graph.edges[etype].data[eid] = columns.pop(ORIG_EID, ids)
            graph.edges[etype].data.update(columns)


def pyg_data(drawn: Drawn) -> Any:
    """``Data``, or ``HeteroData`` where there are several types, as PyG's loaders give them."""
    try:
        from torch_geometric.data import Data, HeteroData
    except ImportError as error:
        raise MissingDependencyError(
            "PyG's data needs torch_geometric: pip install torch_geometric"
        ) from error
    batch, is_one = tensors(drawn), drawn.types.is_homogeneous
    data = Data() if is_one else HeteroData()
    for ntype, ids in batch.node_ids.items():
        store = data if is_one else data[ntype]
        store.n_id, store.num_nodes = ids, len(ids)
        if drawn.is_by_hop:
            store.num_sampled_nodes = batch.num_nodes[ntype]
        if ntype in batch.trees:
            store.batch = batch.trees[ntype]
        _rename(store, batch.node_data[ntype], {"feat": "x", "label": "y"})
    for etype, columns in batch.edge_data.items():
        store = data if is_one else data[etype]
        hops = [edges.get(etype, _NONE) for edges in batch.edges]
        store.edge_index = torch.stack(
            [torch.cat(one) for one in zip(*(hop[:2] for hop in hops), strict=True)]
        )
        if drawn.is_by_hop:
            store.num_sampled_edges = [len(one.src) for one in hops]
        store.e_id = columns.get(ORIG_EID, torch.cat([hop.eid for hop in hops]))
        _rename(store, _without(columns, ORIG_EID), {"feat": "edge_attr"})
    seeds = data if is_one else data[drawn.input_type]
    seeds.input_id = batch.input_id
    if batch.links is not None:
        _put_links(data, batch.links, drawn.input_type, is_one)
        return data
    seeds.batch_size = batch.batch_size
    if batch.time is not None:
        seeds.seed_time = batch.time
    return data


def _put_links(data: Any, links: Links, etype: Any, is_one: bool) -> None:
    """Where the seed edges are, by PyG's names."""
    if links.negative is None:
        seeds = data if is_one else data[etype]
        seeds.edge_label_index = torch.stack([links.src, links.dst])
        seeds.edge_label = links.label
        if links.time is not None:
            seeds.edge_label_time = links.time
        return
    src, dst = (data, data) if is_one else (data[etype[0]], data[etype[2]])
    src.src_index, dst.dst_pos_index = links.src, links.dst
    dst.dst_neg_index = links.negative.squeeze(1)  # [B] for one each
    if links.time is not None:
        src.seed_time = dst.seed_time = links.time


def _rename(store: Any, columns: dict[str, Tensor], names: dict[str, str]) -> None:
    """Columns by PyG's names of what DGL calls otherwise."""
    for name, values in columns.items():
        store[names.get(name, name)] = values


_MAKERS: dict[str, Callable[[Drawn], Any]] = {
    "dgl": dgl_blocks, "pyg": pyg_data, "tensors": tensors,
}  # fmt: skip


def maker(options: LoaderOptions) -> Callable[[Drawn], Any]:
    """What makes batches in the form that the options name."""
    if options.as_ == "dgl" and not options.has_blocks:
        return dgl_subgraph
    return _MAKERS[options.as_]
