"""What is built on a group's collectives: agreeing on errors, rows by owner, reports on rank 0."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sar import errors

if TYPE_CHECKING:
    from sar.comm.group import Group

_STATUS_BYTES = 1024


def refuse_gradients(call: str, *tensors: Tensor) -> None:
    """Raise ``ValueError`` for a tensor that autograd records: it would lose its gradient."""
    for tensor in tensors:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{call}: got a tensor that asks for a gradient, which does not flow to other "
                "ranks; use sar.global_mean or sar.global_sum for a loss, sar.sync_params and "
                "sar.gather_grads for parameters, and tensor.detach().clone() for its numbers alone"
            )


def agree(group: Group, error: Exception | None, what: str = "", alike: object = None) -> None:
    """Collective: return when no rank passes an error, else raise the lowest rank's on all ranks.

    Each rank sends one status of a fixed size. The class survives when it is a builtin or one of
    :mod:`sar.errors`; others become ``SarError``.

    Args:
        what: the call, for the message; a ``CommError`` on every rank where ranks call another.
        alike: options that have to be the same on all ranks, compared by their ``repr``; else a
            ``ValueError`` on every rank, which names the option where this is a mapping.
    """
    if group.size == 1:
        if error is not None:
            raise error
        return
    statuses = group.all_gather(_status(error, what, alike))
    failed = [rank for rank, status in enumerate(statuses) if status[0]]
    if failed:
        agreed = _error(statuses[failed[0]], group.title(failed[0]))
        if failed[0] == group.rank:
            raise agreed from error
        raise agreed
    calls, _, options = zip(*map(_read, statuses))
    if any(call != what for call in calls):
        raise group._calls_differ(
            ", ".join(f"{r}: {call or 'other'}" for r, call in enumerate(calls))
        )
    other = next((rank for rank, option in enumerate(options) if option != options[0]), None)
    if other is not None:
        name, got, first = _different(options[other], options[0])
        raise ValueError(
            f"{what}: {name}{group.title(other)} got {got}, {group.title(0)} got {first}; expected "
            "the same on all ranks"
        )


def _different(one: Any, other: Any) -> tuple[str, Any, Any]:
    """(name, this rank's value, the other's) of the first option that differs; "" without names."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return "", one, other
    name = next(name for name in one | other if one.get(name) != other.get(name))
    return f"{name}: ", one.get(name), other.get(name)


def _status(error: Exception | None, what: str, alike: object) -> Tensor:
    """uint8 [1024]: whether there is an error, JSON of call, class of error, text or options."""
    kind, most, body = "" if error is None else type(error).__name__, _STATUS_BYTES, b""
    while not body or len(body) > _STATUS_BYTES - 1:
        text: Any = str(error)[:most]
        if error is None and isinstance(alike, Mapping):
            text = {str(name): _short(repr(one), most) for name, one in alike.items()}
        elif error is None:
            text = _short(repr(alike), most)
        body, most = json.dumps([what, kind, text]).encode(), most * 3 // 4
    status = torch.zeros(_STATUS_BYTES, dtype=torch.uint8)
    status[0] = error is not None
    status[1 : 1 + len(body)] = torch.tensor(list(body), dtype=torch.uint8)
    return status


def _short(text: str, most: int) -> str:
    """``text`` cut to ``most`` characters, with a digest, so that cut texts still differ."""
    digest = blake2b(text.encode(), digest_size=4).hexdigest()
    return text if len(text) <= most else f"{text[:most]}..({digest})"


def _read(status: Tensor) -> tuple[str, str, Any]:
    call, kind, text = json.loads(bytes(status[1:].tolist()).rstrip(b"\0"))
    return call, kind, text


def _error(status: Tensor, title: str) -> Exception:
    call, name, text = _read(status)
    message = f"{title}: {call + ': ' if call else ''}{text}"
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # a class that wants more arguments than a message
            pass
    return errors.SarError(f"{name}: {message}")


def exchange_counts(group: Group, counts: Sequence[int]) -> list[int]:
    """Tell each rank how many rows this one has for it; learn the same from each."""
    ones = [1] * group.size
    return group.all_to_all(torch.tensor(counts, dtype=torch.int64), ones, ones).tolist()


def send_rows(group: Group, owner: Tensor, rows: Tensor) -> Tensor:
    """Send each row to the rank that ``owner`` (int64 [n]) names; collective. Returns the rows
    meant for this rank, by the rank they come from and then in the order given there."""
    order, sent, received = _by_owner(group, owner)
    return group.all_to_all(rows.index_select(0, order), sent, received)


def ask_rows(
    group: Group, owner: Tensor, rows: Tensor, answer: Callable[[Tensor], Tensor]
) -> Tensor:
    """The answers of each row's owner, in the order of ``rows``; collective. ``answer`` is called
    once on the rows that this rank was asked, [m, ...], and returns m rows."""
    order, sent, received = _by_owner(group, owner)
    asked = group.all_to_all(rows.index_select(0, order), sent, received)
    answers = group.all_to_all(answer(asked), received, sent)
    return torch.empty_like(answers).index_copy_(0, order, answers)


def _by_owner(group: Group, owner: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """The order that sorts rows by owner, and how many go to and come from each rank."""
    sent = torch.bincount(owner, minlength=group.size).tolist()
    return torch.argsort(owner, stable=True), sent, exchange_counts(group, sent)


def gather_json(value: Any, group: Group) -> list[Any]:
    """JSON values of all ranks by rank, on rank 0 alone; collective, no traffic of rows."""
    if group.size == 1:
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in group.all_gather(torch.tensor(len(mine)))]
    is_first = group.rank == 0
    recv_counts = sizes if is_first else [0] * group.size
    send_counts = [len(mine)] + [0] * (group.size - 1)
    recv = torch.empty(sum(recv_counts), dtype=torch.uint8, device=group.device)
    group._exchange(recv, mine.to(group.device), recv_counts, send_counts).wait()
    parts = recv.split(sizes) if is_first else ()
    return [json.loads(bytes(part.cpu().numpy())) for part in parts]
