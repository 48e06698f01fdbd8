"""Everything that a model needs before it is trained on a sharded graph, in one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from sar._private import tree_leaves
from sar.comm import Group
from sar.graph import GraphView
from sar.layers.choice import call_reason, own_forward
from sar.layers.entry import options_of
from sar.layers.optimize import optimize
from sar.layers.said import say
from sar.layers.table import entries, entry_of
from sar.nn.batch_norm import DistributedBN1D, convert_batch_norm
from sar.nn.drift import check_call
from sar.nn.dropout import convert_dropout
from sar.nn.params import sync_params
from sar.nn.replicas import replicated

M = TypeVar("M", bound=nn.Module)


def prepare(
    model: M, graph: GraphView | Sequence[GraphView], *, donate: bool = False, strict: bool = False
) -> M:
    """Make ``model`` ready to train on ``graph``; returns it. Collective.

    Batch norms take the statistics of all ranks (:func:`sar.convert_batch_norm`), dropout masks
    stay with the nodes (:func:`sar.convert_dropout`), parameters and buffers become rank 0's
    (:func:`sar.sync_params`), and layers do what :func:`sar.optimize` says. Where no
    :func:`sar.gather_grads` compares the parameters over the ranks, training calls with a graph do
    so now and then, as :func:`sar.check` does. Rank 0 logs once what was done; parameters stay the
    same objects, so an optimizer may be made before or after. Called again it does nothing twice.

    Args:
        model: changed in place. A model that is a batch norm or dropout itself is replaced.
        graph: a graph, or the list of blocks, that the model will be called with. Other graphs of
            the same ranks may be, too.
        donate, strict: as of :func:`sar.optimize`; where both are ``False``, what it was asked for
            before stays.

    Raises:
        TypeError: ``model`` is no module, or ``graph`` none of this library.
        ValueError: on every rank, ranks have different models; a parameter is lazy.
        NotSupportedError: ``strict``, and a layer has code of its own.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    graphs = tree_leaves(graph)
    if not graphs or not all(isinstance(one, GraphView) for one in graphs):
        got = type(graph).__name__
        raise TypeError(f"graph: got {got}, expected a sharded graph or a list of blocks")
    group = graphs[0].group
    before = Counter(type(module) for module in model.modules())
    model = convert_batch_norm(model)  # type: ignore[assignment]
    if any(issubclass(kind, nn.Dropout) for kind in before):
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


def _check(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    graphs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GraphView)]
    if graphs:
        check_call(model, graphs[0].group)


def _told(model: nn.Module, before: Counter[type], group: Group) -> str:
    """What was done, in a line, and a line for each class of layers."""
    params = replicated(model).values()
    numbers = sum(param.numel() for param in params)
    norms = Counter(map(type, model.modules()))[DistributedBN1D] - before[DistributedBN1D]
    made = f"batch norms converted: {norms}, dropouts converted: {before[nn.Dropout]}"
    ranks = "1 rank" if group.size == 1 else f"{group.size} ranks"
    return "\n".join(
        [
            f"{type(model).__name__} on {ranks}: {numbers:,} parameters in {len(params)} tensors "
            f"synchronized from rank 0, {made}",
            *_layers(model),
        ]
    )


def _layers(model: nn.Module) -> list[str]:
    """``SAGEConv x 3: fused`` and the like, for layers of the libraries in the table."""
    libraries = {entry.module.partition(".")[0] for entry in entries()} - {"sar"}
    counted: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        kind, entry = type(module), entry_of(type(module))
        if entry is not None:
            reason = own_forward(module, entry) or call_reason(module)
            donating = ", may write over its input" if options_of(module).donate else ""
            way = f"fused where graph and inputs allow{donating}"
            counted[kind.__name__, way if reason is None else f"its own code: {reason}"] += 1
        elif kind.__module__.partition(".")[0] in libraries and _is_innermost(module, libraries):
            counted[kind.__name__, "its own code: no fused layer stands for it"] += 1
    return [f"  {kind} x {number}: {way}" for (kind, way), number in counted.items()]


def _is_innermost(module: nn.Module, libraries: set[str]) -> bool:
    parts = [part for part in module.modules() if part is not module]
    return not any(type(part).__module__.partition(".")[0] in libraries for part in parts)
