"""Requests of ranks that train to ranks that sample, and the replies."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from sar.comm import DEFAULT_TIMEOUT, Group
from sar.errors import SarError
from sar.sampling.messages import packed, unpacked
from sar.sampling.swap import Swap

END, TICK, NEXT, NODES, EDGES, SIZES, MAKE, BEGIN, CLOSE, BYE = range(10)
_NAMES = ("end", "tick", "next batch", "nodes", "edges", "sizes", "loader", "epoch",
          "close", "leave")  # fmt: skip


def least(group: Group, seconds: float) -> float:
    """The shortest timeout of all ranks; collective."""
    return float(group.all_reduce(torch.tensor(seconds, dtype=torch.float64), "min"))


class Channel:
    """Servers are the first ranks of a group, trainers the others; all calls are collective.

    All trainers ask for the same at the same time; each is answered by one server, trainer t by
    server t modulo the number of servers. Servers get the requests of all trainers.
    """

    def __init__(self, group: Group, num_servers: int) -> None:
        self.swap, self.num_servers = Swap(group, 2), num_servers
        self.num_trainers = group.size - num_servers
        self.swap.step, self.swap.num_leaving = -1, self.num_trainers
        self._size, self._number = group.size, group.rank - num_servers

    def ask(self, command: int, value: Any = None, limit: float = DEFAULT_TIMEOUT) -> Any:
        """Of a trainer: what its server answers.

        A tick is answered by nothing. Who asks for something else while another trainer ticks asks
        again; a trainer's ticks stand for its being there. Raises ``SarError`` when it has not
        asked for the same within ``limit`` seconds.
        """
        end = time.monotonic() + limit
        while True:
            request = packed(value) if value is not None else torch.empty(0, dtype=torch.uint8)
            mine = torch.tensor([[command, len(request)]]).repeat(self._size, 1)
            mine[self.num_servers :, 1] = 0
            told = self.swap.sizes(mine)
            agreed = self._agreed(told)
            if agreed in (END, TICK):
                if command in (END, TICK):
                    return None
                if time.monotonic() > end:
                    raise SarError(
                        f"{self._named(told)}, for {limit:g} seconds; expected all trainers to ask "
                        "for the same at the same time"
                    )
                continue
            copies = request.repeat(self.num_servers)
            self.swap.send(copies, mine[:, 1].tolist(), [0] * self._size)
            take = self.swap.sizes(torch.zeros(self._size, 2, dtype=torch.int64))[:, 1].tolist()
            reply = self.swap.send(copies[:0], [0] * self._size, take)
            return unpacked(reply) if len(reply) else None

    def asked(self) -> tuple[int, list[Any]]:
        """Of a server: what the trainers ask for, and the request of each."""
        told = self.swap.sizes(torch.zeros(self._size, 2, dtype=torch.int64))
        command = self._agreed(told)
        if command in (END, TICK):
            return command, []
        sizes = told[:, 1].tolist()
        came = self.swap.send(torch.empty(0, dtype=torch.uint8), [0] * self._size, sizes)
        parts = came.split(sizes)[self.num_servers :]
        return command, [unpacked(one.clone()) if len(one) else None for one in parts]

    def reply(self, values: dict[int, Any]) -> None:
        """Of a server: to each of its trainers, by number; none is told nothing."""
        messages = {t + self.num_servers: packed(value) for t, value in values.items()}
        give = [len(messages[p]) if p in messages else 0 for p in range(self._size)]
        told = torch.zeros(self._size, 2, dtype=torch.int64)
        told[:, 1] = torch.tensor(give)
        self.swap.sizes(told)
        joined = torch.cat(
            [torch.empty(0, dtype=torch.uint8), *(messages[p] for p in sorted(messages))]
        )
        self.swap.send(joined, give, [0] * self._size)

    def trainers_of(self, server: int) -> list[int]:
        """The numbers of the trainers that a server answers."""
        return list(range(server, self.num_trainers, self.num_servers))

    def _agreed(self, told: Tensor) -> int:
        """What all trainers ask for; a tick while one of them ticks."""
        commands = told[self.num_servers :, 0].tolist()
        if TICK in commands or len(set(commands)) == 1:
            return TICK if TICK in commands else commands[0]
        raise SarError(f"{self._named(told)}; expected all trainers to ask for the same")

    def _named(self, told: Tensor) -> str:
        """Who asks for what."""
        commands = told[self.num_servers :, 0].tolist()
        words = {c: f"asks for {name!r}" for c, name in enumerate(_NAMES)} | {TICK: "for nothing"}
        return ", ".join(f"trainer {t} {words[c]}" for t, c in enumerate(commands))
