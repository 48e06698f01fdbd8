"""What ranks in turns keep from one turn to the next: in memory while there is room, else in a
file.

Operators are followed below autograd, so whatever makes or reads a tensor is seen: layers, what
autograd saved, optimizers, variables of a model's forward. Who is not seen is served all the same,
see :mod:`sar.memory.blocks`.
"""

from __future__ import annotations

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from sar._private import prepare_optimizers, product_buffers_freed, storage_id, watched
from sar.comm import Group
from sar.comm.environment import memory_left
from sar.comm.meter import Meter
from sar.errors import SarError
from sar.kernels.jit import reading
from sar.memory.blocks import (
    Block,
    Others,
    SpillFile,
    Staged,
    drop_read,
    extent,
    is_mapped,
    is_plain,
    map_buffers_from,
    move_out_of_heap,
    tensors_in,
)
from sar.memory.machine import anonymous_bytes, folder_of_a_run, mind_forks

LEAST_BYTES = 1 << 18  # smaller tensors stay
_NOBODY = -1  # in place of a rank
_MOST_AHEAD = 4  # a part of what there is, for what the next rank will need
_OFTEN = 64  # operators
_NO_LIMIT = 1 << 50


class Spill:
    """Keeps a process of ranks in turns within ``memory``, with a file in ``directory``.

    A :class:`sar.comm.turns.Between` and a ``TableMemory``, and a context that has the file. Blocks
    leave in the order in which they are needed again, the latest first: those of the ranks that had
    their turn in this pass, then of those to come, then the rank's own that it has not used for
    longest, and the table at the very last: what an operator once had decides how large it may be.

    Args:
        directory: a folder on a disk, made if need be.
        memory: bytes that no file backs, of the whole process; by default half of what is free now.

    Attributes:
        read_bytes, written_bytes: of the file, so far.
        kept: bytes that lived at the end of a turn, of all ranks, by the layer and the operator
            that made them, when they were most.

    Raises:
        ValueError: the folder is in memory. SarError: another run has it, no right to write there,
            no room, too little memory. NotSupportedError: no Linux, another allocator than glibc's.
    """

    def __init__(
        self, directory: str | os.PathLike, memory: int | None = None, least: int = LEAST_BYTES
    ) -> None:
        self._parent, self._memory, self._least = Path(directory), memory, least
        self._blocks = dict[int, Block]()  # by their storages' numbers
        self._of = defaultdict[int, dict[int, Block]](dict)  # by rank and serial
        self._serials, self._gone = Counter[int](), list[Block]()
        self._coming = dict[Block, Future[Staged | None]]()
        self._resident = self._time = 0  # bytes of blocks in memory; operators so far
        self._living = 0  # bytes of all blocks
        self._spare = 32 << 20  # bytes of others that may come: compiled loops, small tensors
        self._at_once = self._needed = 0  # bytes of blocks of the operator at hand; of any, at most
        self._rank, self._later, self._is_apart = 0, list[int](), False
        self._meters, self._others = dict[int, Meter](), Others()
        self._touched, self._through = set[int](), list[Block]()
        self.kept = Counter[str]()
        self._open = ExitStack()
        self._process = os.getpid()

    def __enter__(self) -> Spill:
        map_buffers_from(self._least)
        with ExitStack() as opened:
            folder = opened.enter_context(folder_of_a_run(self._parent))
            self._file = SpillFile(folder)
            opened.callback(self._file.close)
            prepare_optimizers()  # or the first optimizer would take 70 MB that are not counted
            now = anonymous_bytes()
            self._most = self._memory or now + int(min(memory_left(), _NO_LIMIT)) // 2
            self._limit = self._most - now
            if self._limit <= 0:
                raise self._too_little(0)
            self._reader = ThreadPoolExecutor(1, "sar-read-ahead")
            opened.callback(self._reader.shutdown)
            opened.callback(self._drop_coming)
            self._open = opened.pop_all()
        mind_forks(self)
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        """Give the file to the system, and before, unless something failed, its memory to each
        tensor that is left."""
        with self._open:
            if kind is None:
                gc.collect()
                self._bury()
                for block in list(self._blocks.values()):
                    if block.is_out and block.is_at(block.storage()):
                        block.move_in(self._fetch(block))

    @property
    def read_bytes(self) -> int:
        return self._file.read_bytes

    @property
    def written_bytes(self) -> int:
        return self._file.written_bytes

    # What ranks and their group call.

    def summary(self) -> dict[str, Any]:
        """For a report: bytes so far, and ``kept`` from the largest on."""
        return {
            "directory": os.fspath(self._parent),
            "memory": self._most,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "kept_bytes": self.kept.total(),
            "kept": dict(self.kept.most_common()),
        }

    @contextmanager
    def following(self, group: Group) -> Iterator[None]:
        """Follow what this thread, a rank of ``group``, allocates and reads."""
        self._meters[group.rank] = group.meter
        with watched(self._run):
            reading.told = self._need
            try:
                yield
            finally:
                reading.told = None

    def table_bytes(self, held: int, least: int) -> int:
        self._measure()
        if self._limit < self._needed + least:
            raise self._too_little(self._needed + least)
        return max(least, self._limit - max(held, self._needed) - self._spare)

    def new_table(self, num_bytes: int) -> Tensor:
        """See :class:`sar.comm.turns.TableMemory`; it is taken now, so that room is left for it."""
        self._time += 1
        self._make_room(num_bytes)
        self._is_apart = True  # from the operators that all ranks call, which are counted
        try:
            rows = torch.empty(num_bytes, dtype=torch.uint8)
            self._follow(storage_id(rows), rows.untyped_storage(), "the table", _NOBODY)
            return rows.zero_()
        finally:
            self._is_apart = False

    def begin(self, rank: int, following: Sequence[int]) -> None:
        self._rank, self._later = rank, [one for one in following if one != rank]
        self._touched.clear()
        self._bury()
        self._measure()

    def _measure(self) -> None:
        """How many bytes of blocks fit beside what else there is."""
        self._limit = self._most - self._others.measure(self._resident + self._ahead)

    def end(self, rank: int) -> None:
        product_buffers_freed()()
        self._bury()
        for block in self._through:
            block.forget_pages()
        self._through.clear()
        if self._living > self.kept.total():
            self.kept = Counter[str]()
            for block in list(self._blocks.values()):
                if block.rank != _NOBODY:
                    self.kept[block.maker] += block.nbytes

    # What operators read and make.

    def _run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if getattr(func, "is_view", False) or self._is_apart or self._is_forked():
            return func(*args, **kwargs)
        given = list(tensors_in(args)) + list(tensors_in(kwargs.values()))
        self._need(given)
        out = func(*args, **kwargs)
        self._note(str(func), out, given)
        return out

    def _need(self, tensors: Sequence[Tensor]) -> None:
        """Have the memory of tensors in, those in use first."""
        if self._is_forked():
            return
        self._time += 1
        self._at_once = 0
        self._bury()
        is_due = self._time % _OFTEN == 0  # a turn may be long, and arrays of numpy's come
        if is_due:
            self._measure()
        wanted = list[Block]()
        for tensor in tensors:
            block = self._find(tensor)
            if block is None:
                continue
            size = extent(tensor)
            self._use(block, size)
            if block.is_out:
                if block.read_through(tensor.data_ptr(), size):
                    self._through.append(block)
                elif block not in wanted:
                    wanted.append(block)
            if block.rank == self._rank and block.serial not in self._touched:
                self._touched.add(block.serial)
                self._read_ahead(block.serial)
        if wanted or is_due:
            self._make_room(sum(one.size for one in wanted if one not in self._coming))
            for block in wanted:
                block.move_in(self._fetch(block))
                self._resident += block.size

    def _find(self, tensor: Tensor) -> Block | None:
        if not is_plain(tensor):
            return None
        number, storage = storage_id(tensor), tensor.untyped_storage()
        block = self._blocks.get(number)
        if block is not None and block.is_at(storage):
            return block
        if block is not None:
            self._lose(block)
        block = self._follow(number, storage, "")  # a copy, or loaded: no operator has made it
        if block is not None:
            self._measure()
        return block

    def _note(self, maker: str, out: Any, given: Sequence[Tensor]) -> None:
        """Follow the storages that an operator has made."""
        known: set[int] | None = None
        for tensor in tensors_in(out if isinstance(out, (tuple, list)) else (out,)):
            if not is_plain(tensor):
                continue
            if known is None:
                known = {storage_id(one) for one in given if is_plain(one)}
            number, storage = storage_id(tensor), tensor.untyped_storage()
            if number in known:
                self._find(tensor)  # it may have got other memory
                continue
            known.add(number)
            self._serials[self._rank] += 1
            if maker.startswith("aten."):  # torch's own have told nobody where it is
                move_out_of_heap(storage, self._least)
            if self._follow(number, storage, maker) is not None:
                self._make_room(0)

    def _follow(
        self, number: int, storage: UntypedStorage, maker: str, rank: int | None = None
    ) -> Block | None:
        """Follow a storage, if it may leave memory; of ``rank``, by default the one at work."""
        if not self._follows(storage):
            return None
        self._bury()
        rank = self._rank if rank is None else rank
        self._serials[rank] += not maker or rank == _NOBODY
        serial = self._serials[rank]
        maker = f"{' '.join(self._meters[self._rank].at_work)}: {maker}".strip(": ")
        block = Block(storage, number, rank, serial, maker, self._gone.append)
        self._use(block, block.size)
        self._blocks[number] = self._of[rank][serial] = block
        self._resident += block.size
        self._living += block.nbytes * (rank != _NOBODY)
        return block

    def _use(self, block: Block, size: int) -> None:
        """The operator at hand has ``size`` bytes of a block."""
        if block.used != self._time and block.rank != _NOBODY:
            self._at_once += size
            self._needed = max(self._needed, self._at_once)
        block.used = self._time

    def _follows(self, storage: UntypedStorage) -> bool:
        """Whether a new storage may leave memory."""
        return storage.nbytes() >= self._least and is_mapped(storage)

    def _is_forked(self) -> bool:
        """Whether this is a child of the run's process, as a loader's worker: it reads what is out
        through its maps, and must not write, as the file is its parent's."""
        return os.getpid() != self._process

    # Room.

    def _make_room(self, more: int) -> None:
        """Let blocks go until ``more`` bytes fit, but none that the operator at hand uses."""
        self._bury()
        short = self._resident + more + self._ahead - self._limit
        if short > 0:
            for rank in [*reversed(self._later), self._rank]:
                short -= self._let_go(rank, short)
                if short <= 0:
                    return
            short -= self._drop_coming(besides=self._time)
            short -= self._let_go(_NOBODY, short)
            if short > 0:
                raise self._too_little(self._limit + short)

    @property
    def _ahead(self) -> int:
        return sum(block.size for block in self._coming)

    def _let_go(self, rank: int, enough: int) -> int:
        """Let a rank's blocks go, the one used longest ago first; returns their bytes."""
        done = 0
        for block in sorted(self._of[rank].values(), key=lambda one: one.used):
            if done >= enough:
                break
            storage = block.storage()  # holds the memory meanwhile
            if block.used == self._time or block.is_out:
                continue
            if block.is_at(storage):
                block.move_out(self._file)
                self._resident -= block.size
            else:
                self._lose(block)
            done += block.size
        return done

    def _too_little(self, needed: int) -> SarError:
        """Blocks need so many bytes now. Nobody knows what they need later: a plan tries it."""
        now = self._most - self._limit + needed
        return SarError(
            f"memory: got {self._most:,} bytes, part {self._rank} needs {now:,} at this point, and "
            "maybe more later; expected the least of `sar plan --out-of-core` or more, or a graph "
            "of more parts"
        )

    # Reading.

    def _read_ahead(self, serial: int) -> None:
        """The next rank will need what this one does: they run the same program."""
        block = self._of[self._later[0]].get(serial) if self._later else None
        if block is None or not block.is_out or block in self._coming:
            return
        ahead = self._ahead + block.size
        table = sum(one.size for one in self._of[_NOBODY].values() if not one.is_out)
        if ahead > (self._limit - table) // _MOST_AHEAD or self._resident + ahead > self._limit:
            return
        self._coming[block] = self._reader.submit(block.read, self._file)

    def _fetch(self, block: Block) -> Staged | None:
        coming = self._coming.pop(block, None)
        return block.read(self._file) if coming is None else coming.result()

    # Ends.

    def _lose(self, block: Block) -> None:
        """Forget a block whose storage has other memory now: it was resized, or shared."""
        self._gone.append(block)
        self._bury()

    def _bury(self) -> None:
        """Forget blocks whose storages have gone. They tell so in any thread, at any moment."""
        while self._gone:
            block = self._gone.pop()
            if self._of[block.rank].pop(block.serial, None) is None:
                continue
            if self._blocks.get(block.number) is block:
                del self._blocks[block.number]
            self._resident -= 0 if block.is_out else block.size
            self._living -= block.nbytes * (block.rank != _NOBODY)
            coming = self._coming.pop(block, None)
            if coming is not None:
                drop_read(coming)
            block.give_back(self._file)

    def before_fork(self) -> None:
        """The child will read what is out where it lies now."""
        for block in list(self._blocks.values()):
            block.keep_place()

    def _drop_coming(self, besides: int = -1) -> int:
        """Read nothing ahead ``besides`` what is used then; returns the bytes."""
        dropped = [block for block in self._coming if block.used != besides]
        for block in dropped:
            drop_read(self._coming.pop(block))
        return sum(block.size for block in dropped)
