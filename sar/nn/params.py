"""Parameters that every rank holds whole: made equal, and compared by layout and digest."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sar import expect
from sar.comm import Group, current_group
from sar.comm.seeds import digest_of_text
from sar.nn.history import history_of


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
    history_of(group).synced.update(model.modules())


def replicated(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that every rank holds whole, by name."""
    expect.instance(model, "model", nn.Module, "a torch.nn.Module")
    return {n: p for n, p in model.named_parameters() if not isinstance(p, ShardedParameter)}


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those of :func:`replicated` that require a gradient."""
    return {name: param for name, param in replicated(model).items() if param.requires_grad}


def agree_on_layout(
    tensors: Mapping[str, Tensor], group: Group, error: Exception | None = None, also: bytes = b""
) -> bool:
    """Raise on every rank unless tensors have equal names and shapes; whether ``also`` is equal."""
    lazy = [name for name, tensor in tensors.items() if is_lazy(tensor)]
    if lazy and error is None:
        error = ValueError(f"{lazy[0]}: got a lazy parameter, expected a forward pass before this")
    layout = (0, 0, 0) if error is not None else layout_of(tensors)
    mine = torch.tensor([*layout, digest_of_text(also), error is not None])
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


def layout_of(tensors: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """Number of tensors, of elements, and 63 bits of a digest of names, shapes and dtypes."""
    text = repr([(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items()])
    elements = sum(tensor.numel() for tensor in tensors.values())
    return len(tensors), elements, digest_of_text(text)


def digest_of(tensor: Tensor) -> int:
    """63 bits that identify a tensor's bytes."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    return xxhash.xxh3_64_intdigest(data) >> 1
