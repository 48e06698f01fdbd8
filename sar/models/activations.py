"""What layers do with the activations that backward needs: keep, recompute or move them away."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sar._private import tree_leaves
from sar.comm import Group, current_group
from sar.graph import GraphArgument, graphs_among
from sar.graph.rows import SameDropoutRows
from sar.kernels.device import is_host
from sar.memory.forwards import Forward, LayerInputs, replace, reset
from sar.memory.paging import Offload, RoundToBfloat16, in_memory
from sar.models.known import known_layers
from sar.models.measure import Buffers, buffers_as, buffers_of
from sar.ops.randomness import SameRandom
from sar.ops.saving import Notes, hooked, onlooker
from sar.words import ACTIVATIONS

_GRAPH_NAMES = ("graph", "g", "block", "mfg")


def set_activations(
    module: nn.Module | Sequence[nn.Module],
    activations: str,
    *,
    directory: str | os.PathLike | None = None,
) -> None:
    """Say how a model, or some of its layers, hold what their backward passes need.

    * ``"keep"``: as torch does; undoes an earlier call.
    * ``"recompute"``: each layer keeps its inputs alone and runs its forward pass again in
      backward, with the same dropout, batch statistics and buffers. Rows of other ranks are fetched
      again. Layers are those of DGL and PyG, a module of yours that is called with a graph and
      holds at most one such layer, or what a method ``graph_layers()`` of yours returns; in a list,
      the modules themselves. Backward of one layer at a time has its activations in memory.
    * ``"offload"``: everything saved inside the module is written to a file and mapped when
      backward needs it.
    * ``"lossy_bfloat16"``: floats saved inside the module are rounded to bfloat16. Gradients are
      not exact any more; results of the forward pass are.

    Parameters, buffers, arguments and columns of the graph stay where they are, and so do small
    tensors; one that is written into before backward is a ``RuntimeError`` there. Gradients are
    those of ``"keep"`` bit for bit, but for the last, and to rounding where a recomputed
    ``SAGEConv`` multiplies its means in blocks of columns. State dicts do not change; copies of
    the module have the same setting.

    Args:
        module: a model, a layer, or a list of layers to be taken as they are.
        activations: one of the above.
        directory: for ``"offload"``: an existing folder on a disk; ``None`` is the system's one for
            temporary files. The file has no name there and ends with the process.

    Raises:
        TypeError, ValueError: an argument is of another type, not one of the above, or no folder
            that can be written in.
    """
    modules = _checked(module)
    if activations not in ACTIVATIONS:
        raise ValueError(
            f"activations: got {activations!r}, expected one of {', '.join(ACTIVATIONS)}"
        )
    folder = None if directory is None else _writable(directory, activations)
    for one in modules:
        reset([*one.modules(), *layers_of(one)])
    if activations == "recompute":
        for layer in layers_of(module) if isinstance(module, nn.Module) else modules:
            replace(layer, _Recompute(layer))
    elif activations != "keep":
        for one in modules:
            replace(one, OffloadForward(one, activations, folder))


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers of ``module`` that :func:`set_activations` finds; itself when there are none."""
    return _layers(module) or [module]


def _layers(module: nn.Module) -> list[nn.Module]:
    said = getattr(module, "graph_layers", None)
    if callable(said):
        return list(said())
    if any(one.is_own(module) and one.takes_graph(module) for one in known_layers()):
        return [module]
    found = [layer for child in module.children() for layer in _layers(child)]
    found = list(dict.fromkeys(found))
    return [module] if len(found) < 2 and _takes_graph(module) else found


def _takes_graph(module: nn.Module) -> bool:
    names = list(inspect.signature(type(module).forward).parameters)
    is_told = any(one.takes_graph(module) for one in known_layers())
    return is_told or (len(names) > 1 and names[1] in _GRAPH_NAMES)


def _checked(module: Any) -> list[nn.Module]:
    modules = [module] if isinstance(module, nn.Module) else module
    got = type(module).__name__
    if isinstance(modules, (list, tuple, nn.ModuleList)):
        others = [type(one).__name__ for one in modules if not isinstance(one, nn.Module)]
        if len(modules) and not others:
            return list(modules)
        got = f"a {got} with {others[0]}" if others else f"an empty {got}"
    raise TypeError(f"module: got {got}, expected a module or a list of modules")


def _writable(directory: str | os.PathLike, activations: str) -> str:
    folder = os.fspath(directory)
    if activations != "offload":
        raise ValueError(f"directory: got {folder!r} with {activations!r}, expected 'offload'")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(f"directory: got {folder!r}, expected a folder to write in")
    return folder


class _Recompute(Forward):
    """Keeps a layer's arguments alone, and computes everything else again in backward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        from torch.utils.checkpoint import checkpoint  # takes long to import

        leaves = tree_leaves((args, kwargs))
        inputs = LayerInputs(args, kwargs)
        own = self.own  # in both passes: the first use of a graph may replace it in the class

        def run() -> Any:
            args, kwargs = inputs.take()
            return own(*args, **kwargs)

        return checkpoint(
            run,
            use_reentrant=False,
            preserve_rng_state=any(isinstance(x, Tensor) and not is_host(x.device) for x in leaves),
            context_fn=partial(_both_passes, self.module, _group_of(leaves)),
        )


def _both_passes(
    module: nn.Module, group: Group
) -> tuple[AbstractContextManager, AbstractContextManager]:
    notes = Notes()
    return hooked(notes), ReplayedState(module, group, notes)


class ReplayedState:
    """The state that the forward pass began with, entered at each repetition."""

    def __init__(self, module: nn.Module, group: Group, notes: Notes) -> None:
        self.notes = notes
        own = buffers_of(part for part in module.modules() if part.training)
        self.buffers: Buffers = [(owner, name, value.clone()) for owner, name, value in own]
        self.states = [group.seeds.again(), SameRandom(), SameDropoutRows()]
        self.entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for state in self.states:
                stack.enter_context(state)
            stack.enter_context(buffers_as(self.buffers))
            stack.enter_context(hooked(self.notes, again=True))
            self.entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self.entered.pop().__exit__(*error)


class OffloadForward(Forward):
    """Passes what is saved inside a module through hooks that move it to a file or round it."""

    def __init__(self, module: nn.Module, activations: str, directory: str | None) -> None:
        super().__init__(module)
        self.activations, self.directory = activations, directory
        self._hooks: Offload | RoundToBfloat16 | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hooks": None}  # copies of the module have their own file

    @property
    def hooks(self) -> Offload | RoundToBfloat16:
        if self._hooks is None:
            offload = self.activations == "offload"
            self._hooks = Offload(self.directory) if offload else RoundToBfloat16()
        return self._hooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        held = held_by_others(self.module, tree_leaves((args, kwargs)))
        hooks, see = self.hooks, onlooker()

        def pack(saved: Tensor) -> Any:
            packed = hooks.pack(saved, held)
            if see is not None:
                for tensor in in_memory(packed):
                    see(tensor)
            return packed

        with saved_tensors_hooks(pack, hooks.unpack), hooked():
            return self.own(*args, **kwargs)


def _group_of(leaves: list[Any]) -> Group:
    graphs = graphs_among(leaves)
    return graphs[0].group if graphs else current_group()


def held_by_others(module: nn.Module, leaves: list[Any]) -> set[int]:
    """Addresses of storages that others hold: parameters, buffers, arguments, graph columns."""
    tensors = [*module.parameters(), *module.buffers()]
    for leaf in leaves:
        if isinstance(leaf, GraphArgument):
            tensors.extend(leaf.sharded_graph.stored_columns())
        elif isinstance(leaf, Tensor):
            tensors.append(leaf)
    return {t.untyped_storage().data_ptr() for t in tensors if t.layout == torch.strided}
