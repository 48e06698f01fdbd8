"""The halo plan: which rows of a source tensor travel between which pairs of ranks, in rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sar.comm import Group, exchange_counts
from sar.config import Policy
from sar.errors import CommError

LARGE = 1 << 17  # bytes of a message that is worth a step of its own


@dataclass(frozen=True)
class Round:
    """One step of the stream: the peers whose halo is resident together.

    All rounds of a plan together hold a few numbers per rank; a list as long as the group is made
    when an exchange needs it (:func:`sar.stream.passes.by_rank`).

    Attributes:
        sources, targets: peers this rank receives from and sends to, ascending.
        recv_rows, send_rows: rows that come from each source and go to each target.
        distances: of the round; rank r receives from rank r + d.
        most: rows that travel either way in the largest round of the pass.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    recv_rows: tuple[int, ...]
    send_rows: tuple[int, ...]
    num_ranks: int
    distances: range
    most: int = 0

    @cached_property
    def num_recv(self) -> int:
        return sum(self.recv_rows)

    @cached_property
    def num_send(self) -> int:
        return sum(self.send_rows)


Combine = Callable[[Tensor, Tensor, Tensor], None]  # of owned rows, which of them, what came home


class HaloPlan:
    """Rows that this rank sends to and receives from each other rank, agreed once.

    Args:
        num_rows: rows of the local source tensor.
        send_idx: per peer the local rows it needs, int32, ascending by the peer's own order;
            ``None`` when it needs every row in order (an identity is not stored).
        send_counts: rows that go to each peer, where a subclass sends more than ``send_idx``.

    Attributes:
        recv_pulled: how many of the rows from each peer are source rows as they are; they come
            before all others. All of them, but for a subclass.
        wanted: what the ranks have agreed about gradients, see :func:`agree_on_gradients`.
        large_row_bytes: the width from which pairs exchange much, going by the busiest rank; the
            same on all ranks.
    """

    def __init__(
        self,
        group: Group,
        num_rows: int,
        send_idx: list[Tensor | None],
        recv_counts: list[int],
        send_counts: list[int] | None = None,
    ) -> None:
        self.group, self.num_rows = group, num_rows
        self.send_idx, self.recv_counts = send_idx, recv_counts
        self.send_counts = send_counts or [num_rows if i is None else len(i) for i in send_idx]
        self.send_counts[group.rank] = self.recv_counts[group.rank] = 0
        self.recv_pulled = self.recv_counts
        self.rows_in_flight = self._agree_rows_in_flight()
        self.large_row_bytes = 2 * (group.size - 1) * LARGE / max(1, int(self.rows_in_flight[0]))
        self.wanted: set[tuple] = set()
        self._agreed: set[tuple[str, tuple[int, ...]]] = set()
        self._chosen: dict[tuple[Policy, int], int] = {}
        self._steps: dict[int, tuple[Round, ...]] = {}
        self.device = torch.device("cpu")

    def rows_for(self, peer: int) -> Tensor:
        """The local rows, int32, that ``peer`` gets as they are, in the order they are sent."""
        idx = self.send_idx[peer]
        if idx is None:
            return torch.arange(self.send_counts[peer], dtype=torch.int32, device=self.device)
        return idx

    def gather(self, peer: int, rows: Sequence[Tensor], start: int, out: Tensor) -> None:
        """Fill ``out`` [n, width] with n of the rows that ``peer`` gets, from row ``start`` on; the
        columns of the tensors ``rows`` [num_rows, *] stand side by side."""
        idx, span = self.send_idx[peer], slice(start, start + len(out))
        if len(rows) == 1 and idx is not None:
            torch.index_select(rows[0], 0, idx[span], out=out)
            return
        for part, columns in zip(rows, out.split([p.shape[1] for p in rows], dim=1), strict=True):
            if idx is None:
                columns.copy_(part[span])
            else:
                torch.index_select(part, 0, idx[span], out=columns)

    def gather_round(self, step: Round, rows: Sequence[Tensor], out: Tensor) -> None:
        """:meth:`gather` for all targets of a round; ``out`` [step.num_send, width]."""
        parts = out.split(list(step.send_rows))
        for peer, part in zip(step.targets, parts, strict=True):
            self.gather(peer, rows, 0, part)

    def scatter_round(self, step: Round, home: Tensor, grads: Tensor, combine: Combine) -> None:
        """``combine`` the gradients ``grads`` that targets sent into ``home`` [num_rows, width]."""
        parts = grads.split(list(step.send_rows))
        for peer, part in zip(step.targets, parts, strict=True):
            combine(home, self.rows_for(peer), part.to(home.dtype))

    def num_rounds(self, policy: Policy, row_bytes: int) -> int:
        """Rounds that ``policy`` asks for at this row width; the same on all ranks.

        Collective when a combination of width and rounds comes for the first time. Then raises
        ``ValueError`` on every rank when ranks differ in it; and whenever even strict rounds exceed
        the policy's memory budget.
        """
        known = self._chosen.get((policy, row_bytes))
        if known is not None:
            return known
        rounds = self.fitting_rounds(policy, row_bytes)
        what = "(bytes per row, rounds, whether backward fetches again)"
        self.agree_once(what, row_bytes, rounds, int(policy.rematerialize))
        if not rounds:
            least = int(self.rows_in_flight.min()) * row_bytes
            raise ValueError(
                f"memory_budget: got {policy.memory_budget} bytes, but rows of {row_bytes} bytes "
                f"need at least {least} bytes of buffers with {max(1, self.group.size - 1)} rounds"
            )
        self._chosen[policy, row_bytes] = rounds
        return rounds

    def agree_once(self, what: str, *values: int) -> None:
        """Raise ``ValueError`` on every rank when ranks differ in ``values``; collective at first.

        Rows of unequal widths would be cut at the wrong places, or end the process. Later calls
        cost nothing, so a rank that changes alone to values that it has agreed upon before is not
        noticed here: the others end by the group's timeout.
        """
        if (what, values) in self._agreed:
            return
        found = [tuple(row.tolist()) for row in self.group.all_gather(torch.tensor(values))]
        if len(set(found)) > 1:
            raise ValueError(
                f"features or policy: ranks differ; {what} of ranks 0, 1, .. are "
                f"{found[:16]}, expected one shape, dtype and policy on all"
            )
        self._agreed.add((what, values))

    def fitting_rounds(self, policy: Policy, row_bytes: int) -> int:
        """As :meth:`num_rounds`, without asking others; 0 where none fit into the budget."""
        strict = max(1, self.group.size - 1)
        if policy.memory_budget is None:
            return min(policy.rounds or strict, strict)
        fitting = np.flatnonzero(self.rows_in_flight * row_bytes <= policy.memory_budget)
        return int(fitting[0]) + 1 if len(fitting) else 0

    def to(self, device: torch.device) -> HaloPlan:
        """The same plan with its indices on ``device``; no communication."""
        moved = copy(self)
        moved.send_idx = [None if idx is None else idx.to(device) for idx in self.send_idx]
        moved._steps = {}
        moved.device = device
        return moved

    def paced(self, step: Round, row_bytes: int) -> range:
        """The distances that rows of a round travel one after another; none where all travel at
        once: few rows, in one round. The same on all ranks."""
        is_part = len(step.distances) < self.group.size - 1
        return step.distances if is_part or row_bytes >= self.large_row_bytes else range(0)

    def rounds(self, num_rounds: int) -> tuple[Round, ...]:
        """Peers at distance 1 .. P-1, cut into ``num_rounds`` runs of distances; kept."""
        if num_rounds not in self._steps:  # a functools.cache would refer back to the plan
            self._steps[num_rounds] = self._rounds(num_rounds)
        return self._steps[num_rounds]

    def _rounds(self, num_rounds: int) -> tuple[Round, ...]:
        rank, size = self.group.rank, self.group.size
        rounds = []
        for start, stop in pairwise(_round_starts(size, num_rounds).tolist()):
            sources = tuple(sorted((rank + step) % size for step in range(start, stop)))
            targets = tuple(sorted((rank - step) % size for step in range(start, stop)))
            recv_rows = tuple(self.recv_counts[peer] for peer in sources)
            send_rows = tuple(self.send_counts[peer] for peer in targets)
            distances = range(start, stop)
            rounds.append(Round(sources, targets, recv_rows, send_rows, size, distances))
        most = max((max(step.num_recv, step.num_send) for step in rounds), default=0)
        return tuple(replace(step, most=most) for step in rounds)

    def _agree_rows_in_flight(self) -> np.ndarray:
        """Rows in flight, [P-1], on the busiest rank, for 1, 2, .. P-1 rounds (two at a time)."""
        rank, size = self.group.rank, self.group.size
        steps = np.arange(1, size)
        received = np.asarray(self.recv_counts, dtype=np.int64)[(rank + steps) % size]
        sent = np.asarray(self.send_counts, dtype=np.int64)[(rank - steps) % size]
        upto = np.concatenate([[0], np.cumsum(received + sent)])
        table = np.zeros(max(1, size - 1), dtype=np.int64)
        for num_rounds in range(1, size):
            rows = np.diff(upto[_round_starts(size, num_rounds) - 1])
            pairs = rows[:-1] + rows[1:] if num_rounds > 1 else rows
            table[num_rounds - 1] = pairs.max()
        return self.group.all_reduce(torch.from_numpy(table), "max").numpy()


def _round_starts(size: int, num_rounds: int) -> np.ndarray:
    """Bounds of runs of the distances 1 .. size-1, one per round, of nearly equal length."""
    if size == 1:
        return np.ones(1, dtype=np.int64)
    return 1 + (size - 1) * np.arange(num_rounds + 1) // num_rounds


def build_halo_plan(
    group: Group, wanted: Sequence[Tensor], num_rows: int, position: Tensor | None = None
) -> HaloPlan:
    """Tell every owner which of its rows this rank needs; collective.

    Args:
        wanted: per rank the ascending unique rows needed, in the owner's numbering, integer.
        position: int tensor that maps the owner's numbering to rows of its source tensor, -1 where
            a row is not part of it; ``None`` when they are the same.

    Raises ``CommError`` on every rank, when a rank asks for a row that its owner does not have.
    """
    recv_counts = [0 if p == group.rank else len(rows) for p, rows in enumerate(wanted)]
    send_counts = exchange_counts(group, recv_counts)
    asked = [
        rows[:0].int() if p == group.rank else rows.int().cpu() for p, rows in enumerate(wanted)
    ]
    requests = group.all_to_all(torch.cat(asked), recv_counts, send_counts)
    requests, error = _to_rows(requests, num_rows, position)
    group.agree(error, "halo plan")
    send_idx = [_identity_to_none(idx, num_rows) for idx in requests.split(send_counts)]
    return HaloPlan(group, num_rows, send_idx, recv_counts)


def join_plans(plans: Sequence[HaloPlan]) -> tuple[HaloPlan, list[list[Tensor]]]:
    """Join plans of one source tensor: a row that any of them sends is sent once; collective.

    Returns the joint plan, and per plan and peer where (int32) the rows that the plan receives from
    the peer lie among those that the joint plan receives from it.
    """
    group, num_rows, device = plans[0].group, plans[0].num_rows, plans[0].device
    unions, told = [], []
    for peer in range(group.size):
        rows = torch.cat([plan.rows_for(peer) for plan in plans])
        union, place = torch.unique(rows, return_inverse=True)
        unions.append(union)
        told.append(place.int())
    send_counts = [len(places) for places in told]
    recv_counts = [sum(plan.recv_counts[peer] for plan in plans) for peer in range(group.size)]
    heard = group.all_to_all(torch.cat(told), send_counts, recv_counts)
    joint_counts = exchange_counts(group, [len(union) for union in unions])
    send_idx = [_identity_to_none(union, num_rows) for union in unions]
    by_peer = [
        part.split([plan.recv_counts[peer] for plan in plans])
        for peer, part in enumerate(heard.split(recv_counts))
    ]
    places = [[parts[number] for parts in by_peer] for number in range(len(plans))]
    return HaloPlan(group, num_rows, send_idx, joint_counts).to(device), places


def _to_rows(
    requests: Tensor, num_rows: int, position: Tensor | None
) -> tuple[Tensor, Exception | None]:
    limit = num_rows if position is None else len(position)
    if len(requests) and (requests.min() < 0 or requests.max() >= limit):
        return requests, CommError(f"a peer asked for a row outside [0, {limit})")
    if position is not None:
        requests = position.index_select(0, requests).int()
        if len(requests) and requests.min() < 0:
            return requests, CommError("a peer asked for a row that is not an input of this block")
    return requests, None


def _identity_to_none(idx: Tensor, num_rows: int) -> Tensor | None:
    if len(idx) == num_rows and torch.equal(idx, torch.arange(num_rows).to(idx)):
        return None
    return idx.clone()


def agree_on_gradients(
    plan: HaloPlan, tensors: Sequence[tuple[str, Tensor]], num_sent: int, fetches: bool = True
) -> None:
    """Raise ``ValueError`` on every rank where only some want a gradient that takes all ranks.

    A rank that wants none has no backward pass, and the others would wait for it; and rows that
    nobody trains take another way (:mod:`sar.edges.constant`). Collective when a combination of
    shapes and wishes comes for the first time, so that later calls cost nothing; a rank that
    changes its wishes alone to what has been seen before is not noticed.

    Args:
        tensors: what a pass reads, with names for the error; as many on all ranks.
        num_sent: how many of them, the first ones, have gradients that travel. Of all together
            it matters whether any is wanted.
        fetches: whether backward fetches rows again, where that follows from the wishes.
    """
    if plan.group.size == 1 or not torch.is_grad_enabled():  # a view asks without gradients, too
        return
    wants = [tensor.requires_grad for _, tensor in tensors]
    vital = (any(wants), fetches, *wants[:num_sent])
    key = (vital, *[tuple(tensor.shape[1:]) for _, tensor in tensors])
    if key in plan.wanted:
        return
    numbers = torch.tensor([_number(vital), _number(wants)])
    found = [(int(a), int(b)) for a, b in plan.group.all_gather(numbers)]
    if len({code for code, _ in found}) > 1:
        raise ValueError(_difference([name for name, _ in tensors], [code for _, code in found]))
    plan.wanted.add(key)


def _number(bits: Sequence[bool]) -> int:
    return sum(1 << place for place, bit in enumerate(bits[:62]) if bit)


def _difference(names: list[str], codes: list[int]) -> str:
    parts = []
    for place, name in enumerate(names[:62]):
        asking = [rank for rank, code in enumerate(codes) if code >> place & 1]
        if 0 < len(asking) < len(codes):
            parts.append(f"{name} requires a gradient on ranks {asking[:16]} of {len(codes)} only")
    return f"{'; '.join(dict.fromkeys(parts)) or 'inputs'}: expected the same on all ranks"
