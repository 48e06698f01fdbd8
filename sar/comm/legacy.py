"""The original library's names: exchanges of rows over the current group, and keywords."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sar.comm.collectives import exchange_counts, refuse_gradients
from sar.comm.local import current_group
from sar.config import Config

_P = ParamSpec("_P")
_R = TypeVar("_R")
_KEYWORDS = ("rank", "world_size", "comm_device")
_NAMES = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}


def with_old_names(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function``, which also takes ``_rank``, ``_world_size`` and ``_comm_device``."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> _R:
        for name in _KEYWORDS:
            if f"_{name}" in kwargs:
                if name in kwargs:
                    raise TypeError(f"{name}: got it twice, as {name} and as _{name}")
                kwargs[name] = kwargs.pop(f"_{name}")
        return function(*args, **kwargs)

    return call


def all_reduce(
    red_tensor: Tensor, op: Any = dist.ReduceOp.SUM, move_to_comm_device: bool = False
) -> None:
    """Reduce in place over all ranks with SUM, MAX or MIN; tensors are staged as needed.

    Raises ``ValueError`` for another operation: not every backend has it.
    """
    name = next((text for known, text in _NAMES.items() if op == known), None)
    if name is None:
        raise ValueError(f"op: got {op}, expected ReduceOp.SUM, MAX or MIN")
    current_group().all_reduce(red_tensor, name)


def all_to_all(
    recv_tensors: list[Tensor], send_tensors: list[Tensor], move_to_comm_device: bool = False
) -> None:
    """Send ``send_tensors[p]`` to rank p and fill ``recv_tensors[p]`` from rank p, in place.

    Tensors of a pair of ranks have equal shapes; different pairs may differ in rows.
    ``Config.max_collective_size`` bounds the elements that one exchange sends and receives, to
    within a row of each tensor: all are cut along rows, into the same number of pieces.
    """
    refuse_gradients("all_to_all", *send_tensors, *recv_tensors)
    group = current_group()
    _check_lists(recv_tensors, send_tensors, group.size)
    dtypes = {part.dtype for part in (*recv_tensors, *send_tensors)}
    if len(dtypes) > 1:
        raise ValueError(f"tensors: got dtypes {sorted(map(str, dtypes))}, expected one")
    for recv_slices, send_slices in _slices(recv_tensors, send_tensors):
        send = torch.cat([part.detach().reshape(-1) for part in send_slices])
        counts = [part.numel() for part in send_slices], [part.numel() for part in recv_slices]
        got = group.all_to_all(send, *counts)
        for part, values in zip(recv_slices, got.split(counts[1]), strict=True):
            part.copy_(values.view(part.shape))


def exchange_tensors(tensors: list[Tensor], recv_sizes: list[int] | None = None) -> list[Tensor]:
    """Send ``tensors[p]`` ([rows, ...]) to rank p; returns what each rank sent to this one.

    Args:
        tensors: one per rank, equal dtypes and trailing shapes.
        recv_sizes: rows that come from each rank; exchanged first when not given.
    """
    refuse_gradients("exchange_tensors", *tensors)
    group = current_group()
    _check_lists(tensors, tensors, group.size)
    if any(t.shape[1:] != tensors[0].shape[1:] or t.dtype != tensors[0].dtype for t in tensors):
        got = [(tuple(t.shape[1:]), t.dtype) for t in tensors]
        raise ValueError(f"tensors: got {got}, expected equal trailing shapes and dtypes")
    send_sizes = [len(part) for part in tensors]
    if recv_sizes is None:
        recv_sizes = exchange_counts(group, send_sizes)
    return list(
        group.all_to_all(torch.cat(tensors).detach(), send_sizes, recv_sizes).split(recv_sizes)
    )


def exchange_single_tensor(
    recv_idx: int, send_idx: int, recv_tensor: Tensor, send_tensor: Tensor
) -> None:
    """Send ``send_tensor`` to rank ``send_idx`` and fill ``recv_tensor`` from rank ``recv_idx``."""
    refuse_gradients("exchange_single_tensor", send_tensor, recv_tensor)
    group = current_group()
    send_counts, recv_counts = [0] * group.size, [0] * group.size
    send_counts[send_idx], recv_counts[recv_idx] = send_tensor.numel(), recv_tensor.numel()
    got = group.all_to_all(send_tensor.detach().reshape(-1), send_counts, recv_counts)
    recv_tensor.copy_(got.view(recv_tensor.shape))


def _check_lists(recv: list[Tensor], send: list[Tensor], size: int) -> None:
    if len(recv) != size or len(send) != size:
        raise ValueError(f"tensors: got {len(send)} and {len(recv)}, expected one per rank: {size}")


def _slices(recv: list[Tensor], send: list[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Cut both lists along rows into ceil(elements / ``Config.max_collective_size``) pieces. A
    piece has up to ceil(rows / pieces) rows of each tensor: more than the limit where the rows
    cannot be cut evenly, such as those of many tensors of one row."""
    if Config.max_collective_size <= 0:
        return [(recv, send)]
    elements = sum(part.numel() for part in recv) + sum(part.numel() for part in send)
    wanted = torch.tensor(max(1, -(-elements // Config.max_collective_size)))
    pieces = int(current_group().all_reduce(wanted, "max"))
    cuts = [
        tuple([part.tensor_split(pieces)[i] for part in parts] for parts in (recv, send))
        for i in range(pieces)
    ]
    return [(recv_part, send_part) for recv_part, send_part in cuts]
