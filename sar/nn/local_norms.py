"""Batch norms that were not converted, and normalize the rows of one rank alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from sar.comm import Group, current_group
from sar.errors import MistakeWarning

_told: WeakSet[nn.Module] = WeakSet()


def warn_of_local_norms(model: nn.Module, group: Group) -> None:
    """Say once, on rank 0, that a batch norm in training mode sees one rank's rows alone."""
    if group.size == 1 or group.rank or model in _told:
        return
    norms = (nn.BatchNorm1d, nn.LazyBatchNorm1d)
    local = {n: part for n, part in model.named_modules() if isinstance(part, norms)}
    local = {n: part for n, part in local.items() if part.training}
    if local:
        _told.add(model)
        if not _told.issuperset(local.values()):
            _warn(next(iter(local)) or "the model", stacklevel=5)
        _told.update(local.values())


def watching_rows(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``forward`` of torch's batch norms that says so, once each, where rows of a graph come."""

    @wraps(forward)
    def call(norm: Any, x: Any) -> Tensor:
        if not torch.compiler.is_compiling() and isinstance(norm, nn.BatchNorm1d):
            if norm.training and norm not in _told and _are_of_a_graph(x, current_group()):
                _told.add(norm)
                _warn(f"{norm}", stacklevel=4)
        return forward(norm, x)

    return call


def _are_of_a_graph(x: Any, group: Group) -> bool:
    """Whether ``x`` has a row for each node or edge that a graph of several ranks has on rank 0."""
    if group.size == 1 or group.rank or not isinstance(x, Tensor) or x.dim() < 2:
        return False
    return any(x.shape[0] in graph.row_counts for graph in list(group.graphs))


def _warn(norm: str, stacklevel: int) -> None:
    warnings.warn(
        f"{norm} normalizes with each rank's own rows: results depend on the cut; convert the "
        "model with sar.prepare(model, graph) or sar.convert_batch_norm first",
        MistakeWarning,
        stacklevel=stacklevel,
    )
