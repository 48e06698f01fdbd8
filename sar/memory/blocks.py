"""Memory of tensors that moves into a file and back, and keeps its address.

While a block is out, pages of the file lie where it was, mapped privately. So whoever reads or
writes there, an array of numpy's or a library that asks nobody, finds the right numbers, at the
price of the page cache. What moves in, and when, decides about speed alone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, UntypedStorage

from sar._private import without_memory
from sar.errors import NotSupportedError, SarError
from sar.kernels.device import is_host
from sar.memory.machine import anonymous_bytes
from sar.memory.paging import PageFile

PAGE = mmap.PAGESIZE
_PIECE = 8 << 20  # bytes of one read or write
_HUGE = 2 << 20
_MMAP_THRESHOLD = -3  # of glibc's mallopt
_PROBE = 64 << 20  # bytes that no free chunk of a heap has; none of them is touched
_UNTRIMMED = 2 << 20  # bytes that heaps may keep
_IS_MAPPED = 2  # of the word in front of a glibc buffer: it has a map of its own
_POPULATE_READ, _PAGEOUT = 22, 21  # advice of Linux 5.14 and 5.4; others refuse it
_MOVE_TO = 3  # mremap's MAYMOVE | FIXED
_FIXED = 0x10
_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
# What a page of /proc/self/pagemap is, in the uppermost bits of its word.
_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))


class _System:
    """Functions of the C library, with their errors as ``OSError``."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL(None, use_errno=True)
        types = {
            "mmap": (_ADDRESS, _SIZE, _INT, _INT, _INT, ctypes.c_int64),
            "mremap": (_ADDRESS, _SIZE, _SIZE, _INT, _ADDRESS),
            "munmap": (_ADDRESS, _SIZE),
            "madvise": (_ADDRESS, _SIZE, _INT),
            "malloc": (_SIZE,),
            "free": (_ADDRESS,),
        }
        for name, arguments in types.items():
            function = getattr(self.lib, name)
            function.argtypes = arguments
            function.restype = _ADDRESS if name in ("mmap", "mremap", "malloc") else _INT

    def map(self, size: int, at: int = 0, number: int = -1, offset: int = 0) -> int:
        """A private map of fresh memory or of a file; ``at`` replaces what is mapped there."""
        flags = mmap.MAP_PRIVATE | (mmap.MAP_ANONYMOUS if number < 0 else 0) | (_FIXED if at else 0)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        return self._mapped(self.lib.mmap(at or None, size, protection, flags, number, offset))

    def move(self, source: int, size: int, to: int) -> None:
        """Move a map over what is at ``to``; no byte is copied."""
        self._mapped(self.lib.mremap(source, size, size, _MOVE_TO, to))

    def unmap(self, at: int, size: int) -> None:
        self.lib.munmap(at, size)

    def advise(self, at: int, size: int, advice: int) -> None:
        """Advice that the kernel may refuse."""
        self.lib.madvise(at, size, advice)

    def _mapped(self, address: int | None) -> int:
        if address is None or address == ctypes.c_size_t(-1).value:
            number = ctypes.get_errno()
            hint = "; does vm.max_map_count allow so many maps?" if number == errno.ENOMEM else ""
            raise SarError(f"out of core: memory cannot be mapped: {os.strerror(number)}{hint}")
        return address


_system = _System() if sys.platform == "linux" else None


def system() -> Any:
    """The C library's functions; ``NotSupportedError`` elsewhere than on Linux."""
    if _system is None:
        raise NotSupportedError("out of core: got another system, expected Linux")
    return _system


def map_buffers_from(least: int) -> None:
    """Have the allocator map each buffer of ``least`` bytes or more on its own, and see that it
    does: ``NotSupportedError`` for another one than glibc's."""
    lib = system().lib
    with suppress(OSError, AttributeError):
        own = ctypes.cast(ctypes.CDLL("libc.so.6").malloc, _ADDRESS).value
        if own == ctypes.cast(lib.malloc, _ADDRESS).value and hasattr(lib, "gnu_get_libc_version"):
            lib.mallopt(_MMAP_THRESHOLD, least)
            if is_mapped(torch.empty(_PROBE, dtype=torch.uint8).untyped_storage()):
                return
    raise NotSupportedError(
        "out of core: got another allocator, expected glibc's; does LD_PRELOAD name one?"
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has memory of the CPU's."""
    if tensor.layout != torch.strided or tensor.is_nested or not is_host(tensor.device):
        return False
    if without_memory(tensor):
        return False
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def extent(tensor: Tensor) -> int:
    """Bytes from the first number to the last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * step for size, step in steps) + 1) * tensor.element_size()


def tensors_in(values: Collection[Any]) -> Iterator[Tensor]:
    """Those of arguments or results, lists looked through."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def is_mapped(storage: UntypedStorage) -> bool:
    """Whether a storage lies in a buffer of glibc's that has a map of its own, which ends with it.
    Other storages than the allocator's, of files or numpy's arrays, cannot be resized."""
    if not storage.resizable() or storage.is_shared() or not storage.nbytes():
        return False
    return _has_map(storage.data_ptr())


def _has_map(buffer: int) -> bool:
    return bool(ctypes.c_size_t.from_address(buffer - 8).value & _IS_MAPPED)


def move_out_of_heap(storage: UntypedStorage, least: int) -> None:
    """Give a new storage of ``least`` bytes or more, whose address nobody has yet, a buffer with a
    map of its own. Glibc may have put it where small tensors were: what is free there is taken
    meanwhile, and theirs again."""
    if storage.nbytes() < least or not storage.resizable() or storage.is_shared():
        return
    if _has_map(storage.data_ptr()):
        return
    lib, taken = system().lib, list[int]()
    while (buffer := lib.malloc(storage.nbytes())) and not _has_map(buffer):
        taken.append(buffer)
    lib.free(buffer)
    storage.resize_(storage.nbytes())
    for buffer in taken:
        lib.free(buffer)


class Others:
    """Bytes of the process that no block has; it gives back what small tensors leave in heaps."""

    def __init__(self) -> None:
        self._trimmed = 0  # when heaps had nothing left

    def measure(self, of_blocks: int) -> int:
        """Bytes beside those ``of_blocks``."""
        others = anonymous_bytes() - of_blocks
        if others > self._trimmed + _UNTRIMMED:  # not more often, it is a call for each free chunk
            system().lib.malloc_trim(0)
            self._trimmed = others = anonymous_bytes() - of_blocks
        self._trimmed = min(self._trimmed, others)
        return max(0, others)


def _view(at: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(at)).cast("B")


class Staged(NamedTuple):
    """What was read of a block: memory of its size somewhere else, and the digest of it."""

    at: int
    size: int
    digest: bytes

    def drop(self) -> None:
        system().unmap(self.at, self.size)


def drop_read(coming: Future[Staged | None]) -> None:
    """Let go of what is read by another thread, or was."""
    if coming.cancel() or coming.exception() is not None:
        return
    if (staged := coming.result()) is not None:
        staged.drop()


class SpillFile(PageFile):
    """A :class:`PageFile` that is read and written past the page cache where the file system can.

    ``read_bytes``, ``written_bytes``: so far. Errors are ``SarError`` that name the folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.read_bytes = self.written_bytes = 0
        number = self.number
        self.is_direct = True
        try:
            fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_DIRECT)
            with mmap.mmap(-1, PAGE) as page:  # some take the flag and refuse what comes
                os.pwrite(number, page, 0)
        except OSError:
            self.is_direct = False
            flags = fcntl.fcntl(number, fcntl.F_GETFL) & ~os.O_DIRECT
            fcntl.fcntl(number, fcntl.F_SETFL, flags)

    def grow(self, size: int) -> None:
        """Ask for all bytes now: a full disk is told before anything lies there."""
        with self._naming("room for", size - self.size):
            os.posix_fallocate(self.number, self.size, size - self.size)

    def store(self, offset: int, at: int, size: int) -> None:
        view = _view(at, size)
        with self._naming("writing", size):
            for low in range(0, size, _PIECE):
                piece, done = view[low : low + _PIECE], 0
                while done < len(piece):
                    done += os.pwrite(self.number, piece[done:], offset + low + done)
        self.written_bytes += size
        self._forget(offset, size)

    def load(self, offset: int, size: int) -> Staged:
        """Read into fresh memory; by any thread."""
        at = system().map(size)
        try:
            if size >= _HUGE:
                system().advise(at, size, mmap.MADV_HUGEPAGE)
            view = _view(at, size)
            with self._naming("reading", size):
                for low in range(0, size, _PIECE):
                    piece, done = view[low : low + _PIECE], 0
                    while done < len(piece):
                        count = os.preadv(self.number, [piece[done:]], offset + low + done)
                        if not count:
                            raise OSError(errno.EIO, "the file was cut short")
                        done += count
            digest = xxhash.xxh3_128(view).digest()
        except BaseException:
            system().unmap(at, size)
            raise
        self.read_bytes += size
        self._forget(offset, size)
        return Staged(at, size, digest)

    def _forget(self, offset: int, size: int) -> None:
        if not self.is_direct:
            os.posix_fadvise(self.number, offset, size, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def _naming(self, what: str, size: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            status = os.statvfs(self.directory)
            free = status.f_bavail * status.f_frsize
            raise SarError(
                f"directory: {self.directory!r}: {what} {size:,} bytes failed: "
                f"{error.strerror or error}; {free:,} bytes are free there"
            ) from error


class Block:
    """The whole pages of a storage.

    Attributes:
        number: the storage's, see :func:`sar._private.storage_id`.
        rank, serial: whose it is, and which of the rank's tensors.
        storage: a weak reference to it.
        address, nbytes: of the storage when the block was made.
        start, size: of its whole pages.
        maker: the operator that made it.
        is_out: whether pages of the file lie where it was.
        used: when it was needed last; larger is later.
    """

    def __init__(
        self, storage: UntypedStorage, number: int, rank: int, serial: int, maker: str, gone: Any
    ) -> None:
        self.number, self.rank, self.serial, self.maker = number, rank, serial, maker
        self.storage = weakref.ref(storage, lambda _: gone(self))
        self.address, self.nbytes = storage.data_ptr(), storage.nbytes()
        self.start = -(-self.address // PAGE) * PAGE
        self.size = (self.address + self.nbytes) // PAGE * PAGE - self.start
        self.is_out, self.used = False, 0
        self._taken = self._through = 0  # bytes of its place; bytes that were read through
        self.offset: int | None = None  # of its place in the file
        self._digest: bytes | None = None  # of what is there, unless it was written over
        self._is_kept = False  # its place is a child's, too

    def is_at(self, storage: UntypedStorage | None) -> bool:
        """Whether the storage still has the memory that the block was made of."""
        if storage is None or storage.nbytes() != self.nbytes:
            return False
        return storage.data_ptr() == self.address

    def move_out(self, file: SpillFile) -> None:
        """Write what was ever written of it, unless the file has the same bytes, and let its memory
        go."""
        filled = self._filled()
        if self.offset is not None and filled > self._taken:
            file.give(self.offset, self._taken)
            self.offset, self._digest = None, None
        if self.offset is None and filled:
            self.offset, self._taken = file.take(filled), filled
            file.store(self.offset, self.start, filled)
        elif self.offset is not None and (self._digest is None or self._digest != self._now()):
            file.store(self.offset, self.start, self._taken)
        if self.offset is not None:
            system().map(self._taken, self.start, file.number, self.offset)
        self.is_out = True

    def _filled(self) -> int:
        """Bytes up to the last page that was ever written."""
        own = np.flatnonzero(own_pages(self.start, self.size))
        return int(own[-1] + 1) * PAGE if len(own) else 0

    def _now(self) -> bytes:
        return xxhash.xxh3_128(_view(self.start, self._taken)).digest()

    def read(self, file: SpillFile) -> Staged | None:
        """What lies in the file, if anything; by any thread."""
        return None if self.offset is None else file.load(self.offset, self._taken)

    def move_in(self, staged: Staged | None) -> None:
        """Put what was read where the block was."""
        self.is_out, self._through = False, 0
        if staged is None:
            return
        self._digest = staged.digest
        if own_pages(self.start, staged.size).any():  # by somebody who asked nobody
            ctypes.memmove(staged.at, self.start, staged.size)
            self._digest = None
        system().move(staged.at, staged.size, self.start)
        if self._is_kept:
            self.offset, self._is_kept = None, False

    def keep_place(self) -> None:
        """If it is out, never write at its place again: a child of a fork reads there, too."""
        self._is_kept = self.is_out and self.offset is not None

    def give_back(self, file: SpillFile) -> None:
        """Give its place in the file to others."""
        if self.offset is not None and not self._is_kept:
            file.give(self.offset, self._taken)

    def read_through(self, at: int, size: int) -> bool:
        """Read some of it through the page cache, if that is little of it; whether it was."""
        self._through += size
        if 2 * self._through > self.size:
            return False
        first = max(at // PAGE * PAGE, self.start)
        stop = min(-(-(at + size) // PAGE) * PAGE, self.start + self.size)
        if stop > first:
            system().advise(first, stop - first, _POPULATE_READ)
        return True

    def forget_pages(self) -> None:
        """Let go of pages that were read through and not written."""
        self._through = 0
        system().advise(self.start, self.size, _PAGEOUT)


def own_pages(start: int, size: int) -> np.ndarray:
    """Which pages are this process' own, bool [size / PAGE]: written, as of a file's map, or of
    fresh memory, none is before. The kernel's page table says so."""
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        table.seek(start // PAGE * 8)
        pages = np.frombuffer(table.read(size // PAGE * 8), np.uint64)
    return (((pages & _PRESENT) != 0) & ((pages & _OF_FILE) == 0)) | ((pages & _SWAPPED) != 0)
