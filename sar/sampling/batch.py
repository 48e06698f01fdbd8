"""What a loader gives: tensors, DGL's blocks, or PyG's data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.errors import MissingDependencyError
from sar.partition.arrays import ORIG_EID, ORIG_ID
from sar.partition.book import EType, PartitionBook
from sar.partition.require import require_dgl
from sar.sampling.sampler import Edges, Sample

Rows = dict[Any, dict[str, Tensor]]


class SampledBatch(NamedTuple):
    """A batch as tensors, by node type and relation.

    Attributes:
        node_ids: int64 [n], the original ids where the partitions hold them, else the
            partitioning's own inside the type; seeds first, then hop by hop.
        node_data, edge_data: per name, a row for each node, or for each edge of all hops.
        edges: per hop, local numbers of both ends and the edges' ids inside the relation.
        num_nodes: how many nodes are seeds, and how many came with each hop.
        input_id: int64 [batch_size], which of the loader's input nodes the seeds are.
        step: of all ranks, counted from the loader's first batch.
        trees: of a disjoint loader, int64 [n], which of the seeds a node was drawn around.
        time: of a disjoint loader, int64 [batch_size], after which nothing was drawn.
    """

    node_ids: dict[str, Tensor]
    node_data: dict[str, dict[str, Tensor]]
    edges: list[dict[EType, Edges]]
    edge_data: dict[EType, dict[str, Tensor]]
    num_nodes: dict[str, list[int]]
    input_type: str
    input_id: Tensor
    step: int
    trees: dict[str, Tensor]
    time: Tensor | None

    @property
    def batch_size(self) -> int:
        """How many seeds there are; 0 where a rank has none left."""
        return len(self.input_id)


@dataclass(frozen=True)
class Drawn:
    """What the makers of batches get: a sample, its rows, and which inputs its seeds are."""

    book: PartitionBook
    sample: Sample
    rows: Rows
    input_type: str
    input_id: Tensor
    step: int
    time: Tensor | None = None


def tensors(drawn: Drawn) -> SampledBatch:
    """A batch without any library's types."""
    sample, book = drawn.sample, drawn.book
    nodes = {n: drawn.rows[n].get(ORIG_ID, ids) for n, ids in sample.nodes.items()}
    node_data = {n: _without(drawn.rows[n], ORIG_ID) for n in book.ntypes}
    edge_data = {e: drawn.rows[e] for e in book.canonical_etypes if e in drawn.rows}
    return SampledBatch(
        nodes, node_data, sample.hops, edge_data, sample.num_nodes, drawn.input_type,
        drawn.input_id, drawn.step, sample.trees, drawn.time,
    )  # fmt: skip


def _without(rows: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in rows.items() if key != name}


def dgl_blocks(drawn: Drawn) -> tuple[Any, Any, list[Any]]:
    """(input nodes, seeds, blocks), as DGL's loaders give them; the input layer's block is first.

    The first block has the features of its sources, the last those of the seeds, each the columns
    of its edges, and ``dgl.NID`` and ``dgl.EID``. Ids are tensors where the graph has one node
    type, else dictionaries by type.
    """
    dgl, batch = require_dgl("DGL's blocks"), tensors(drawn)
    counts = {n: one[0] for n, one in batch.num_nodes.items()}
    blocks: list[Any] = []
    rows = _EdgeRows(batch)
    for hop, edges in enumerate(batch.edges):
        after = {n: count + batch.num_nodes[n][hop + 1] for n, count in counts.items()}
        ends = {
            e: tuple(edges[e][:2]) if e in edges else _NO_EDGES for e in drawn.book.canonical_etypes
        }
        block = dgl.create_block(ends, after, counts)
        for ntype, ids in batch.node_ids.items():
            block.srcnodes[ntype].data[dgl.NID] = ids[: after[ntype]]
            block.dstnodes[ntype].data[dgl.NID] = ids[: counts[ntype]]
        for etype in edges:
            columns = rows.next(etype, len(edges[etype].src))
            block.edges[etype].data[dgl.EID] = columns.pop(ORIG_EID, edges[etype].eid)
            block.edges[etype].data.update(columns)
        blocks.insert(0, block)
        counts = after
    for ntype, fields in batch.node_data.items():
        blocks[0].srcnodes[ntype].data.update(fields)
        seeds = {name: values[: batch.num_nodes[ntype][0]] for name, values in fields.items()}
        blocks[-1].dstnodes[ntype].data.update(seeds)
    seeds = {n: ids[: batch.num_nodes[n][0]] for n, ids in batch.node_ids.items()}
    if len(drawn.book.ntypes) == 1:
        return batch.node_ids[drawn.input_type], seeds[drawn.input_type], blocks
    return batch.node_ids, seeds, blocks


_NO_EDGES = (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


class _EdgeRows:
    """The columns of edges, hop by hop."""

    def __init__(self, batch: SampledBatch) -> None:
        self._data, self._at = batch.edge_data, dict.fromkeys(batch.edge_data, 0)

    def next(self, etype: EType, count: int) -> dict[str, Tensor]:
        """Of the next ``count`` edges of a relation."""
        first = self._at[etype]
        self._at[etype] += count
        return {name: rows[first : first + count] for name, rows in self._data[etype].items()}


def pyg_data(drawn: Drawn) -> Any:
    """``Data``, or ``HeteroData`` where there are several types, as PyG's loaders give them."""
    try:
        from torch_geometric.data import Data, HeteroData
    except ImportError as error:
        raise MissingDependencyError(
            "PyG's data needs torch_geometric: pip install torch_geometric"
        ) from error
    batch, is_one = tensors(drawn), drawn.book.is_homogeneous
    data = Data() if is_one else HeteroData()
    for ntype, ids in batch.node_ids.items():
        store = data if is_one else data[ntype]
        store.n_id, store.num_nodes = ids, len(ids)
        store.num_sampled_nodes = batch.num_nodes[ntype]
        if ntype in batch.trees:
            store.batch = batch.trees[ntype]
        _rename(store, batch.node_data[ntype], {"feat": "x", "label": "y"})
    for etype, columns in batch.edge_data.items():
        store = data if is_one else data[etype]
        hops = [edges[etype] for edges in batch.edges if etype in edges]
        store.edge_index = torch.stack(
            [torch.cat(one) for one in zip(*(hop[:2] for hop in hops), strict=True)]
        )
        store.num_sampled_edges = [
            len(edges[etype].src) if etype in edges else 0 for edges in batch.edges
        ]
        store.e_id = columns.get(ORIG_EID, torch.cat([hop.eid for hop in hops]))
        _rename(store, _without(columns, ORIG_EID), {"feat": "edge_attr"})
    seeds = data if is_one else data[drawn.input_type]
    seeds.input_id, seeds.batch_size = batch.input_id, batch.batch_size
    if batch.time is not None:
        seeds.seed_time = batch.time
    return data


def _rename(store: Any, columns: dict[str, Tensor], names: dict[str, str]) -> None:
    """Columns by PyG's names of what DGL calls otherwise."""
    for name, values in columns.items():
        store[names.get(name, name)] = values


MAKERS: dict[str, Callable[[Drawn], Any]] = {
    "dgl": dgl_blocks, "pyg": pyg_data, "tensors": tensors,
}  # fmt: skip
