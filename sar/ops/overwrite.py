"""Gradients in the memory of what backward has read: one tensor less when a layer needs most.

Note [Overwritten]. The last operation that reads a saved tensor in a backward pass may write into
it. That it is the last one, that no name and no other operation holds the tensor or shares its
memory, and that the graph is not kept for another backward pass, is told by counts of references.
Where they cannot be read, or are larger for any reason, the gradient has memory of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sar.ops.reuse import is_plain, references


def frees_graph() -> bool:
    """Whether a backward pass is running after which nobody can come back to its saved tensors."""
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    running = getattr(torch._C, "_current_graph_task_id", lambda: -1)() != -1
    return keeps_graph is not None and running and not keeps_graph()


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
        and len(counts) == len(most)
        and all(count <= limit for count, limit in zip(counts, most, strict=True))
    )


class _Probe(Function):
    """Notes the references to a tensor that it saved; dx = dout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[tuple[int, ...]]) -> Tensor:
        ctx.save_for_backward(x, None)
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        x, _ = ctx.saved_tensors
        _note(x, ctx.found)
        return dout, None


def _note(saved: Tensor, found: list[tuple[int, ...]]) -> None:
    found.append(references(saved))


def _references_of_the_last() -> tuple[int, ...]:
    """What :func:`references` says where nobody else has the tensor; nothing: it cannot tell."""
    if not _measured:  # and again where hooks on saved tensors blur the counts
        _measured[:] = _measure()  # ranks may be threads
    return tuple(_measured)


_measured: list[int] = []


def _measure() -> tuple[int, ...]:
    found: list[tuple[int, ...]] = []
    with torch.inference_mode(False), torch.enable_grad():
        one = torch.ones(1, requires_grad=True)
        _Probe.apply(one + 1, found).backward()
        named = one + 1
        _Probe.apply(named, found).backward()
        shared = (one + 1).view(1, 1)
        _Probe.apply(shared.view(1), found).backward()
    alone, named_counts, shared_counts = found
    tells = alone and named_counts[0] > alone[0] and shared_counts[2] > alone[2]
    return alone if tells else ()
