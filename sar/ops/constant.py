"""Results of constant rows: computed until the rows come again, then kept and never sent again.

Note [Constant rows]. What a linear reduction makes of rows that nobody trains is the same in every
epoch. Rows are taken to be the ones of an earlier call when they are the same tensor (or the same
view of it), hold the same memory, and have not been written since: torch counts writes, except
those through ``.data`` or through another library that shares the memory. A result that its
receiver wrote into counts as lost.

One rank alone cannot know that the rows of the others are the same. So each call with rows that
ask for no gradient begins with an agreement, one all-reduce of two numbers: in which call each
rank's kept result was computed, 0 for none. Only when all name the same call is it used; it was
computed from rows of which every owner now says that they are unchanged. Otherwise all ranks
compute, and none waits for a rank that did not come.
"""

from __future__ import annotations

import mmap
import tempfile
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sar.comm import Group
from sar.config import Policy


class _Seen:
    """A tensor as it was at some moment; knows whether it still is.

    Its memory is held as long as it lives, so that no other memory can have the same address.
    """

    def __init__(self, tensor: Tensor, forget: Callable[[Any], None]) -> None:
        self.root = weakref.ref(_root(tensor), forget)
        self.version, self.held = tensor._version, tensor.detach()

    def unchanged(self, tensor: Tensor) -> bool:
        return (
            self.root() is _root(tensor)
            and tensor._version == self.version
            and tensor.data_ptr() == self.held.data_ptr()
        )


@dataclass
class _Kept:
    """A result and the writes into it; handed out without a copy where nobody else holds it."""

    result: Tensor
    version: int
    device: torch.device

    def unchanged(self) -> bool:
        return self.result._version == self.version

    def hand_out(self) -> Tensor:
        if self.result.device != self.device:
            return self.result.to(self.device)
        alone = _num_holders(self.result) == _num_holders_of_one()
        return self.result.detach() if alone else self.result.clone()


@dataclass
class _Entry:
    """What is known of some rows: as they were last seen, and the result of call ``call``.

    Attributes:
        sent_bytes: what this rank sent for the result.
    """

    seen: list[_Seen]
    kept: _Kept | None = None
    call: int = 0
    sent_bytes: int = 0


class Constants:
    """The results of constant rows that a relation keeps.

    Args:
        group: the ranks that agree on each use.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._entries: dict[Any, _Entry] = {}
        self._calls = 0

    def reduce(
        self, tensors: list[Tensor], op: str, policy: Policy, compute: Callable[[], Tensor]
    ) -> Tensor:
        """``compute()``, or what it gave for the same tensors; collective.

        Args:
            tensors: all that ``compute`` reads; none asks for a gradient.
            op: what is computed of them.
        """
        counters = self.group.counters
        self._calls += 1
        never = policy.lossy.draws or any(t.is_inference() for t in tensors)
        key = None if never else (op, policy, *map(_name, tensors))
        entry = None if key is None else self._entries.get(key)
        again = entry is not None and all(
            seen.unchanged(t) for seen, t in zip(entry.seen, tensors, strict=True)
        )
        if entry is not None and not (again and entry.kept and entry.kept.unchanged()):
            entry.kept, entry.call = None, 0
        if self._all_kept(entry) and entry is not None and entry.kept is not None:
            counters.avoided_bytes += entry.sent_bytes
            return entry.kept.hand_out()
        before = counters.sent_bytes
        out = compute()
        if key is not None and not again:
            self._entries[key] = self._watched(key, tensors)
        elif entry is not None and not out.is_inference():
            entry.kept, entry.call = _keep(out, policy.constant_inputs), self._calls
            entry.sent_bytes = counters.sent_bytes - before
        return out

    def _all_kept(self, entry: _Entry | None) -> bool:
        """Whether every rank kept its result of one and the same call."""
        call = 0 if entry is None else entry.call
        span = torch.tensor([call, -call])
        least, most = self.group.all_reduce(span, "min").tolist()
        return least > 0 and least == -most

    def _watched(self, key: Any, tensors: list[Tensor]) -> _Entry:
        """An entry that is dropped when one of the tensors dies."""
        owner = weakref.ref(self)

        def forget(_: Any) -> None:
            constants = owner()
            if constants is not None:
                constants._entries.pop(key, None)

        return _Entry([_Seen(tensor, forget) for tensor in tensors])


def _root(tensor: Tensor) -> Tensor:
    """The tensor that a view is of: it lives as long as the view does, and shares its writes."""
    return tensor if tensor._base is None else tensor._base


def _name(tensor: Tensor) -> tuple:
    """Names a tensor among those that live."""
    place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return (id(_root(tensor)), place, tensor.dtype, tensor.device)


def _keep(out: Tensor, mode: str) -> _Kept:
    held = out.detach()
    if mode == "mapped":
        try:
            held = to_temporary_file(held)
        except OSError as error:
            warnings.warn(f"constant_inputs: no room in a temporary file: {error}", stacklevel=2)
    return _Kept(held, held._version, out.device)


def to_temporary_file(tensor: Tensor) -> Tensor:
    """A copy in a mapped file without a name, which ends with the tensor or the process.

    Raises ``OSError`` when there is no room for it.
    """
    if not tensor.numel():
        return tensor
    with tempfile.TemporaryFile(prefix="sar-") as file:
        file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0)
    return torch.frombuffer(mapped, dtype=tensor.dtype).view(tensor.shape)


def _num_holders(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@cache
def _num_holders_of_one() -> int:
    """What is counted when a single tensor holds its memory."""
    return _num_holders(torch.empty(1))
