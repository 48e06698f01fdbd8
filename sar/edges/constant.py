"""Results of constant rows: computed until the rows come again, then kept and never sent again.

Note [Constant rows]. What a linear reduction makes of rows that nobody trains is the same in every
epoch. Rows are taken to be the ones of an earlier call when they are the same tensor (or the same
view of it), hold the same memory, and have not been written since: torch counts writes, except
those through ``.data`` or through another library that shares the memory. Rows that are noted to
be others times numbers (Note [Scaled rows]) are the ones of an earlier call when those others are
and the numbers are equal. A result that its receiver wrote into counts as lost.

One rank alone cannot know that the rows of the others are the same. So each call with rows that
ask for no gradient begins with an agreement, one all-reduce of two numbers: in which call each
rank's kept result was computed, 0 for none. Only when all name the same call is it used; it was
computed from rows of which every owner now says that they are unchanged. Otherwise all ranks
compute, and none waits for a rank that did not come.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from sar.comm import Group
from sar.config import Policy
from sar.edges.scaled import Scaled, note_scaled, scaled_of
from sar.partition.row_file import RowFile


class _Seen:
    """Rows as they were at some moment; knows whether they still are.

    Their memory is held as long as they live, so that no other memory can have the same address.
    """

    def __init__(self, made: Scaled, forget: Callable[[Any], None]) -> None:
        self.root = weakref.ref(_root(made.rows), forget)
        self.version, self.held = made.rows._version, made.rows.detach()
        self.factors = [factor.clone() for factor in made.factors]

    def unchanged(self, made: Scaled) -> bool:
        rows = made.rows
        return (
            self.root() is _root(rows)
            and rows._version == self.version
            and rows.data_ptr() == self.held.data_ptr()
            and all(map(torch.equal, self.factors, made.factors))
        )


class Kept(Protocol):
    """What a call gave."""

    def unchanged(self) -> bool:
        """Whether it still is that."""


@dataclass
class _Result:
    """A result and the writes into it; handed out without a copy where nobody else holds it."""

    result: Tensor
    version: int
    device: torch.device

    def unchanged(self) -> bool:
        return self.result._version == self.version

    def hand_out(self) -> Tensor:
        if self.result.device != self.device:
            out = self.result.to(self.device)
        else:
            alone = _num_holders(self.result) == _num_holders_of_one()
            out = self.result.detach() if alone else self.result.clone()
        note_scaled(out, self.result)
        return out


@dataclass
class _Entry:
    """What is known of some rows: as they were last seen, and the result of call ``call``.

    Attributes:
        sent_bytes: what this rank sent for the result.
    """

    seen: list[_Seen]
    kept: Kept | None = None
    call: int = 0
    sent_bytes: int = 0


@dataclass
class Use:
    """One call for constant rows.

    Attributes:
        kept: what an earlier one gave, to be used now on all ranks.
    """

    constants: Constants
    entry: _Entry | None
    call: int
    kept: Kept | None = None

    @property
    def again(self) -> bool:
        """Whether the same rows came before, so that what this call gives may be kept."""
        return self.entry is not None

    def keep(self, result: Kept, sent_bytes_before: int) -> None:
        """Keep what this call gives; all that was sent since is not sent again."""
        if self.entry is not None:
            self.entry.kept, self.entry.call = result, self.call
            sent = self.constants.group.counters.sent_bytes - sent_bytes_before
            self.entry.sent_bytes = sent


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
        use = self.use(tensors, op, policy)
        if isinstance(use.kept, _Result):
            return use.kept.hand_out()
        before = self.group.counters.sent_bytes
        out = compute()
        if use.again and not out.is_inference():
            use.keep(_keep(out, policy.constant_inputs), before)
        return out

    def use(self, tensors: list[Tensor], op: str, policy: Policy) -> Use:
        """Whether there is a result for the same tensors on all ranks, or will be; collective.

        What is found counts as not sent again.
        """
        self._calls += 1
        never = policy.lossy.draws or any(t.is_inference() for t in tensors)
        made = [scaled_of(tensor) for tensor in tensors]
        key = None if never else (op, policy, *map(_name, made))
        entry = None if key is None else self._entries.get(key)
        again = entry is not None and all(
            seen.unchanged(one) for seen, one in zip(entry.seen, made, strict=True)
        )
        if entry is not None and not (again and entry.kept and entry.kept.unchanged()):
            entry.kept, entry.call = None, 0
        if self._all_kept(entry) and entry is not None:
            self.group.counters.avoided_bytes += entry.sent_bytes
            return Use(self, entry, self._calls, entry.kept)
        if key is not None and not again:
            entry = self._entries[key] = self._watched(key, made)
        return Use(self, entry if again else None, self._calls)

    def _all_kept(self, entry: _Entry | None) -> bool:
        """Whether every rank kept its result of one and the same call."""
        call = 0 if entry is None else entry.call
        span = torch.tensor([call, -call])
        least, most = self.group.all_reduce(span, "min").tolist()
        return least > 0 and least == -most

    def _watched(self, key: Any, made: list[Scaled]) -> _Entry:
        """An entry that is dropped when one of the tensors dies."""
        owner = weakref.ref(self)

        def forget(_: Any) -> None:
            constants = owner()
            if constants is not None:
                constants._entries.pop(key, None)

        return _Entry([_Seen(one, forget) for one in made])


def _root(tensor: Tensor) -> Tensor:
    """The tensor that a view is of: it lives as long as the view does, and shares its writes."""
    return tensor if tensor._base is None else tensor._base


def _name(made: Scaled) -> tuple:
    """Names rows among those that live."""
    rows = made.rows
    place = (rows.storage_offset(), tuple(rows.shape), rows.stride())
    return (id(_root(rows)), place, rows.dtype, rows.device, len(made.factors))


def _keep(out: Tensor, mode: str) -> _Result:
    held = out.detach()
    if mode == "mapped":
        try:
            held = to_temporary_file(held)
        except OSError as error:
            warn_of_no_room(error)
    note_scaled(out, held)
    return _Result(held, held._version, out.device)


def warn_of_no_room(error: OSError) -> None:
    """Say that what was to be kept in a file is not there."""
    warnings.warn(f"constant_inputs: no room in a temporary file: {error}", stacklevel=3)


def to_temporary_file(tensor: Tensor) -> Tensor:
    """A copy in a mapped file without a name, which ends with the tensor or the process.

    Raises ``OSError`` when there is no room for it.
    """
    return RowFile(tuple(tensor.shape), tensor.dtype, [tensor.cpu()]).tensor


def _num_holders(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@cache
def _num_holders_of_one() -> int:
    """What is counted when a single tensor holds its memory."""
    return _num_holders(torch.empty(1))
