"""Sums of constant rows, kept; and halos of constant rows, in files.

What nobody trains is sent once: an epoch of SAGE on 4 ranks sends 210 MB, not 260, in 2.07 seconds
of a processor, not 2.41; one of GAT 442, not 607, with files. Sums of rows that ask for no gradient
are computed by :class:`sar.ops.sums.KeptSums`.

Note [Constant rows]. What a linear reduction makes of rows that nobody trains is the same in every
epoch. Rows are those of an earlier call when they are the same tensor, unwritten since, or equal
number by number, which a digest of 128 bits tells: so the second call with some rows is known
whatever made them, and a product of features and degrees that a layer makes anew counts as well.
Torch counts writes, except those through ``.data`` or through another library that shares the
memory. Nothing is learned without gradients, where hidden rows look like features.

One rank alone cannot know that the rows of the others are the same. So each call with rows that
ask for no gradient begins with an agreement, one all-reduce of two numbers: in which call each
rank's kept result was computed, 0 for none. Only when all name the same call is it used; it was
computed from rows of which every owner now says that they are unchanged. Otherwise all ranks
compute, and none waits for a rank that did not come.

Note [Constant halo]. Where a layer's input travels as it is (Note [Projected on arrival]), both
passes of every epoch would fetch the same rows. What is made of them is learned and cannot be
kept, and the rows themselves are as many as the cut wants, more than a rank's memory is meant for.
Under ``Policy(constant_inputs="mapped")`` each round that lands is written to a file of its own,
and later passes read these, round by round like the stream. Which rows are the same is told as
above; a forward pass writes that is not the first to see them.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sar._private import version_of
from sar.comm import Group
from sar.config import CONSTANT_INPUTS, Policy
from sar.edges.relation import Relation
from sar.partition.column import RowFile
from sar.stream import Round

MOST_KEPT = 8  # results a relation; the one that was not used for longest goes
_MOST_SEEN = 64

_Key = tuple[tuple[str, Policy], tuple, bytes]  # what is computed, kinds of tensors, a digest
Landed = Iterator[tuple[Round, Tensor]]


@dataclass
class _Entry:
    """Rows that came twice.

    Attributes:
        tensors, versions: the rows and how often they had been written; empty once equal rows came
            as other tensors, which are made anew each time.
        memory: of the rows; held, so that no other can have its address.
        kept, call: the result of call number ``call``; 0 is none.
        sent_bytes: what this rank sent for it.
    """

    tensors: Sequence[Tensor]
    versions: list[int]
    memory: list[Tensor]
    kept: list[Tensor] | None = None
    call: int = 0
    sent_bytes: int = 0

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        pairs = zip(self.tensors, tensors, strict=False)
        return len(self.tensors) == len(tensors) and all(a is b for a, b in pairs)

    def unwritten(self) -> bool:
        """Whether nobody has written into the tensors or replaced their memory."""
        places = zip(self.tensors, self.memory, strict=True)
        same = all(a.data_ptr() == b.data_ptr() for a, b in places)
        return same and self.versions == [version_of(tensor) for tensor in self.tensors]


@dataclass
class Use:
    """One call for constant rows; ``kept`` is an earlier call's result, used on all ranks."""

    group: Group
    entry: _Entry | None
    call: int
    kept: list[Tensor] | None = None

    @property
    def again(self) -> bool:
        """Whether the same rows came before, so that what this call gives may be kept."""
        return self.entry is not None

    def keep(self, kept: list[Tensor], sent_bytes_before: int) -> None:
        """Keep this call's result; the bytes sent for it since will not be sent again."""
        if self.entry is not None:
            self.entry.kept, self.entry.call = kept, self.call
            self.entry.sent_bytes = self.group.counters.sent_bytes - sent_bytes_before


class Constants:
    """The results of constant rows that a relation keeps; ``group`` agrees on each use."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._seen: OrderedDict[_Key, None] = OrderedDict()
        self._calls = 0

    def use(self, tensors: list[Tensor], op: str, policy: Policy, learns: bool) -> Use:
        """Look for a result of the same tensors that all ranks have kept; collective. What is found
        counts as bytes not sent."""
        told = self.group.meter.notes
        if told is not None and told.undo is not None:
            told.undo.append(self._put_back())
        self._calls += 1
        entry = None
        if not any(t.is_inference() for t in tensors):
            entry = self._find((op, policy), tensors, learns)
        if self._all_kept(entry) and entry is not None:
            self.group.counters.avoided_bytes += entry.sent_bytes
            return Use(self.group, entry, self._calls, entry.kept)
        return Use(self.group, entry, self._calls)

    def _put_back(self) -> Callable[[], None]:
        """A function that undoes what is learned from now on."""
        entries = OrderedDict((key, replace(entry)) for key, entry in self._entries.items())
        seen, calls = OrderedDict(self._seen), self._calls

        def put_back() -> None:
            self._entries, self._seen, self._calls = entries, seen, calls

        return put_back

    def _all_kept(self, entry: _Entry | None) -> bool:
        """Whether every rank kept its result of one and the same call."""
        call = 0 if entry is None else entry.call
        span = torch.tensor([call, -call])
        least, most = self.group.all_reduce(span, "min").tolist()
        return least > 0 and least == -most

    def _find(self, what: tuple[str, Policy], tensors: list[Tensor], learns: bool) -> _Entry | None:
        """The entry of rows that came before."""
        kinds = tuple((tuple(t.shape), t.dtype, t.device) for t in tensors)
        for key, entry in list(self._entries.items()):
            if key[:2] == (what, kinds) and entry.holds(tensors):
                if entry.unwritten():
                    self._entries.move_to_end(key)
                    return entry
                del self._entries[key]  # nobody has these rows any more
        if not learns:
            return None
        key = (what, kinds, b"".join(map(_digest, tensors)))
        if key in self._entries:
            self._entries.move_to_end(key)
            self._entries[key].tensors = self._entries[key].memory = []
        elif key in self._seen:
            del self._seen[key]
            versions = [version_of(tensor) for tensor in tensors]
            self._entries[key] = _Entry(tensors, versions, [t.detach() for t in tensors])
            if len(self._entries) > MOST_KEPT:
                self._entries.popitem(last=False)
        else:
            self._seen[key] = None
            if len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
        return self._entries.get(key)


def constants_of(relation: Relation) -> Constants:
    return relation.derived(Constants, lambda: Constants(relation.group))


def _digest(tensor: Tensor) -> bytes:
    numbers = tensor.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.blake2b(numbers.numpy().data, digest_size=16).digest()


def held(tensor: Tensor, policy: Policy) -> Tensor:
    """A copy of the tensor, in a temporary file where ``policy`` maps constants, else in memory."""
    if policy.constant_inputs == "mapped":
        try:
            return to_temporary_file(tensor)
        except OSError as error:
            _warn_of_no_room(error)
    return tensor.clone()


def _warn_of_no_room(error: OSError) -> None:
    warnings.warn(f"constant_inputs: no room in a temporary file: {error}", stacklevel=3)


def to_temporary_file(tensor: Tensor) -> Tensor:
    """A copy in a mapped file without a name, which ends with the tensor or the process. Raises
    ``OSError`` when there is no room for it."""
    return RowFile(tuple(tensor.shape), tensor.dtype, [tensor.cpu()]).tensor


def constant_halo(
    relation: Relation,
    rows: Tensor,
    rounds: Sequence[Round],
    policy: Policy,
    may_keep: bool,
    fetch: Callable[[], Landed],
) -> Landed:
    """The rounds of ``fetch()``, or the same from files; collective.

    ``rows`` [num_src, width] are those whose halo it is, as the caller of the layer has them. With
    ``may_keep`` this pass writes files, if these rows came before.
    """
    mode = CONSTANT_INPUTS.index(policy.constant_inputs)
    relation.plan.agree_once("number of the mode of constant_inputs", mode)
    if policy.constant_inputs != "mapped":
        return fetch()
    what = f"halo in {len(rounds)} rounds"
    use = constants_of(relation).use([rows], what, policy, learns=may_keep)
    if use.kept is not None:
        return zip(rounds, (halo.to(rows.device) for halo in use.kept), strict=True)
    before, landed = relation.group.counters.sent_bytes, fetch()
    return _writing(landed, use, before) if may_keep and use.again else landed


def _writing(landed: Landed, use: Use, sent_bytes_before: int) -> Landed:
    files = []
    for step, halo in landed:
        try:
            files.append(to_temporary_file(halo))
        except OSError as error:
            _warn_of_no_room(error)
            yield step, halo
            break
        yield step, halo
    else:
        use.keep(files, sent_bytes_before)
    yield from landed
