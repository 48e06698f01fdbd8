"""What a user asks of the layers of a model."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from sar.errors import NotSupportedError
from sar.layers.choice import own_forward, warn_once
from sar.layers.entry import OPTIONS, LayerOptions
from sar.layers.table import entry_of

M = TypeVar("M", bound=nn.Module)


def optimize(model: M, *, donate: bool = False, strict: bool = False) -> M:
    """Let the layers of ``model`` do what changes the meaning of your tensors; returns ``model``.

    Layers of other libraries that are known (today DGL's ``SAGEConv`` of means, ``GraphConv``,
    ``GINConv``, ``GATConv`` and ``GATv2Conv``) are computed as a whole on sharded graphs, with the
    same results, without being asked. This marks them with what they may do beyond that; copies
    and pickles of the model keep it, state dicts do not have it. A later call says it anew.

    Args:
        donate: in backward a layer writes the gradient of its input over the input, one tensor of
            the layer's rows less; attention layers do it where that is of another width than their
            values, whose memory it takes otherwise. That goes for what an operation with a gradient
            made, not for your own leaves, nor for views. Nothing else may read the input in
            backward then: where it would, as a relu between two layers that saved its result, torch
            raises a ``RuntimeError`` (give the layer ``activation=F.relu`` instead). What you read
            of it after backward is the gradient. A backward pass that keeps the graph writes over
            nothing.
        strict: raise ``NotSupportedError`` where such a layer is not computed as a whole, with the
            reason, before anything is sent. A reason that only one rank has, as a hook, is raised
            on that rank; the others end as they do with any exception of one rank.

    Raises:
        TypeError: ``model`` is no module, or another argument no bool.
        ValueError: ``strict``, and no layer of the model is known.
        NotSupportedError: ``strict``, and a layer has a ``forward`` of its own.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    for name, value in (("donate", donate), ("strict", strict)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: got {type(value).__name__}, expected a bool")
    layers = [layer for layer in model.modules() if entry_of(type(layer)) is not None]
    if strict and not layers:
        raise ValueError(f"model: got {type(model).__name__}, expected one with a known layer")
    for layer in layers:
        reason = own_forward(layer, entry_of(type(layer)))
        if reason is not None and strict:
            raise NotSupportedError(f"{type(layer).__name__}: not fused, strict=True: {reason}")
        if reason is not None:
            warn_once(layer, reason)
        setattr(layer, OPTIONS, LayerOptions(donate, strict))
    return model
