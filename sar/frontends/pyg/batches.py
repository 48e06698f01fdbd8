"""Mini-batches as PyG's loaders give them."""

from __future__ import annotations

from typing import Any

import torch

from sar.frontends.pyg.columns import edge_name, node_name
from sar.frontends.pyg.data import import_data, is_unnamed
from sar.partition.arrays import ORIG_EID
from sar.sampling.batch import NO_EDGES, Drawn, tensors, without
from sar.sampling.link_inputs import Links


def pyg_data(drawn: Drawn) -> Any:
    """``Data``, or ``HeteroData`` where there are several types, as PyG's loaders give them."""
    made, hetero = import_data()
    batch, types = tensors(drawn), drawn.types
    is_one = is_unnamed(types.ntypes, types.canonical_etypes)
    data = made() if is_one else hetero()
    for ntype, ids in batch.node_ids.items():
        store = data if is_one else data[ntype]
        store.n_id, store.num_nodes = ids, len(ids)
        if drawn.is_by_hop:
            store.num_sampled_nodes = batch.num_nodes[ntype]
        if ntype in batch.trees:
            store.batch = batch.trees[ntype]
        for name, values in batch.node_data[ntype].items():
            store[node_name(name)] = values
    for etype, columns in batch.edge_data.items():
        store = data if is_one else data[etype]
        hops = [edges.get(etype, NO_EDGES) for edges in batch.edges]
        store.edge_index = torch.stack(
            [torch.cat(one) for one in zip(*(hop[:2] for hop in hops), strict=True)]
        )
        if drawn.is_by_hop:
            store.num_sampled_edges = [len(one.src) for one in hops]
        store.e_id = columns.get(ORIG_EID, torch.cat([hop.eid for hop in hops]))
        taken = list(store.keys()) if is_one else None
        for name, values in without(columns, ORIG_EID).items():
            store[edge_name(name, taken)] = values
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
