"""What is computed of one rank's rows alone where a user means those of all: one warning each, and
dropout by keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.nn import functional

from sar.errors import NotSupportedError
from sar.frontends.pyg.index import Symbol
from sar.nn.dropout import keyed_by_call
from sar.nn.local_norms import norm_patches, noted, warn_of_local
from sar.tracing.lazy import EdgeTensor

_CONVERT = "call sar.prepare(model, data.edge_index) first, or give it batch=data.batch"
_POOL = "give it batch=data.batch of sar.pyg.construct_full_graph's data"
_DRAW = "use sar.nn.Dropout, or a mask of columns of which all ranks have the same"
_NORMS = (
    "GraphNorm", "PairNorm", "LayerNorm", "MeanSubtractionNorm", "GraphSizeNorm", "InstanceNorm",
    "HeteroBatchNorm",
)  # fmt: skip


def patches() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """(holder, attribute, wrapper) of functions and of methods of PyG and torch."""
    yield import_module("torch_geometric.utils._scatter"), "scatter", _of_scatter
    yield import_module("torch_geometric.utils.augmentation"), "mask_feature", _of_masks
    for name in ("global_add_pool", "global_mean_pool", "global_max_pool"):
        yield import_module("torch_geometric.nn.pool.glob"), name, _of_pool
    norms = import_module("torch_geometric.nn.norm")
    for name in _NORMS:
        yield getattr(norms, name), "forward", _of_norm
    yield from norm_patches()
    yield functional, "dropout", keyed_by_call


def _of_norm(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(forward)
    def call(norm: Any, x: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        with noted(norm):
            if not isinstance(batch, Symbol) and _takes_all_rows(norm):
                warn_of_local(x, f"{norm} normalizes with", _CONVERT, norm)
            return forward(norm, x, batch, *args, **kwargs)

    return call


def _takes_all_rows(norm: Any) -> bool:
    """Whether a norm computes statistics of rows now."""
    if getattr(norm, "mode", "graph") != "graph":
        return False
    return norm.training or not getattr(norm, "track_running_stats", False)


def _of_pool(pool: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A pooling that warns where it has no ``batch``."""

    @wraps(pool)
    def call(x: Any, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        if batch is None:
            warn_of_local(x, f"{pool.__name__} without batch pools", _POOL)
        return pool(x, batch, *args, **kwargs)

    return call


def _of_masks(mask_feature: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(mask_feature)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        warn_of_local(x, "mask_feature draws a mask for", _DRAW)
        return mask_feature(x, *args, **kwargs)

    return call


def _of_scatter(scatter: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``scatter`` that warns where rows are summed by plain numbers."""

    @wraps(scatter)
    def call(src: Any, index: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(index, EdgeTensor):
            raise NotSupportedError(
                "scatter: got an index computed of edges, as batch[edge_index[1]], expected "
                "edge_index[1] or batch: scatter(scatter(src, edge_index[1]), batch)"
            )
        warn_of_local(src, "scatter by a plain index sums", _POOL)
        return scatter(src, index, *args, **kwargs)

    return call
