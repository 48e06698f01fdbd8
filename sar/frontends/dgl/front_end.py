"""DGL's front end as :mod:`sar.registry` offers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sar.frontends.dgl.adapters import LAYERS
from sar.frontends.dgl.batches import dgl_blocks, dgl_subgraph
from sar.frontends.dgl.patches import install
from sar.models import calling

__all__ = ["BLOCKS", "COLUMNS", "LAYERS", "arguments", "batch_maker", "install", "read_batch"]
BLOCKS = "DGL's blocks"
COLUMNS = {"edge_weight": "weight", "eweight": "weight", "etype": "type", "etypes": "type"}
COLUMNS |= dict.fromkeys(("efeat", "efeats", "edge_feat", "edge_feats", "edge_attr"), "feat")


def batch_maker(subgraph_type: str) -> Callable[[Any], Any]:
    return dgl_blocks if subgraph_type == "directional" else dgl_subgraph


def read_batch(batch: Any, input_type: str, name: str, device: Any) -> tuple[Any, Any, Tensor]:
    blocks = [block.to(device) for block in batch[-1]]
    first, last = blocks[0], blocks[-1]
    found = {t: first.srcnodes[t].data for t in first.srctypes}
    features = {ntype: columns[name] for ntype, columns in found.items() if name in columns}
    return blocks, features, last.dstnodes[input_type].data["input_id"]


def arguments(names: Sequence[str], given: Any, features: Any) -> list[Any]:
    return calling.arguments(names, given, features, COLUMNS, _edge_columns)


def _edge_columns(block: Any) -> dict[Any, Any]:
    return {etype: block.edges[etype].data for etype in block.canonical_etypes}
