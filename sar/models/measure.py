"""A pass of a model that leaves nothing behind, and what each layer holds for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sar._private import storage_id, tree_leaves
from sar.comm import Group
from sar.comm.meter import Counters, LayerNotes, Meter
from sar.comm.seeds import no_draws
from sar.config import Policy
from sar.edges import Relation, ReversedRelation
from sar.graph import GraphArgument, GraphView
from sar.kernels.device import same_random
from sar.ops.saving import observed
from sar.ops.sums import Sums
from sar.stream.plan import HaloPlan
from sar.tracing.edge_rows import EdgeRows


@contextmanager
def untouched(
    model: nn.Module, graphs: Sequence[GraphView], held: Any, notes: LayerNotes
) -> Iterator[None]:
    """Inside, the model runs with gradients; afterwards all is as it was, but what ``notes`` says.

    That is: buffers, training flags, random numbers, columns of ``graphs``, counters, meters, and
    what layers keep for later calls. The group has another meter inside.
    """
    group = graphs[0].group
    tensors = [leaf for leaf in tree_leaves(held) if isinstance(leaf, Tensor)]
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(same_random([t.device for t in (*model.parameters(), *tensors)]))
        stack.enter_context(no_draws(group.seeds))
        stack.enter_context(_accounts(group, notes))
        stack.enter_context(buffers_as(buffers_of(model.modules())))
        stack.enter_context(_training_flags(model))
        for graph in graphs:
            stack.enter_context(graph.columns_put_back())
        yield


@contextmanager
def _accounts(group: Group, notes: LayerNotes) -> Iterator[None]:
    before = group.meter, group.counters
    group.meter, group.counters = Meter(notes=notes), Counters()
    try:
        yield
    finally:
        group.meter, group.counters = before
        for put_back in reversed(notes.undo or []):
            put_back()
        notes.undo = []


Buffers = list[tuple[nn.Module, str, Tensor]]  # owner, name, value


def buffers_of(modules: Iterable[nn.Module]) -> Buffers:
    """(owner, name, buffer) of modules; a buffer that several have comes under each name."""
    return [
        (module, name, value)
        for module in modules
        for name, value in module.named_buffers(recurse=False, remove_duplicate=False)
    ]


@contextmanager
def buffers_as(values: Buffers) -> Iterator[None]:
    """Inside, modules have copies of ``values`` for buffers; what is one tensor stays one."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in values]
    copies = {id(value): value.clone() for _, _, value in values}
    for owner, name, value in values:
        setattr(owner, name, copies[id(value)])
    try:
        yield
    finally:
        for owner, name, buffer in before:
            setattr(owner, name, buffer)


@contextmanager
def _training_flags(model: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


# What objects on autograd's nodes refer to that is there without the pass.
_PARTS_OF_GRAPHS = (Relation, ReversedRelation, HaloPlan, Group, Policy, GraphArgument, nn.Module)


class SavedBytes:
    """Counts, by the name of the layer in ``number``, what autograd saves and our functions keep.

    Memory of modules, graphs and tensors in ``held`` does not count; ``""`` is outside of layers.
    """

    def __init__(self, held: Any) -> None:
        self.number: dict[str, int] = {}
        self._layers = [""]
        self._known = {storage_id(t) for t in _there_anyway(held)}
        self._nodes: set[Any] = set()
        self._tensors: list[Tensor] = []  # keep the numbers of their memory from coming again

    def enter(self, name: str, inputs: list[Any]) -> None:
        """Count what is behind ``inputs`` for the layer before; what comes now is of ``name``."""
        self.see_behind(inputs)
        self._layers.append(name)

    def leave(self, name: str, outputs: list[Tensor]) -> None:
        """Count what is behind ``outputs`` for layer ``name``, which ends."""
        self.see_behind(outputs)
        self._layers.pop()

    def see_behind(self, nest: Any) -> None:
        """Count tensors on nodes of autograd behind ``nest`` that were not visited before."""
        for node in nodes_of(_trained(nest), self._nodes):
            for value in getattr(node, "__dict__", {}).values():
                for tensor in _inside(value):
                    self.see(tensor)

    def see(self, tensor: Tensor) -> None:
        """Count a tensor for the layer at work, its memory once."""
        if isinstance(tensor, EdgeRows):  # a column that was not computed has none of its own
            for one in tensor.node.tensors:
                self.see(one)
            return
        if hasattr(tensor, "is_structure") or tensor.layout != torch.strided:
            return
        if storage_id(tensor) in self._known:
            return
        self._known.add(storage_id(tensor))
        self._tensors.append(tensor.detach())
        layer = self._layers[-1]
        self.number[layer] = self.number.get(layer, 0) + tensor.untyped_storage().nbytes()


def measure(saved: SavedBytes, forward: Callable[[], Any]) -> None:
    """Run a forward pass with gradients and count what it saves."""
    with torch.enable_grad(), observed(saved.see):
        saved.see_behind(forward())


def backward(out: Any) -> None:
    """A backward pass from all results of a model; no tensor's ``grad`` changes."""
    roots = _trained(out)
    nodes = nodes_of(roots, set())
    ends = [getattr(node, "variable", None) for node in nodes]  # nodes of leaves have them
    leaves = [end for end in ends if isinstance(end, Tensor)]
    leaves += [root for root in roots if root.is_leaf]
    if leaves:
        torch.autograd.grad(roots, leaves, [torch.ones_like(r) for r in roots], allow_unused=True)


def _trained(out: Any) -> list[Tensor]:
    return [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]


def nodes_of(outputs: list[Tensor], known: set[Any]) -> list[Any]:
    """The nodes of autograd behind ``outputs`` that are not ``known``, to which they are added."""
    waiting = [t.grad_fn for t in outputs if t.grad_fn is not None]
    found = []
    while waiting:
        node = waiting.pop()
        if node not in known:
            known.add(node)
            found.append(node)
            waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _inside(value: Any) -> Iterator[Tensor]:
    """Tensors that a function keeps on its node beside those that it saves."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _inside(part)
    elif isinstance(value, Sums):  # edges are the relation's
        yield from _inside(value.held_tensors())
    elif not isinstance(value, (type, *_PARTS_OF_GRAPHS)):
        for part in getattr(value, "__dict__", {}).values():
            yield from _inside(part)


def _there_anyway(held: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(held):
        if isinstance(leaf, nn.Module):
            yield from (*leaf.parameters(), *leaf.buffers())
        elif isinstance(leaf, GraphArgument):
            graph = leaf.sharded_graph
            yield from graph.stored_columns()
            for relation in graph._store.relations.values():
                yield from (relation.in_degrees, relation.out_degrees)
        elif isinstance(leaf, EdgeRows):
            yield from leaf.node.tensors
        elif isinstance(leaf, Tensor) and not hasattr(leaf, "is_structure"):
            if leaf.layout == torch.strided:
                yield leaf
