"""Models and graphs in one dtype, and models that drop nothing at random."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sar._private import tree_map
from sar.models.known import known_layers
from sar.nn.dropout import Dropout
from sar.partition.arrays import ORIG_EID, ORIG_ID, GraphArrays

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
             "feature_alpha_dropout")  # fmt: skip


def copied(model: nn.Module) -> nn.Module:
    """A copy of ``model``; of tensors that are results, their values."""
    held = [value for module in model.modules() for value in vars(module).values()]
    results = [one for one in held if isinstance(one, Tensor) and not one.is_leaf]
    return copy.deepcopy(model, {id(one): one.detach().clone() for one in results})


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model`` on the CPU in ``dtype``, with tensors and modules that are plain attributes."""
    model = model.cpu().to(dtype)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if not name.startswith("_") and isinstance(value, Tensor | list | tuple | dict):
                vars(module)[name] = tree_map(partial(_cast, dtype), value)
    return model


def _cast(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, nn.Module):
        return cast(value, dtype)
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().cpu().to(dtype) if is_float else value


def without_dropout(model: nn.Module) -> nn.Module:
    """``model`` whose layers drop nothing, where :func:`no_dropout` does not reach."""
    for module in model.modules():
        if isinstance(module, (Dropout, nn.Dropout)):  # fused layers read it
            module.p = 0.0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
        for layers in known_layers():
            layers.drop_nothing(module)
    return model


@contextmanager
def no_dropout() -> Iterator[None]:
    """Inside, torch's functions of dropout drop nothing."""

    def off(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(
            input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> Any:
            return function(input, p, False, inplace)

        return call

    before = {name: getattr(F, name) for name in _DROPOUTS}
    made = {name: off(function) for name, function in before.items()}
    vars(F).update(made)
    try:
        yield
    finally:  # but those that somebody has put in their places
        vars(F).update({n: before[n] for n in _DROPOUTS if getattr(F, n) is made[n]})


def arrays_in(graph: GraphArrays, dtype: torch.dtype) -> GraphArrays:
    """The same graph with columns in ``dtype``, whose nodes and edges are numbered by place."""

    def converted(columns: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: column.to(dtype) if column.is_floating_point() else column
            for name, column in columns.items()
            if name not in (ORIG_ID, ORIG_EID)
        }

    nodes = {
        ntype: converted(graph.node_data.get(ntype, {})) | {ORIG_ID: torch.arange(count)}
        for ntype, count in graph.num_nodes.items()
    }
    edges = {etype: converted(graph.edge_data.get(etype, {})) for etype in graph.edges}
    return replace(graph, node_data=nodes, edge_data=edges)
