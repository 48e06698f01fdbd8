"""One pass over the edges of a relation: the own shard, then one a round with the rows it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

from torch import Tensor

from sar.config import Policy
from sar.kernels import Csc
from sar.stream.messages import RowMessages
from sar.stream.plan import HaloPlan, Round
from sar.stream.rounds import WINDOW, Stream, fetch, fetch_messages


class Shards(Protocol):
    """Edges by destination, a shard for the own rows and one for each round."""

    @property
    def plan(self) -> HaloPlan:
        """Which rows travel."""

    def local(self, *, order: bool) -> Csc:
        """The edges out of owned rows."""

    def shards(self, num_rounds: int, *, order: bool) -> list[Csc]:
        """Those of each round; sources index the rows that come in it."""


@dataclass
class Step:
    """A shard and the rows that its sources index.

    Attributes:
        number: of the step in its pass.
        round: ``None`` for the own shard.
        rows: tensor of the owned rows, or [round.num_recv, width] of the round; overwritten when
            the next step is taken. ``None`` where no rows travel.
    """

    number: int
    round: Round | None
    shard: Csc
    rows: Any


class Pass:
    """The steps of one pass, in the order in which they are to be computed.

    Rounds are on the wire as soon as it is made, so that the own shard, which comes first, is
    computed meanwhile. On one rank it is the same loop with that step alone.

    Args:
        edges: a relation, or what its sums are left to do.
        rows: [num_src, width] owned rows, contiguous; ``None``: nothing travels.
        row_bytes: of a row on the wire, by which rounds are chosen; those of ``rows`` by default.
        order: with the position of each edge among the local ones.
        keep: a list that gets the rows of each round, which stay valid then.
        kept: rows of each round that were kept, in place of fetched ones.
        messages: what the rows travel in, if not as they are.
        local_last: where all rounds are on the wire at once, the own shard waits until one has
            landed, whose send buffer makes room for the result.
    """

    def __init__(
        self,
        edges: Shards,
        policy: Policy,
        rows: Tensor | None,
        *,
        row_bytes: int | None = None,
        order: bool = False,
        keep: list[Tensor] | None = None,
        kept: Sequence[Tensor] = (),
        messages: RowMessages | None = None,
        window: int = WINDOW,
        local_last: bool = False,
    ) -> None:
        if row_bytes is None:
            row_bytes = 0 if rows is None else rows.shape[1] * rows.element_size()
        self._edges, self._rows, self._order = edges, rows, order
        self._keep, self._kept = keep, kept
        self.num_rounds = edges.plan.num_rounds(policy, row_bytes)
        self.rounds = edges.plan.rounds(self.num_rounds)
        self._local_last = local_last and 0 < len(self.rounds) <= window
        self._stream: Stream | None = None
        if messages is not None:
            self._stream = fetch_messages(messages, self.rounds, window)
        elif rows is not None and not kept:
            keeps = keep is not None
            self._stream = fetch(edges.plan, rows, self.rounds, keeps, policy.lossy, window)

    def __iter__(self) -> Iterator[Step]:
        steps = self._remote()
        first = [next(steps)] if self._local_last else []
        if first:
            self._edges.plan.group.pool.clear()
        yield Step(0, None, self._edges.local(order=self._order), self._rows)
        yield from first
        del first
        yield from steps

    def _remote(self) -> Iterator[Step]:
        shards = self._edges.shards(self.num_rounds, order=self._order)
        rounds = zip(self.rounds, shards, self._landed(), strict=True)
        for number, (step, shard, halo) in enumerate(rounds, start=1):
            yield Step(number, step, shard, halo)
            if self._keep is not None and halo is not None:
                self._keep.append(halo)

    def _landed(self) -> Iterator[Tensor | None]:
        if self._stream is not None:
            return (halo for _, halo in self._stream)
        return iter(self._kept) if self._kept else repeat(None, len(self.rounds))
