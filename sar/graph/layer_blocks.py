"""Blocks cut out of a graph that compute for some rows what the whole graph would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sar.comm import current_group
from sar.config import Policy
from sar.edges import as_stored
from sar.graph.block import EdgeSource, build_block, plan_layer, whole_of_data, whole_of_graph
from sar.graph.build import agree_data, on_device
from sar.graph.store import Structure
from sar.graph.view import GraphView
from sar.partition.load import PartitionData


@dataclass
class LayerBlocks:
    """The rows that each layer needs, before anything is built; made by :func:`plan_blocks`.

    ``saved`` is the share of the whole graph's work that the layers leave out: the mean of what
    they save of rows, of edges and of rows on the wire.
    """

    saved: float
    graph: GraphView
    rows: Tensor
    num_layers: int
    whole: EdgeSource

    def build(self) -> list[GraphView]:
        """One block a layer, first layer first; collective.

        Unlike the blocks of :func:`sar.construct_mfgs`, the out-degrees of source rows are those of
        the whole graph, so that layers which normalize by them give what they give there.
        """
        store = self.graph._store
        (ntype,) = store.book.ntypes
        dst_rows, blocks = {ntype: self.rows}, []
        for _ in range(self.num_layers):
            block = build_block(self.whole, store.group, dst_rows, True)
            dst_rows = block.src_rows
            _keep_out_degrees(block, store)
            moved = block if block.device == store.device else block.to(store.device)
            blocks.append(type(self.graph)(moved, None, self.graph._policy))
        return blocks[::-1]


def _keep_out_degrees(block: Structure, store: Structure) -> None:
    for etype, relation in block.relations.items():
        degrees = store.relations[etype].out_degrees.cpu()
        as_stored(relation, "blocks").out_degrees = degrees[block.src_rows[etype[0]]]


def plan_blocks(graph: GraphView, rows: Tensor, num_layers: int, least: float = 0.0) -> LayerBlocks:
    """What layers need to compute ``rows``, int64 ascending, of one node type; collective.

    Layers are planned from the last on, until they cannot save ``least`` any more; ``saved`` is
    what they might then.
    """
    store = graph._store
    (ntype,) = store.book.ntypes
    whole, dst_rows = whole_of_graph(store), {ntype: rows.cpu()}
    everything = store.group.all_reduce(torch.tensor(_sizes_of_graph(store))) * num_layers
    work, saved = torch.zeros_like(everything), 0.0
    for later in reversed(range(num_layers)):  # layers whose rows are not known yet
        layer = plan_layer(whole, store.group, dst_rows, True)
        edges = sum(len(part.src) for part in layer.edges.values())
        sizes = [len(dst_rows[ntype]), edges, layer.num_halo]
        dst_rows = layer.src_rows
        needed = [len(dst_rows[ntype]), _edges_into(store, dst_rows[ntype]), layer.num_halo]
        done, more = store.group.all_reduce(torch.tensor([sizes, needed]))
        work += done  # a layer needs no fewer rows than the next one
        saved = _saved(work + later * more, everything)
        if saved < least:
            break
    return LayerBlocks(saved, graph, rows.cpu(), num_layers, whole)


def _saved(work: Tensor, everything: Tensor) -> float:
    """The mean share of rows, edges and traffic that is left out, of those there are."""
    some = everything > 0
    return 1 - float((work[some].double() / everything[some]).mean()) if some.any() else 0.0


def _edges_into(store: Structure, rows: Tensor) -> int:
    return sum(int(one.in_degrees.cpu()[rows].sum()) for one in store.relations.values())


def _sizes_of_graph(store: Structure) -> list[int]:
    """Rows, edges and halo rows of one layer on the whole graph."""
    relations = [as_stored(one, "blocks") for one in store.relations.values()]
    rows = sum(len(rows) for rows in store.dst_rows.values())
    edges = sum(relation.num_edges for relation in relations)
    return [rows, edges, sum(sum(relation.plan.recv_counts) for relation in relations)]


def blocks_of_seeds(
    data: PartitionData, seeds: Tensor, num_layers: int, keep_seeds: bool, policy: Policy | None
) -> list[Structure]:
    """One block a layer, first layer first, that together compute the seeds' outputs; collective.

    Args:
        seeds: int [n] distinct global ids of nodes of this rank's part; may be empty.
        keep_seeds: let the source rows of a block begin with its destination rows.

    Raises ``TypeError`` or ``ValueError`` on every rank, when an argument of any does not fit.
    """
    group = current_group()
    agree_data(data, group, policy)
    error = _seed_error(data, seeds, num_layers)
    group.agree(error, "construct_mfgs", {"n_layers": num_layers})
    type_id, _, row = data.book.locate(torch.sort(seeds.cpu().long())[0])
    dst_rows = {ntype: row[type_id == i] for i, ntype in enumerate(data.book.ntypes)}
    return blocks_of_rows(data, dst_rows, num_layers, keep_seeds)


def blocks_of_rows(
    data: PartitionData, dst_rows: dict[str, Tensor], num_layers: int, keep_seeds: bool,
    are_square: bool = False,
) -> list[Structure]:  # fmt: skip
    """The same for int64 rows of this part, by type; collective. See :func:`build_block`."""
    whole, group, blocks = whole_of_data(data), current_group(), []
    for _ in range(num_layers):
        block = build_block(whole, group, dst_rows, keep_seeds, are_square)
        blocks.append(on_device(block, data))
        dst_rows = block.src_rows
    return blocks[::-1]


def _seed_error(data: PartitionData, seeds: Any, num_layers: Any) -> Exception | None:
    if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
        return ValueError(f"n_layers: got {num_layers!r}, expected an int of at least 1")
    if not isinstance(seeds, Tensor) or seeds.is_floating_point() or seeds.dim() != 1:
        return TypeError("seed_nodes: expected a 1-D integer tensor of global node ids")
    start, stop = data.book.part_ranges[data.part_id]
    if len(seeds) and (int(seeds.min()) < start or int(seeds.max()) >= stop):
        return ValueError(
            f"seed_nodes: got ids from {int(seeds.min())} to {int(seeds.max())}, "
            f"expected ids of this rank's part, [{start}, {stop})"
        )
    if len(torch.unique(seeds)) != len(seeds):
        return ValueError("seed_nodes: got repeated ids, expected distinct ones")
    return None
