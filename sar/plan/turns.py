"""Bytes, memory and free space of training in turns with a file, from a model to scale.

Bytes are linear in nodes and edges. So a random graph of few nodes trains as the large one would,
in the same turns, with a real file, in memory that is smaller by the same factor: what it reads,
writes and keeps times that factor is what the large one does. What a process has itself does not
grow with the graph, and is measured where there is nearly none. Run in a process of its own
(``python -m sar.plan.turns``), as both are memory.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.comm import Group, TurnGroup
from sar.comm.meter import Work as Exchange
from sar.comm.turns import Between
from sar.files import scratch_folder
from sar.memory.machine import anonymous_bytes
from sar.nn.params import replicated
from sar.plan.graphs import random_graph, written
from sar.plan.probe import Probed, Work, apart, asked
from sar.plan.to_scale import NO_LIMIT, SeenTable, SpillToScale, TooLittle

_NODES, _FEW = 2500, 64  # of a part: pages are the grain; nearly none
_FEWER, _CLOSE, _MARGIN = 16, 1.1, 1.15  # of all, to seek the least; how close; told beyond it
_HEAP = 24 << 20  # that a run had of small tensors and free chunks, at the most, of 8 parts
_EPOCHS = 3  # constant sums are kept from the second on


@dataclass(frozen=True)
class Turns:
    """Training out of core in one process.

    Attributes:
        memory: bytes that it may take.
        peak_bytes: of memory that no file backs, at the most.
        read_bytes, written_bytes: an epoch, from the third on, evaluation left out.
        file_bytes: free space that the file takes.
        blocks: (columns, blocks in which they are published) of each sum of an epoch.
        sends: whether ranks exchange rows; then bytes are those of a random cut.
    """

    memory: int
    peak_bytes: int
    read_bytes: int
    written_bytes: int
    file_bytes: int
    blocks: list[tuple[int, int]]
    sends: bool


def predict_turns(
    work: Work, parts: int, nodes: int, edges: int, folder: Path,
    memory: int | None = None, *, only: bool = False, threads: int = 1,
) -> list[Turns]:  # fmt: skip
    """Training a graph of ``parts`` even parts within the least memory, with all in memory, and,
    where that is not less than the least, within ``memory`` bytes; with ``only`` within these, or
    the least where that is more. ``folder`` is on a disk, made if need be; nothing stays there.

    Takes some seconds, and more where kernels are compiled. Raises ``SarError`` if it fails.
    """
    more = {"size": [parts, nodes, edges], "folder": str(folder), "memory": memory, "only": only}
    found = apart("sar.plan.turns", work, threads, **more)
    return [Turns(**one | {"blocks": [*map(tuple, one["blocks"])]}) for one in found["settings"]]


class _Rank(Probed):
    """A model on a part; what changes its parameters does not grow with the graph, but for those
    that ranks own, a row for each node."""

    def __init__(self, work: Work, path: str, group: Group, spill: SpillToScale) -> None:
        super().__init__(work, path, group)
        self._rank, self._spill = group.rank, spill

    def update(self) -> None:
        parameters = {one.nbytes for one in self.model.parameters()}
        with self._spill.leaving_out(self._rank, parameters):
            super().update()


class _Group(TurnGroup):
    """Knows whether it exchanged rows."""

    sends = False

    def exchange(self, recv: Tensor, send: Tensor, *counts: Any) -> Exchange:
        self.sends = True
        return super().exchange(recv, send, *counts)


class _Epoch(NamedTuple):
    """Bytes read and written, blocks of columns, and whether rows were sent."""

    moved: list[int]
    blocks: list[tuple[int, int]]
    sends: bool


class _Ends:
    """What the process has at the ends of turns. A :class:`sar.comm.turns.Between`."""

    def __init__(self) -> None:
        self.bytes = list[int]()

    def begin(self, rank: int, following: Sequence[int]) -> None: ...

    def end(self, rank: int) -> None:
        self.bytes.append(anonymous_bytes())


class Model:
    """A model to scale of training a graph of so many nodes and edges in even parts.

    Args:
        folder: on a disk, made if need be. scratch: for the model's graphs.

    Attributes:
        process: bytes of the process that do not grow with the graph.
        scale: how many times smaller the model is.
    """

    def __init__(
        self, work: Work, parts: int, nodes: int, edges: int, folder: Path, scratch: Path
    ) -> None:
        self._work, self._parts, self._folder, self._fixed = work, parts, folder, set[int]()
        self.scale = max(1.0, nodes / parts / _NODES)

        def graph(number: int) -> str:
            return written(random_graph(work.graph, number, edges / nodes), scratch, parts)

        ends = _Ends()
        with SpillToScale(folder, NO_LIMIT, 1, set()) as spill:
            self._train(graph(min(nodes, _FEW * parts)), spill, [ends])
        self.process = round(median(ends.bytes[len(ends.bytes) // 2 :]))  # all is compiled
        self._path = graph(round(nodes / self.scale))

    def within(self, memory: int) -> Turns | None:
        """Within ``memory`` bytes; ``None`` where that is too little."""
        try:
            return self.trained(memory)
        except TooLittle:
            return None

    def least(self, most: Turns) -> Turns:
        """Within about as little memory as will do; ``most`` has all in memory."""
        high = most.peak_bytes - self.process
        low, found = high // _FEWER, most
        while high > max(1, low) * _CLOSE:
            middle = math.isqrt(low * high)
            one = self.within(self.process + middle)
            low, high, found = (low, middle, one) if one else (middle, high, found)
        found = self.within(self.process + round(high * _MARGIN)) or found
        memory, peak = found.memory + _HEAP, found.peak_bytes + _HEAP
        return replace(found, memory=memory, peak_bytes=peak)

    def trained(self, memory: int) -> Turns:
        """Within ``memory`` bytes; raises ``TooLittle``."""
        gc.collect()
        room = max(0, round((memory - self.process) / self.scale))
        with SpillToScale(self._folder, room, self.scale, self._fixed) as spill:
            found = self._train(self._path, spill)
            size = spill.size
        sizes = spill.peak, *found.moved, size
        peak, read, wrote, size = (round(self.scale * one) for one in sizes)
        return Turns(memory, self.process + peak, read, wrote, size, found.blocks, found.sends)

    def _train(self, path: str, spill: SpillToScale, between: Sequence[Between] = ()) -> _Epoch:
        """The last epoch."""
        marks, blocks = list[tuple[int, int]](), list[tuple[int, int]]()

        def rank(group: Any) -> bool:
            spill.shared = group.shared
            group.table = SeenTable(group, spill, [] if group.rank else blocks)
            with spill.following(group):
                run = _Rank(self._work, path, group, spill)
                self._fixed.update(one.nbytes for one in replicated(run.model).values())
                for _ in range(_EPOCHS):
                    group.sends = False
                    if group.rank == 0:
                        blocks.clear()
                        marks.append((spill.read_bytes, spill.written_bytes))
                    run.step()
            if group.rank == 0:
                marks.append((spill.read_bytes, spill.written_bytes))
            return bool(group.sends)

        sends = any(_Group.run(self._parts, rank, between=[spill, *between]))
        moved = [after - before for before, after in zip(*marks[-2:], strict=True)]
        return _Epoch(moved, blocks, sends)


def _found(model: Model, memory: int | None, only: bool) -> list[Turns]:
    given = [one for one in [None if memory is None else model.within(memory)] if one]
    if only and given:
        return given
    most = model.trained(NO_LIMIT)
    least = model.least(most)
    return [least] if only else [least, replace(most, memory=most.peak_bytes), *given]


if __name__ == "__main__":
    request = asked()
    torch.set_num_threads(request["threads"])
    with scratch_folder() as scratch:
        parts, nodes, edges = request["size"]
        folder = Path(request["folder"])
        model = Model(request["work"], parts, nodes, edges, folder, scratch)
        settings = [asdict(one) for one in _found(model, request["memory"], request["only"])]
    sys.stdout.write(f"\n{json.dumps({'settings': settings})}\n")
