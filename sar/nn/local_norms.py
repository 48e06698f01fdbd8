"""Warnings of norms that were not converted: they see the rows of one rank alone."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sar.comm import Group, current_group
from sar.errors import MistakeWarning
from sar.nn.batch_norm import BATCH_NORMS, is_torchs_own

_warned: WeakSet[Any] = WeakSet()  # models, layers, groups that called a function without a layer


def warn_of_local_norms(model: nn.Module, group: Group) -> None:
    """Warn once, on rank 0, that a batch norm in training mode sees one rank's rows alone."""
    if group.size == 1 or group.rank or model in _warned:
        return
    local = {n: part for n, part in model.named_modules() if isinstance(part, BATCH_NORMS)}
    local = {n: p for n, p in local.items() if p.training and not isinstance(p, nn.SyncBatchNorm)}
    if local:
        _warned.add(model)
        if not _warned.issuperset(local.values()):
            name, layer = next(iter(local.items()))
            _warn(name or "the model", layer, stacklevel=5)
        _warned.update(local.values())


def norm_patches() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """(holder, attribute, wrapper) of what is patched in torch to warn of rows of a graph."""
    for kind in (nn.BatchNorm1d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.GroupNorm):
        own = next(one for one in kind.__mro__ if "forward" in vars(one))
        if not hasattr(vars(own)["forward"], "__wrapped__"):  # by another front end
            yield own, "forward", _noting_layer
    for name in ("batch_norm", "instance_norm", "group_norm", "layer_norm"):
        if not hasattr(vars(F)[name], "__wrapped__"):
            yield F, name, _warning


class _Running(threading.local):
    """The norm whose ``forward`` this thread is in."""

    layer: nn.Module | None = None


running = _Running()


def _noting_layer(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``forward`` of torch's norms, for warnings in it to name the layer."""

    @wraps(forward)
    def call(norm: Any, x: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return forward(norm, x)
        before, running.layer = running.layer, norm
        try:
            return forward(norm, x)
        finally:
            running.layer = before

    return call


def _warning(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of torch that warns, once for each layer, where it normalizes over rows."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            group = current_group()
            if group.size > 1 and not group.rank:
                _warn_of_rows(function.__name__, args, kwargs, group)
        return function(*args, **kwargs)

    call.__prepare_scriptable__ = lambda: function  # type: ignore[attr-defined]  # TorchScript's
    return call


def _warn_of_rows(name: str, args: tuple, kwargs: dict[str, Any], group: Group) -> None:
    x, layer = args[0] if args else kwargs.get("input"), running.layer
    key = group if layer is None else layer
    if isinstance(x, Tensor) and x.dim() > 1 and key not in _warned:
        if _are_rows(x.shape, _dims(name, args, kwargs, x.dim()), group):
            _warned.add(key)
            if layer is None:
                _warn(f"F.{name} of a tensor of shape {tuple(x.shape)}", None, stacklevel=4)
            else:
                _warn(f"{layer}", layer, stacklevel=8)


def _dims(name: str, args: tuple, kwargs: dict[str, Any], dim: int) -> set[int]:
    """The dimensions over which a call normalizes, as far as they may be rows of a graph."""

    def given(place: int, key: str, default: Any) -> Any:
        return args[place] if len(args) > place else kwargs.get(key, default)

    if name == "batch_norm":
        return {0, *range(2, dim)} if given(5, "training", False) else set()
    if name == "layer_norm":
        return set(range(dim)) if len(given(1, "normalized_shape", ())) == dim else set()
    return set(range(2, dim)) if given(5, "use_input_stats", True) else set()


def _are_rows(shape: torch.Size, dims: set[int], group: Group) -> bool:
    """Whether one of ``dims`` has as many entries as a graph has nodes or edges on rank 0. Where
    another dimension has as many, that one is taken for the rows; but the first of all is."""
    graphs = list(group.graphs) if dims else []
    rows = {dim for dim, n in enumerate(shape) if any(n in graph.row_counts for graph in graphs)}
    return 0 in rows & dims or (bool(rows) and rows <= dims)


def _warn(name: str, layer: nn.Module | None, stacklevel: int) -> None:
    if not isinstance(layer, BATCH_NORMS):
        remedy = (
            "use nn.BatchNorm1d on [rows, columns], which sar.prepare(model, graph) converts, or "
            "a norm within each row"
        )
    elif is_torchs_own(layer):
        remedy = "convert the model with sar.prepare(model, graph) or sar.convert_batch_norm first"
    else:
        remedy = (
            "it has a forward of its own, which is not converted; hold an nn.BatchNorm1d as a part "
            "of it, and call sar.prepare(model, graph)"
        )
    warnings.warn(
        f"{name} normalizes with each rank's own rows: results depend on the cut; {remedy}",
        MistakeWarning,
        stacklevel=stacklevel,
    )
