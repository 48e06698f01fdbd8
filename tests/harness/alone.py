"""One rank of a large group without the others: peers answer what mirrors what they are told."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sar.comm.group import Done, Group
from sar.comm.meter import Work


class AloneGroup(Group):
    """Every rank does what this one does, turned round the ring to its own place.

    So what comes from the rank d places ahead is what goes to the rank d places behind. Plans,
    relations and passes over them can be built and run at any size by one process.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, "alone", torch.device("cpu"))

    def beside(self) -> AloneGroup:
        return AloneGroup(self.rank, self.size)

    def part(self, members: Sequence[int]) -> AloneGroup:
        return AloneGroup(list(members).index(self.rank), len(members))

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        if op == "sum":
            tensor.mul_(self.size)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone() for _ in range(self.size)]

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        return None

    def _exchange(
        self,
        recv: Tensor,
        send: Tensor,
        recv_counts: list[int],
        send_counts: list[int],
        distances: Sequence[int] = (),
    ) -> Work:
        parts = send.split(send_counts)
        mirror = [(2 * self.rank - peer) % self.size for peer in range(self.size)]
        recv.copy_(torch.cat([parts[peer] for peer in mirror]))
        return Done()
