"""What a model needs before it is trained, and what a user asks of its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from sar import expect
from sar._private import looked_into, tree_leaves
from sar.comm import Group
from sar.errors import NotSupportedError
from sar.graph import GraphArgument, graphs_among
from sar.kernels.jit import untraced
from sar.log import say
from sar.models.choice import OPTIONS, LayerOptions, options_of, warn_once
from sar.models.known import Layers, adapted, known_layers, own_forward
from sar.nn.batch_norm import DistributedBN1D, convert_batch_norm, replaced
from sar.nn.drift import check_call
from sar.nn.dropout import Dropout, convert_dropout
from sar.nn.history import due_call
from sar.nn.params import replicated, sync_params

M = TypeVar("M", bound=nn.Module)


def prepare(
    model: M,
    graph: GraphArgument | Sequence[GraphArgument],
    *,
    donate: bool = False,
    strict: bool = False,
) -> M:
    """Make ``model`` ready to train on ``graph``; returns it. Collective.

    Batch norms take the statistics of all ranks (:func:`sar.convert_batch_norm`), as do other norms
    of a library that has a front end and normalizes over nodes; dropout masks
    stay with the nodes (:func:`sar.convert_dropout`), parameters and buffers become rank 0's
    (:func:`sar.sync_params`), and layers do what :func:`sar.optimize` says. Where no
    :func:`sar.gather_grads` compares the parameters over the ranks, training calls with a graph do
    so now and then, as :func:`sar.check` does. Rank 0 logs once what was done; parameters stay the
    same objects, so an optimizer may be made before or after. Called again it does nothing twice.

    Args:
        model: changed in place. A model that is a batch norm or dropout itself is replaced.
        graph: a graph, the list of blocks, or data with an ``edge_index``, that the model will be
            called with. Other graphs of the same ranks may be, too.
        donate, strict: as of :func:`sar.optimize`; where both are ``False``, what it was asked for
            before stays.

    Raises:
        TypeError: ``model`` is no module, or ``graph`` none of this library.
        ValueError: on every rank, ranks have different models; a parameter is lazy.
        NotSupportedError: ``strict``, and a layer has code of its own.
    """
    expect.instance(model, "model", nn.Module, "a torch.nn.Module")
    leaves = tree_leaves(graph)
    if not leaves or not all(graphs_among([one]) for one in leaves):
        got = type(graph).__name__
        raise TypeError(f"graph: got {got}, expected a sharded graph or a list of blocks")
    graphs = graphs_among(leaves)
    group = graphs[0].group
    before = Counter(type(module) for module in model.modules())
    model = with_norms_of_ranks(model)
    draws = any(issubclass(kind, nn.Dropout) for kind in before)
    if draws or any(layers.keys_functions for layers in known_layers()):
        model = convert_dropout(model, graphs)  # type: ignore[assignment]
    if donate or strict:
        optimize(model, donate=donate, strict=strict)
    sync_params(model, group=group)
    if not getattr(model, "_is_prepared", False):  # copies and pickles keep it, as they keep hooks
        model._is_prepared = True  # type: ignore[assignment]
        model.register_forward_pre_hook(_check, with_kwargs=True)
        if group.rank == 0:
            say(_told(model, before, group))
    return model


def with_norms_of_ranks(model: M) -> M:
    """``model`` with batch norms, and norms of libraries, that take the rows of all ranks."""
    model = convert_batch_norm(model)  # type: ignore[assignment]
    for layers in known_layers():
        model = replaced(model, layers.converted)  # type: ignore[assignment]
    return model


@untraced  # the calls of each model are counted
def _check(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    graphs = graphs_among((args, kwargs))
    if graphs:
        if number := due_call(model, graphs[0].group):
            check_call(model, graphs[0].group, number)


def _told(model: nn.Module, before: Counter[type], group: Group) -> str:
    """The log message: what was done, and a line for each class of layers."""
    params = replicated(model).values()
    numbers = sum(param.numel() for param in params)
    new = Counter(map(type, model.modules())) - before
    norms = new[DistributedBN1D]
    made = f"batch norms converted: {norms}, dropouts converted: {before[nn.Dropout]}"
    if others := new.total() - norms - new[Dropout]:
        made += f", other norms converted: {others}"
    ranks = "1 rank" if group.size == 1 else f"{group.size} ranks"
    return "\n".join(
        [
            f"{type(model).__name__} on {ranks}: {numbers:,} parameters in {len(params)} tensors "
            f"synchronized from rank 0, {made}",
            *_layers(model),
        ]
    )


def _layers(model: nn.Module) -> list[str]:
    """``SAGEConv x 3: fused`` and the like, for layers of the libraries that have front ends."""
    counted: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        kind = type(module).__name__
        if adapted(type(module)) is not None:
            reason = own_forward(module) or looked_into(module)
            donating = ", may write over its input" if options_of(module).donate else ""
            way = f"fused where graph and inputs allow{donating}"
            counted[kind, way if reason is None else f"its own code: {reason}"] += 1
        elif any(one.is_own(module) and _is_innermost(module, one) for one in known_layers()):
            counted[kind, "its own code: no fused layer stands for it"] += 1
    return [f"  {kind} x {number}: {way}" for (kind, way), number in counted.items()]


def _is_innermost(module: nn.Module, layers: Layers) -> bool:
    return not any(layers.is_own(part) for part in module.modules() if part is not module)


def optimize(model: M, *, donate: bool = False, strict: bool = False) -> M:
    """Let the layers of ``model`` do what changes the meaning of your tensors; returns ``model``.

    Layers of other libraries that are known (today DGL's ``SAGEConv`` of means, ``GraphConv``,
    ``GINConv``, ``GATConv`` and ``GATv2Conv``; PyG's ``SAGEConv`` and ``GraphConv`` of means and
    sums, ``GCNConv``, ``GINConv``, ``GATConv`` and ``GATv2Conv``) are computed as a whole on
    sharded graphs, with the same results, without being asked. This marks them with what they may
    do beyond that; copies and pickles of the model keep it, state dicts do not have it. A later
    call says it anew.

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
    expect.instance(model, "model", nn.Module, "a torch.nn.Module")
    expect.boolean(donate, "donate")
    expect.boolean(strict, "strict")
    layers = [layer for layer in model.modules() if adapted(type(layer)) is not None]
    if strict and not layers:
        raise ValueError(f"model: got {type(model).__name__}, expected one with a known layer")
    for layer in layers:
        reason = own_forward(layer)
        if reason is not None and strict:
            raise NotSupportedError(f"{type(layer).__name__}: not fused, strict=True: {reason}")
        if reason is not None:
            warn_once(layer, reason)
        setattr(layer, OPTIONS, LayerOptions(donate, strict))
    return model
