"""What is computed of one rank's rows alone where a user means those of all: one warning each, and
dropout by keys.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn import functional

from sar.comm import current_group
from sar.errors import MistakeWarning, NotSupportedError
from sar.frontends.pyg.dropping import keyed_by_call
from sar.frontends.pyg.index import Symbol
from sar.nn.local_norms import norm_patches, running
from sar.tracing.lazy import EdgeTensor

_CONVERT = "call sar.prepare(model, data.edge_index) first, or give it batch=data.batch"
_POOL = "give it batch=data.batch of sar.pyg.construct_full_graph's data"
_TORCHS = nn.InstanceNorm1d.__bases__[0]  # of all widths
_DRAW = "use sar.nn.Dropout, or a mask of columns of which all ranks have the same"
_NORMS = (
    "GraphNorm", "PairNorm", "LayerNorm", "MeanSubtractionNorm", "GraphSizeNorm", "InstanceNorm",
    "HeteroBatchNorm",
)  # fmt: skip


def patches() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """(holder, attribute, wrapper) of functions and of methods of PyG and torch."""
    yield import_module("torch_geometric.utils._scatter"), "scatter", _of_scatter
    for name in ("mask_feature", "shuffle_node"):
        yield import_module("torch_geometric.utils.augmentation"), name, _of_draws
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
        if not isinstance(batch, Symbol) and _takes_all_rows(norm, batch):
            _warn_of_local(x, f"{norm} normalizes with", _CONVERT, norm)
        before, running.layer = running.layer, norm
        try:
            return forward(norm, x, batch, *args, **kwargs)
        finally:
            running.layer = before  # a norm may be inside of another

    return call


def _takes_all_rows(norm: Any, batch: Any) -> bool:
    """Whether a norm computes statistics of rows now, and torch does not warn of it."""
    if getattr(norm, "mode", "graph") != "graph" or (isinstance(norm, _TORCHS) and batch is None):
        return False
    return norm.training or not getattr(norm, "track_running_stats", False)


_told: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def _warn_of_local(x: Any, what: str, remedy: str, key: Any = None) -> None:
    """Warn once, on rank 0, where ``x`` has a row for each node or edge of this rank, and ``what``
    is done with these alone; once for ``key``, or the group."""
    group = current_group()
    if group.size == 1 or group.rank or type(x) is not Tensor or running.layer is not None:
        return
    told = _told.setdefault(group if key is None else key, set())
    counts = [count for graph in list(group.graphs) for count in graph.row_counts]
    if what not in told and x.dim() > 0 and len(x) in counts:
        told.add(what)
        warnings.warn(
            f"{what} each rank's own rows: results depend on the cut; {remedy}",
            MistakeWarning,
            stacklevel=4,
        )


def _of_pool(pool: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A pooling that warns where it has no ``batch``, or one of plain numbers."""

    @wraps(pool)
    def call(x: Any, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        if batch is None or type(batch) is Tensor:
            how = "without batch pools" if batch is None else "by a plain batch pools"
            _warn_of_local(x, f"{pool.__name__} {how}", _POOL)
        return pool(x, batch, *args, **kwargs)

    return call


def _of_draws(draw: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(draw)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        _warn_of_local(x, f"{draw.__name__} draws for", _DRAW)
        return draw(x, *args, **kwargs)

    return call


def _of_scatter(scatter: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``scatter`` that refuses what it cannot know. It is silent of plain numbers: a layer sums by
    the ends of edges that it was given, as of a mini-batch, and those are nobody's mistake."""

    @wraps(scatter)
    def call(src: Any, index: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(index, EdgeTensor):
            raise NotSupportedError(
                "scatter: got an index computed of edges, as batch[edge_index[1]], expected "
                "edge_index[1] or batch: scatter(scatter(src, edge_index[1]), batch)"
            )
        return scatter(src, index, *args, **kwargs)

    return call
