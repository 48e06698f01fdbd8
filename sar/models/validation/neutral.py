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


def neutral(model: nn.Module) -> nn.Module:
    """A copy of ``model`` on the CPU in torch's default dtype, whose layers drop nothing; of
    tensors that are results, their values."""
    held = [value for module in model.modules() for value in vars(module).values()]
    results = [one for one in held if isinstance(one, Tensor) and not one.is_leaf]
    model = copy.deepcopy(model, {id(one): one.detach().clone() for one in results})
    return _without_dropout(_cast(torch.get_default_dtype(), model))


def _cast(dtype: torch.dtype, value: Any) -> Any:
    """A tensor, or a module with tensors and modules that are plain attributes, in ``dtype``."""
    if isinstance(value, Tensor):
        return value.detach().cpu().to(dtype) if value.is_floating_point() else value
    if isinstance(value, nn.Module):
        for module in value.cpu().to(dtype).modules():
            for name, held in list(vars(module).items()):
                if not name.startswith("_") and isinstance(held, Tensor | list | tuple | dict):
                    vars(module)[name] = tree_map(partial(_cast, dtype), held)
    return value


def _without_dropout(model: nn.Module) -> nn.Module:
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
        return lambda input, p=0.5, training=True, inplace=False: function(input, p, False, inplace)

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
        own = {name: x for name, x in columns.items() if name not in (ORIG_ID, ORIG_EID)}
        return {name: x.to(dtype) if x.is_floating_point() else x for name, x in own.items()}

    numbers = {ntype: {ORIG_ID: torch.arange(count)} for ntype, count in graph.num_nodes.items()}
    nodes = {n: converted(graph.node_data.get(n, {})) | numbers[n] for n in numbers}
    edges = {etype: converted(graph.edge_data.get(etype, {})) for etype in graph.edges}
    return replace(graph, node_data=nodes, edge_data=edges)
