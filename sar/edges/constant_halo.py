"""Halo rows of a layer's input that stay the same: in files, so that they travel once.

Note [Constant halo]. Where a layer's input travels as it is (Note [Projected on arrival]), both
passes of every epoch would fetch the same rows. What is made of them is learned and cannot be
kept, and the rows themselves are as many as the cut wants, more than a rank's memory is meant for.
Under ``Policy(constant_inputs="mapped")`` each round that lands is written to a file of its own,
and later passes read these, round by round like the stream. When rows are the same, and how ranks
agree on it, is told by Note [Constant rows]; a forward pass writes that is not the first to see
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from sar.config import CONSTANT_INPUTS, Policy
from sar.edges.constant import Use, constants_of, to_temporary_file, warn_of_no_room
from sar.edges.relation import Relation
from sar.stream import Round

Landed = Iterator[tuple[Round, Tensor]]


@dataclass
class _KeptHalo:
    """The halo of each round, in files that nobody writes into any more."""

    rounds: list[Tensor]

    def unchanged(self) -> bool:
        return True


def constant_halo(
    relation: Relation,
    rows: Tensor,
    rounds: Sequence[Round],
    policy: Policy,
    may_keep: bool,
    fetch: Callable[[], Landed],
) -> Landed:
    """What ``fetch()`` gives, or the same from files; collective.

    Args:
        rows: [num_src, width] whose halo it is, as the caller of the layer has them.
        may_keep: whether this pass writes files, if these rows came before.
        fetch: begins to fetch the rounds.
    """
    mode = CONSTANT_INPUTS.index(policy.constant_inputs)
    relation.plan.agree_once("number of the mode of constant_inputs", mode)
    if policy.constant_inputs != "mapped":
        return fetch()
    what = f"halo in {len(rounds)} rounds"
    use = constants_of(relation).use([rows], what, policy, learns=may_keep)
    if isinstance(use.kept, _KeptHalo):
        return zip(rounds, (halo.to(rows.device) for halo in use.kept.rounds), strict=True)
    before, landed = relation.group.counters.sent_bytes, fetch()
    return _writing(landed, use, before) if may_keep and use.again else landed


def _writing(landed: Landed, use: Use, sent_bytes_before: int) -> Landed:
    files = []
    for step, halo in landed:
        try:
            files.append(to_temporary_file(halo))
        except OSError as error:
            warn_of_no_room(error)
            yield step, halo
            break
        yield step, halo
    else:
        use.keep(_KeptHalo(files), sent_bytes_before)
    yield from landed
