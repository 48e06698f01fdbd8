"""Mini-batches as PyG's loaders give them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sar.errors import MissingDependencyError
from sar.partition.arrays import ORIG_EID
from sar.sampling.batch import NO_EDGES, Drawn, tensors, without
from sar.sampling.link_inputs import Links


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
        hops = [edges.get(etype, NO_EDGES) for edges in batch.edges]
        store.edge_index = torch.stack(
            [torch.cat(one) for one in zip(*(hop[:2] for hop in hops), strict=True)]
        )
        if drawn.is_by_hop:
            store.num_sampled_edges = [len(one.src) for one in hops]
        store.e_id = columns.get(ORIG_EID, torch.cat([hop.eid for hop in hops]))
        _rename(store, without(columns, ORIG_EID), {"feat": "edge_attr"})
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
    """Store columns, by PyG's names where these differ from DGL's."""
    for name, values in columns.items():
        store[names.get(name, name)] = values
