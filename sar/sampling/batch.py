"""What a loader gives: tensors, or what a front end makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar import registry
from sar.partition.arrays import ORIG_EID, ORIG_ID
from sar.partition.book import EType
from sar.sampling.link_inputs import Links
from sar.sampling.options import TENSORS, LoaderOptions
from sar.sampling.sample import Edges, Sample

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
    ntypes: list[str]
    canonical_etypes: list[EType]

    @property
    def is_homogeneous(self) -> bool:
        return len(self.ntypes) == 1 and len(self.canonical_etypes) == 1


@dataclass(frozen=True)
class Drawn:
    """A drawn sample and its features; ``told`` has ``input_id``, and ``time`` or ``links``."""

    types: Types
    sample: Sample
    rows: Rows
    input_type: str | EType
    step: int
    told: dict[str, Any]
    is_by_hop: bool = True


def tensors(drawn: Drawn) -> SampledBatch:
    """The batch as plain tensors, of no library's types."""
    sample, types, told = drawn.sample, drawn.types, drawn.told
    nodes = {n: drawn.rows.get(n, {}).get(ORIG_ID, ids) for n, ids in sample.nodes.items()}
    node_data = {n: without(drawn.rows.get(n, {}), ORIG_ID) for n in types.ntypes}
    edge_data = {e: drawn.rows.get(e, {}) for e in types.canonical_etypes}
    return SampledBatch(
        nodes, node_data, sample.hops, edge_data, sample.num_nodes, drawn.input_type,
        told["input_id"], drawn.step, sample.trees, told.get("time"), told.get("links"),
    )  # fmt: skip


def columns_by_hop(batch: SampledBatch) -> Iterator[dict[EType, dict[str, Tensor]]]:
    """Per hop, the edges' columns by relation, with their ids as ``orig_eid``."""
    begun = dict.fromkeys(batch.edge_data, 0)
    for edges in batch.edges:
        found = dict[EType, dict[str, Tensor]]()
        for etype, (_, _, ids) in edges.items():
            first, last = begun[etype], begun[etype] + len(ids)
            columns = {name: rows[first:last] for name, rows in batch.edge_data[etype].items()}
            found[etype], begun[etype] = {ORIG_EID: ids, **columns}, last
        yield found


def without(rows: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in rows.items() if key != name}


NO_EDGES = Edges(*[torch.empty(0, dtype=torch.int64)] * 3)


def maker(options: LoaderOptions) -> Callable[[Drawn], Any]:
    """The function that makes batches in the form of ``options.as_``."""
    if options.as_ == TENSORS:
        return tensors
    return registry.front_end(options.as_).batch_maker(options.subgraph_type)
