"""Requests of ranks that train to ranks that sample, and the replies; nothing read is executed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.comm import DEFAULT_TIMEOUT, Group
from sar.errors import SarError
from sar.sampling.batch import Drawn, Types
from sar.sampling.buffers import padded
from sar.sampling.exchange import Exchange
from sar.sampling.link_inputs import Links
from sar.sampling.options import LinkOptions, LoaderRequest, NegativeSampling
from sar.sampling.sample import Edges, Sample

_LENGTH = 8  # bytes of the length of a message's head
_EMPTY = torch.empty(0, dtype=torch.uint8)


class Command(Enum):
    """What trainers ask for, in the words of errors; in messages it is its place in this list."""

    END = "end"  # nothing any more
    TICK = "tick"  # nothing: they are there
    BATCH = "next batch"
    NODES = "nodes"
    EDGES = "edges"
    SIZES = "sizes"
    MAKE = "loader"
    BEGIN = "epoch"
    CLOSE = "close"
    LEAVE = "leave"


_COMMANDS = list(Command)
_NOTHING = (Command.END, Command.TICK)


_CLASSES = {
    one.__name__: one
    for one in (Drawn, Types, Sample, Edges, Links, LinkOptions, NegativeSampling, LoaderRequest)
}


def least(group: Group, seconds: float) -> float:
    """The shortest timeout of all ranks; collective."""
    return float(group.all_reduce(torch.tensor(seconds, dtype=torch.float64), "min"))


class Channel:
    """Servers are the first ranks of a group, trainers the others; all calls are collective.

    All trainers ask for the same at the same time; each is answered by one server, trainer t by
    server t modulo the number of servers. Servers get the requests of all trainers.
    """

    def __init__(self, group: Group, num_servers: int) -> None:
        self.exchange, self.num_servers = Exchange(group, 2), num_servers
        self.num_trainers = group.size - num_servers
        self.exchange.step, self.exchange.num_leaving = -1, self.num_trainers
        self._size = group.size

    def ask(self, command: Command, value: Any = None, limit: float = DEFAULT_TIMEOUT) -> Any:
        """Of a trainer: send a request, and return its server's answer; a tick gets none.

        Asks again while another trainer ticks, which says that it is there. Raises ``SarError``
        when that one has not asked for the same within ``limit`` seconds.
        """
        end, request = time.monotonic() + limit, _EMPTY if value is None else packed(value)
        give = [len(request)] * self.num_servers + [0] * self.num_trainers
        while self._agreed(told := self._tell(give, command)) in _NOTHING:
            if command in _NOTHING:
                return None
            if time.monotonic() > end:
                raise SarError(
                    f"{self._named(told)}, for {limit:g} seconds; expected all trainers to ask "
                    "for the same at the same time"
                )
        none = [0] * self._size
        self.exchange.send(request.repeat(self.num_servers), give, none)
        reply = self.exchange.send(_EMPTY, none, self._tell(none)[:, 1].tolist())
        return unpacked(reply) if len(reply) else None

    def asked(self) -> tuple[Command, list[Any]]:
        """Of a server: the command of all trainers, and the request of each."""
        none = [0] * self._size
        told = self._tell(none)
        command = self._agreed(told)
        if command in _NOTHING:
            return command, []
        sizes = told[:, 1].tolist()
        parts = self.exchange.send(_EMPTY, none, sizes).split(sizes)[self.num_servers :]
        return command, [unpacked(one.clone()) if len(one) else None for one in parts]

    def reply(self, values: dict[int, Any]) -> None:
        """Of a server: answer its trainers, by their numbers; one without a value gets ``None``."""
        messages = [packed(values[t]) if t in values else _EMPTY for t in range(self.num_trainers)]
        give = [0] * self.num_servers + [len(one) for one in messages]
        self._tell(give)
        self.exchange.send(torch.cat(messages), give, [0] * self._size)

    def _tell(self, give: Sequence[int], command: Command = Command.END) -> Tensor:
        """int64 [P, 2]: each rank's command, as its place in the list, and the bytes it sends."""
        number = _COMMANDS.index(command)
        return self.exchange.sizes(torch.tensor([[number, size] for size in give]))

    def _agreed(self, told: Tensor) -> Command:
        """The command of all trainers, a tick while one ticks; ``SarError`` where they differ."""
        commands = {_COMMANDS[c] for c in told[self.num_servers :, 0].tolist()}
        if Command.TICK in commands:
            return Command.TICK
        if len(commands) > 1:
            raise SarError(f"{self._named(told)}; expected all trainers to ask for the same")
        return commands.pop()

    def _named(self, told: Tensor) -> str:
        words = {c: f"asks for {one.value!r}" for c, one in enumerate(_COMMANDS)}
        words[_COMMANDS.index(Command.TICK)] = "for nothing"
        commands = told[self.num_servers :, 0].tolist()
        return ", ".join(f"trainer {t} {words[c]}" for t, c in enumerate(commands))


# ---------------------------------------------------------------- messages


def packed(value: Any) -> Tensor:
    """A message, uint8 [n], of plain data, tensors on the CPU and objects of ``_CLASSES``."""
    tensors: list[Tensor] = []
    head = json.dumps(_skeleton(value, tensors)).encode()
    sizes = [padded(_LENGTH + len(head)), *(padded(one.nbytes) for one in tensors)]
    out, at = torch.zeros(sum(sizes), dtype=torch.uint8), sizes[0]
    out[:_LENGTH] = torch.from_numpy(np.array([len(head)], np.int64).view(np.uint8))
    out[_LENGTH : _LENGTH + len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for one, size in zip(tensors, sizes[1:], strict=True):
        out[at : at + one.nbytes] = one.contiguous().view(-1).view(torch.uint8)
        at += size
    return out


def unpacked(data: Tensor) -> Any:
    """What :func:`packed` was given; tensors are views of ``data``."""
    length = int(data[:_LENGTH].view(torch.int64))
    head = json.loads(bytes(data[_LENGTH : _LENGTH + length].numpy()))
    return _filled(head, data, [padded(_LENGTH + length)])


def _skeleton(value: Any, tensors: list[Tensor]) -> Any:
    """The value as JSON; lists begin with their kind, and tensors are appended to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    name = type(value).__name__
    if _CLASSES.get(name) is type(value):
        names = value._fields if isinstance(value, tuple) else [f.name for f in fields(value)]
        return [name, *(_skeleton(getattr(value, one), tensors) for one in names)]
    if isinstance(value, dict):
        pairs = [[_skeleton(k, tensors), _skeleton(v, tensors)] for k, v in value.items()]
        return ["dict", *pairs]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(_skeleton(one, tensors) for one in value)]
    raise TypeError(f"got {name}, expected tensors and plain data")


def _filled(head: Any, data: Tensor, at: list[int]) -> Any:
    """The value of a skeleton; ``at[0]`` is where its next tensor begins in ``data``."""
    if not isinstance(head, list):
        return head
    kind, *parts = head
    if kind == "tensor":
        return _tensor(parts[0], parts[1], data, at)
    if kind == "dict":
        return {_filled(k, data, at): _filled(v, data, at) for k, v in parts}
    values = [_filled(one, data, at) for one in parts]
    if kind in _CLASSES:
        return _CLASSES[kind](*values)
    return values if kind == "list" else tuple(values)


def _tensor(name: str, shape: list[int], data: Tensor, at: list[int]) -> Tensor:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise SarError(f"a message: got {name!r}, expected the name of a dtype")
    size = math.prod(shape) * dtype.itemsize
    start, at[0] = at[0], at[0] + padded(size)
    if not size:
        return torch.empty(shape, dtype=dtype)
    return data[start : start + size].view(dtype).view(shape)
