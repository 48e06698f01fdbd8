"""A pass of a model that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sar._private import tree_leaves
from sar.comm import Group
from sar.comm.group import Counters
from sar.comm.meter import Meter, Told
from sar.comm.seeds import no_draws
from sar.graph import GraphView
from sar.kernels.device import same_random


@contextmanager
def untouched(
    model: nn.Module, graphs: Sequence[GraphView], inputs: Any, named: Any, told: Told
) -> Iterator[None]:
    """Inside, the model runs with gradients; afterwards all is as it was, but what ``told`` says.

    That is: buffers, training flags, random numbers, columns of ``graphs``, counters, meters, and
    what layers keep for later calls. The group has another meter inside.
    """
    group = graphs[0].group
    tensors = [leaf for leaf in tree_leaves((inputs, named)) if isinstance(leaf, Tensor)]
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(same_random([t.device for t in (*model.parameters(), *tensors)]))
        stack.enter_context(no_draws(group.seeds))
        stack.enter_context(_accounts(group, told))
        stack.enter_context(_buffers(model))
        for graph in graphs:
            stack.enter_context(_graph(graph))
        yield


@contextmanager
def _accounts(group: Group, told: Told) -> Iterator[None]:
    before = group.meter, group.counters
    group.meter, group.counters = Meter(told=told), Counters()
    try:
        yield
    finally:
        group.meter, group.counters = before
        for put_back in reversed(told.undo or []):
            put_back()
        told.undo = []


@contextmanager
def _buffers(model: nn.Module) -> Iterator[None]:
    """Inside, the modules have copies of their buffers; what is one tensor stays one."""
    flags = [(module, module.training) for module in model.modules()]
    own = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    copies = {id(buffer): buffer.clone() for _, _, buffer in own}
    for module, name, buffer in own:
        setattr(module, name, copies[id(buffer)])
    try:
        yield
    finally:
        for module, name, buffer in own:
            setattr(module, name, buffer)
        for module, training in flags:
            module.training = training


@contextmanager
def _graph(graph: GraphView) -> Iterator[None]:
    frames = graph._all_frames()
    saved = [frame.save() for frame in frames]
    try:
        yield
    finally:
        for frame, columns in zip(frames, saved, strict=True):
            frame.restore(columns)
