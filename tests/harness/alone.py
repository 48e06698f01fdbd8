"""One rank of a large group without the others: peers answer what mirrors what they are told."""

from __future__ import annotations

import torch
from torch import Tensor

from sar.comm.group import Done, Group, Work


class AloneGroup(Group):
    """Every peer does what this rank does: asks for as many rows as it is asked for, the same.

    That is how ranks with parts of one size and kind behave, so plans, relations and passes over
    them can be built and run at any size by one process.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, "alone", torch.device("cpu"))

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        if op == "sum":
            tensor.mul_(self.size)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone() for _ in range(self.size)]

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        return None

    def _exchange(
        self, recv: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int]
    ) -> Work:
        if send_counts != recv_counts:  # of one round: other peers, as many rows
            send = send[torch.arange(len(recv)) % max(1, len(send))]
        recv.copy_(send)
        return Done()
