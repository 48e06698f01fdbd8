"""Requests for rows to their owners, and the answers, with a status word beside all sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sar.comm import Group
from sar.errors import CommError, SarError
from sar.kernels.sampling import split
from sar.partition.book import EType, PartitionBook

Kind = str | EType  # a node type, or a relation
_FINE, _FAILED, _STOPS = range(3)
_NOTHING = torch.empty(1, 0, dtype=torch.int64)
_TOGETHER = "expected every rank to go through its loader at the same time and as far"


def id_bounds(book: PartitionBook, kind: Kind) -> Tensor:
    """int64 [P + 1] where each part's ids of a node type or relation begin, part after part: part p
    owns those from ``bounds[p]`` to ``bounds[p + 1]``, of edges by their destination."""
    ranges = book.node_ranges[kind] if isinstance(kind, str) else book.edge_ranges[kind]
    counts = torch.as_tensor(ranges[:, 1] - ranges[:, 0])
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


class Stopped(SarError):
    """Some of ``size`` ranks left the loader; ``is_misled``: the others would have gone on."""

    def __init__(self, ranks: list[int], size: int, step: int, names: Sequence[str] = ()) -> None:
        self.is_misled = len(ranks) < size
        named = ", ".join(names[rank] if names else str(rank) for rank in ranks)
        named = named if names else f"rank {named}"
        where = f" before step {step}" if step >= 0 else ""
        super().__init__(f"{named} left the loader{where}; {_TOGETHER}")


class Exchange:
    """Ranks ask each other for rows of known sizes; all calls are collective.

    A status word and the step travel with the sizes of every request, so that an error on one rank
    is raised on all, and ranks that are not at the same step are told. Every request has room for
    ``width`` sizes, since ranks that fail or stop do not know what the others ask for.

    Attributes:
        step: of this rank; the others have to be at the same. Below 0: none that means anything.
        is_over: whether no epoch has begun, or all have come to its end, to an error or to a stop.
        num_leaving: how many ranks stop where a loop is left.
    """

    def __init__(self, group: Group, width: int) -> None:
        self.group, self.width = group, width
        self.step, self.is_over, self.num_leaving = 0, True, group.size
        self._left = _TOGETHER  # what may be why the others do not come

    def sizes(self, mine: Tensor, status: int = _FINE, error: Exception | None = None) -> Tensor:
        """int64 [P, S] the sizes that each rank tells this one, for those this one tells each."""
        group, ones = self.group, [1] * self.group.size
        told = torch.zeros(group.size, 2 + self.width, dtype=torch.int64)
        told[:, 0], told[:, 1] = status, self.step
        told[:, 2 : 2 + mine.shape[1]] = mine
        with self._where():
            came = group.all_to_all(told, ones, ones)
        heads = came[:, :2].tolist()
        if any(head != [_FINE, self.step] for head in heads):
            self.is_over = True
            self._raise(heads, error)
        self._left = _TOGETHER
        return came[:, 2 : 2 + mine.shape[1]]

    def counts(self, count: int) -> Tensor:
        """int64 [P] the ``count`` of each rank."""
        return self.sizes(torch.full((self.group.size, 1), count)).view(-1)

    def fail(self, error: Exception) -> None:
        """Raise ``error`` on every rank, in place of what they expect next."""
        self.sizes(_NOTHING, _FAILED, error)

    def stop(self) -> None:
        """Raise :class:`Stopped` on every rank, in place of what they expect next."""
        self.sizes(_NOTHING, _STOPS)

    def meet(self) -> None:
        """Return when all ranks have come here; raises what another rank failed with."""
        self.sizes(_NOTHING)

    @contextmanager
    def _where(self) -> Iterator[None]:
        """Add to the error of a collective that fails within an epoch what may be why."""
        try:
            yield
        except CommError as lost:
            if self.is_over:
                raise
            raise CommError(f"{lost}, in a loop over batches; {self._left}") from lost

    def _raise(self, heads: list[list[int]], error: Exception | None) -> None:
        """Raise the error that the ranks' status words and steps stand for."""
        states = [state for state, _ in heads]
        if _FAILED in states:
            self.group.agree(error, "sampling")
        if _STOPS in states:
            ranks = [p for p, state in enumerate(states) if state == _STOPS]
            stopped = Stopped(ranks, self.num_leaving, self.step, self.group.names)
            self._left = str(stopped) if stopped.is_misled else _TOGETHER
            raise stopped
        steps = [step for _, step in heads]
        raise SarError(f"ranks are at steps {steps} of their loaders; {_TOGETHER}")

    def send(
        self, rows: Tensor, give: Sequence[int], take: Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        """Send rows to all ranks, and return what they send here, both rank after rank.

        With ``out``, of large messages, none to this rank itself, they go distance by distance.
        """
        distances = () if out is None else range(1, self.group.size)
        out = rows.new_empty((sum(take), *rows.shape[1:])) if out is None else out
        with self._where():
            self.group.exchange(out, rows, list(take), list(give), distances).wait()
        return out

    def deliver(self, rows: Tensor, give: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Send ``give[p]`` rows to each rank p; what comes, rank after rank, and how many each."""
        take = self.sizes(torch.tensor(give).view(-1, 1)).view(-1).tolist()
        return self.send(rows, give, take), take

    def questions(self, parts: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
        """Exchange requests: give ``parts``, by question, then owner, and get what other ranks ask
        for, by rank, then question; own ones are not sent."""
        rank, size = self.group.rank, self.group.size
        wanted = torch.tensor([[len(rows) for rows in one[:size]] for one in parts])
        wanted = wanted.long().view(len(parts), size).T.contiguous()
        wanted[rank] = 0
        asked = self.sizes(wanted)
        none = parts[0][0][:0] if parts else torch.empty(0, dtype=torch.int32)
        rows = torch.cat([none, *(one[p] for p in range(size) if p != rank for one in parts)])
        by_rank, take = asked.tolist(), asked.sum(1).tolist()
        came = self.send(rows, wanted.sum(1).tolist(), take).split(take)
        return [rows.split(sizes) for rows, sizes in zip(came, by_rank, strict=True)]

    def share(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, rank after rank, on every rank."""
        size = self.group.size
        return self.deliver(rows.repeat(size, *[1] * (rows.dim() - 1)), [len(rows)] * size)[0]

    def ask(
        self,
        ids: Tensor,
        bounds: Tensor,
        answer: Callable[[Tensor], Tensor],
        beside: Tensor | None = None,
    ) -> Tensor:
        """int64 [m]: the answers of owners to ids, int64 [m], which ``bounds`` deals as ``split``.

        ``answer`` makes int64 [k] of int64 [k, 2], each a row of this rank and what was beside.
        """
        order, rows, sizes = split(ids, bounds)
        at = order.long()
        more = torch.zeros_like(ids) if beside is None else beside
        asked, counts = self.deliver(torch.stack([rows.long(), more[at]], dim=1), sizes)
        return torch.empty_like(ids).index_copy_(0, at, self.send(answer(asked), counts, sizes))

    def look_up(self, ids: Tensor, bounds: Tensor, table: Tensor) -> Tensor:
        """int64 [m]: what the owners' tables, integers [k], have at ids, int64 [m]."""
        return self.ask(ids, bounds, lambda asked: table[asked[:, 0]].long())
