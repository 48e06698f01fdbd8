"""PyG's front end as :mod:`sar.registry` offers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sar.errors import NotSupportedError
from sar.frontends.pyg.batches import pyg_data
from sar.frontends.pyg.patches import install
from sar.graph import GraphView
from sar.models.known import Layers

__all__ = ["BLOCKS", "LAYERS", "arguments", "batch_maker", "install", "read_batch"]
BLOCKS = None
LAYERS = Layers()


def batch_maker(subgraph_type: str) -> Callable[[Any], Any]:
    return pyg_data


def read_batch(batch: Any, input_type: str, name: str, device: Any) -> tuple[Any, Any, Tensor]:
    data = batch.to(device)
    stores = {ntype: data[ntype] for ntype in getattr(data, "node_types", ())} or {input_type: data}
    features = {ntype: store[name] for ntype, store in stores.items() if name in store}
    return data, features, stores[input_type].input_id


def arguments(names: Sequence[str], given: Any, features: Any) -> list[Any]:
    if isinstance(given, GraphView):
        raise NotSupportedError(
            f"model: called as ({', '.join(names)}), and whole graphs have no {names[-1]} yet, on "
            "which each epoch ends; expected one that is called as (graph, x)"
        )
    return [features if name in ("x", "x_dict") else given[name] for name in names]
