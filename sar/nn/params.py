"""Parameters that start equal and gradients that are summed over ranks; parameters that are not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sar.comm import Group, current_group
from sar.ops.reduce import wide_dtype


class ShardedParameter(nn.Parameter):
    """A parameter of which every rank holds rows of its own: neither synced nor summed."""


def sync_params(model: nn.Module, *, group: Group | None = None) -> None:
    """Overwrite every parameter and buffer with rank 0's, in place; collective.

    Sharded parameters (:class:`sar.nn.ShardedEmbedding`) are left alone.

    Raises ``ValueError`` on every rank when ranks differ in the number, names, shapes or dtypes of
    the model's tensors, or when a lazy parameter has no shape yet.
    """
    group = group or current_group()
    tensors: dict[str, Tensor] = {**replicated(model), **dict(model.named_buffers())}
    agree_on_layout(tensors, group)
    with torch.no_grad():
        for tensor in tensors.values():
            group.broadcast(tensor)


def gather_grads(model: nn.Module, *, group: Group | None = None) -> None:
    """Sum the gradients of all ranks, in place, so that every rank holds the same; collective.

    A rank whose gradient is ``None`` contributes zeros; a gradient stays ``None`` only where it is
    so on every rank. One flat bucket per dtype is sent; 16-bit gradients are summed in float32.
    Sharded parameters are left alone: their gradients are whole on their rank. Afterwards
    ``torch.nn.utils.clip_grad_norm_`` clips by the global norm as it stands, and
    :func:`clip_grad_norm_` does where there are sharded parameters.

    Raises ``ValueError`` on every rank when the ranks' parameters differ in number, name, shape or
    dtype, and ``TypeError`` for a sparse gradient.
    """
    group = group or current_group()
    named = {name: param for name, param in replicated(model).items() if param.requires_grad}
    sparse = [n for n, p in named.items() if p.grad is not None and p.grad.layout != torch.strided]
    error = TypeError(f"{sparse[0]}: got a sparse gradient, expected dense") if sparse else None
    params = [param for param in named.values() if param.grad is not None]
    present = bytes(param.grad is not None for param in named.values())
    if not agree_on_layout(named, group, error, present):
        params = _with_gradient_somewhere(list(named.values()), group)
    for dtype in dict.fromkeys(param.dtype for param in params):
        sum_bucket([param for param in params if param.dtype == dtype], dtype, group)


def clip_grad_norm_(model: nn.Module, max_norm: float, *, group: Group | None = None) -> Tensor:
    """Scale all gradients so that their joint L2 norm is at most ``max_norm``; collective.

    For after :func:`gather_grads`: gradients that all ranks share count once, rows of sharded
    parameters count on the rank that holds them.

    Returns:
        The norm before, a float64 scalar, equal on every rank.

    Raises:
        TypeError, ValueError: ``max_norm`` is not a number, or not positive.
    """
    if not hasattr(max_norm, "__float__"):
        raise TypeError(f"max_norm: got {type(max_norm).__name__}, expected a number")
    if not max_norm > 0:
        raise ValueError(f"max_norm: got {max_norm!r}, expected more than 0")
    squares = torch.zeros(2, dtype=torch.float64)
    grads: list[Tensor] = []
    for param in model.parameters():
        if param.grad is not None:
            if param.grad.is_sparse:
                param.grad = param.grad.coalesce()
            grads.append(param.grad)
            values = param.grad.values() if param.grad.is_sparse else param.grad
            kind = int(isinstance(param, ShardedParameter))
            squares[kind] += values.double().square().sum().cpu()
    if any(isinstance(param, ShardedParameter) for param in model.parameters()):
        (group or current_group()).all_reduce(squares[1:])
    norm = squares.sum().sqrt()
    share = float(max_norm / (norm + 1e-6))  # as torch's
    if share < 1:
        for grad in grads:
            grad.mul_(share)
    return norm


def replicated(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that every rank holds whole, by name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    return {n: p for n, p in model.named_parameters() if not isinstance(p, ShardedParameter)}


def _with_gradient_somewhere(params: list[nn.Parameter], group: Group) -> list[nn.Parameter]:
    """The parameters that have a gradient on at least one rank."""
    present = torch.tensor([param.grad is not None for param in params], dtype=torch.int32)
    if len(params):
        group.all_reduce(present, "max")
    return [param for param, has_grad in zip(params, present.tolist()) if has_grad]


def sum_bucket(params: list[nn.Parameter], dtype: torch.dtype, group: Group) -> None:
    """Sum the gradients of parameters of one dtype over all ranks, ``None`` counting as 0."""
    grads = []
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        grads.append(param.grad)
    if group.size == 1:
        return
    bucket = torch.cat([grad.reshape(-1) for grad in grads]).to(wide_dtype(dtype))
    group.all_reduce(bucket)
    for grad, part in zip(grads, bucket.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))


def agree_on_layout(
    tensors: Mapping[str, Tensor], group: Group, error: Exception | None = None, also: bytes = b""
) -> bool:
    """Raise on every rank unless all ranks hold equally named and shaped tensors.

    Returns:
        Whether ``also`` is the same on all ranks.
    """
    lazy = [name for name, tensor in tensors.items() if is_lazy(tensor)]
    if lazy and error is None:
        error = ValueError(f"{lazy[0]}: got a lazy parameter, expected a forward pass before this")
    layout = (0, 0, 0) if error is not None else _layout(tensors)
    mine = torch.tensor([*layout, _digest(also), error is not None])
    found = [tuple(one.tolist()) for one in group.all_gather(mine)]
    if any(failed for *_, failed in found):
        group.agree(error)
    layouts = [one[:3] for one in found]
    first = layouts[0]
    other = next((rank for rank, layout in enumerate(layouts) if layout != first), None)
    if other is not None:
        raise ValueError(
            f"model: rank {other} has {layouts[other][0]} tensors with {layouts[other][1]} "
            f"elements, rank 0 has {first[0]} with {first[1]}; expected equal names, shapes and "
            "dtypes on all ranks"
        )
    return len({one[3] for one in found}) == 1


def _layout(tensors: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """Number of tensors, of elements, and 63 bits of a digest of names, shapes and dtypes."""
    text = repr([(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items()])
    elements = sum(tensor.numel() for tensor in tensors.values())
    return len(tensors), elements, _digest(text.encode())


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1
