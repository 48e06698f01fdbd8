"""Whether every rank still trains the same model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sar.comm import Group, current_group
from sar.errors import DriftError
from sar.nn.replicas import agree_on_layout, replicated

CHECK_EVERY = 50  # calls of gather_grads
_MOST_RANKS_NAMED = 8
_summed: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # equal on all ranks
_warned: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def check(model: nn.Module, *, buffers: bool = True, group: Group | None = None) -> None:
    """Raise on every rank unless all ranks hold the same model, bit for bit; collective.

    What it tells: parameters that were never synchronized, gradients that were not summed on
    every rank, optimizers that step differently, memory that lost a bit. What it cannot tell: a
    step that is wrong in the same way everywhere, such as summed gradients of a loss that is a mean
    over one rank's nodes, in place of :func:`sar.global_mean`. 8 bytes a rank are sent; a million
    parameters are read in about 0.2 ms.

    Args:
        model: sharded parameters are left out.
        buffers: compare those as well. Statistics of an ``nn.BatchNorm1d`` that was not converted
            differ between ranks, and so do the results of evaluation on them.

    Raises:
        DriftError: a parameter or buffer is not the same on all ranks; the first one is named.
        ValueError: the models have other parameters, or other shapes and dtypes.
        TypeError: ``model`` is no module.
    """
    group = group or current_group()
    warn_of_local_norms(model, group)
    tensors: dict[str, Tensor] = dict(replicated(model))
    if buffers:
        tensors |= dict(model.named_buffers())
    digests = [0 if is_lazy(tensor) else _digest(tensor) for tensor in tensors.values()]
    if _are_equal(hash(tuple(digests)), group):
        return
    agree_on_layout(tensors, group)
    found = torch.stack(group.all_gather(torch.tensor(digests, dtype=torch.int64)))
    differ = found != found[0]
    if differ.any():
        raise DriftError(_first_difference(tensors, differ))


def check_now_and_then(model: nn.Module, group: Group) -> None:
    """:func:`check` of the parameters in one of so many calls; the same one on all ranks."""
    calls = _summed[model] = _summed.get(model, 0) + 1
    if calls == 1:
        warn_of_local_norms(model, group)
    if calls % CHECK_EVERY == 0 and group.size > 1:
        check(model, buffers=False, group=group)


def warn_of_local_norms(model: nn.Module, group: Group) -> None:
    """Say once, on rank 0, that a batch norm in training mode sees one rank's rows alone."""
    if group.size == 1 or group.rank or model in _warned:
        return
    norms = (nn.BatchNorm1d, nn.LazyBatchNorm1d)
    local = [n for n, part in model.named_modules() if isinstance(part, norms) and part.training]
    if local:
        _warned[model] = True
        warnings.warn(
            f"{local[0] or 'the model'} normalizes with each rank's own rows: results depend on "
            "the cut; convert the model with sar.convert_batch_norm first",
            stacklevel=4,
        )


def _digest(tensor: Tensor) -> int:
    """63 bits of its bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    return xxhash.xxh3_64_intdigest(data) >> 1


def _are_equal(number: int, group: Group) -> bool:
    found = [int(one) for one in group.all_gather(torch.tensor([number]))]
    return len(set(found)) == 1


def _first_difference(tensors: Mapping[str, Tensor], differ: Tensor) -> str:
    first = int(differ.any(0).nonzero()[0])
    ranks = differ[:, first].nonzero().view(-1).tolist()
    shown = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
    more = " and more" if len(ranks) > _MOST_RANKS_NAMED else ""
    return (
        f"model: {list(tensors)[first]} of rank {shown}{more} is not the same as rank 0's "
        f"({int(differ.any(0).sum())} of {len(tensors)} tensors differ); was it not synchronized "
        "(sar.sync_params), or were gradients not summed on every rank (sar.gather_grads)?"
    )
