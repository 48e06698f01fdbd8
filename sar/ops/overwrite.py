"""Gradients in the memory of what backward has read: one tensor less when a layer needs most.

Note [Overwritten]. The last operation that reads a saved tensor in a backward pass may write into
it. That it is the last one, that no name and no other operation holds the tensor or shares its
memory, and that the graph is not kept for another backward pass, is told by counts of references;
so is whether nobody else has the gradient that came. Of an array's memory, also of one made of a
tensor, torch says that it cannot be resized. Where the counts cannot be read, or are larger for any
reason, the result has memory of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from sar._private import frees_graph
from sar.ops.reuse import is_plain, references


def may_overwrite(saved: Tensor, gradient: Tensor) -> bool:
    """Whether ``saved``, which a backward pass has unpacked, may become a gradient like another.

    Called with a name for ``saved`` in the backward pass itself. See Note [Overwritten].
    """
    most, counts = _references_of_the_last(), references(saved)
    return (
        frees_graph()
        and not torch.is_grad_enabled()
        and (saved.dtype, saved.device) == (gradient.dtype, gradient.device)
        and is_plain(gradient)
        and is_plain(saved)
        and saved.is_contiguous()
        and saved.untyped_storage().resizable()
        and len(counts) == len(most)
        and all(count <= limit for count, limit in zip(counts, most, strict=True))
    )


def is_last_gradient(gradient: Tensor) -> bool:
    """Whether nobody else has the gradient that a backward pass was called with.

    Called with one name for it, in the backward pass itself. See Note [Overwritten].
    """
    counts, most = references(gradient), _references_of_a_gradient()
    return (
        not torch.is_grad_enabled()
        and is_plain(gradient)
        and gradient.is_contiguous()
        and gradient.untyped_storage().resizable()
        and len(counts) == len(most)
        and all(count <= limit for count, limit in zip(counts, most, strict=True))
    )


class _Probe(Function):
    """Notes the references to a tensor that it saved and to its gradient; dx = dout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[_Found]) -> Tensor:
        ctx.save_for_backward(x, None)
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        x, _ = ctx.saved_tensors
        ctx.found.append(_Found(_counted(x), _counted(dout)))
        return dout, None


class _Found(NamedTuple):
    saved: tuple[int, ...]
    gradient: tuple[int, ...]


def _counted(x: Tensor) -> tuple[int, ...]:
    return references(x)


def _references_of_the_last() -> tuple[int, ...]:
    """What :func:`references` says where nobody else has the tensor; nothing: it cannot tell."""
    return _measured_references().saved


def _references_of_a_gradient() -> tuple[int, ...]:
    return _measured_references().gradient


def _measured_references() -> _Found:
    if not _measured:  # and again where hooks on saved tensors blur the counts
        found = _measure()  # ranks may be threads
        if not found.saved or not found.gradient:
            return found
        _measured[:] = [found]
    return _measured[0]


_measured: list[_Found] = []


def _measure() -> _Found:
    found: list[_Found] = []
    with torch.inference_mode(False), torch.enable_grad():
        one = torch.ones(1, requires_grad=True)
        (_Probe.apply(one + 1, found) * 2).backward()
        named = one + 1
        _Probe.apply(named, found).backward(torch.ones(1))
        shared = (one + 1).view(1, 1)
        _Probe.apply(shared.view(1), found).backward()
        (_Probe.apply(one + 1, found) + _Probe.apply(one + 1, found)).backward(retain_graph=True)
    alone, named_counts, shared_counts, twice, _ = found
    tells = alone.saved and (
        named_counts.saved[0] > alone.saved[0] and shared_counts.saved[2] > alone.saved[2]
    )
    tells_gradients = alone.gradient and twice.gradient[1] > alone.gradient[1]
    return _Found(alone.saved if tells else (), alone.gradient if tells_gradients else ())
