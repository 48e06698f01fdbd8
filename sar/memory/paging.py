"""Saved tensors in a file, or rounded to half their width, instead of in memory as they are.

Both are pairs of hooks for ``torch.autograd.graph.saved_tensors_hooks``. Small tensors, integers,
and memory that someone else holds anyway stay as they are.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from sar._private import StorageWeakRef, version_of
from sar.errors import SarError

LEAST_BYTES = 1 << 16  # smaller tensors stay
_MOST_BYTES = 1 << 30  # one write takes no more


class PageFile:
    """A file without a name in ``directory``, by default the system's for temporary files; gone
    with the process. Pages are handed out and taken back."""

    def __init__(self, directory: str | None) -> None:
        self.directory = directory or tempfile.gettempdir()
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)
        weakref.finalize(self, self._file.close).atexit = False
        self._end = 0
        self._free: list[tuple[int, int]] = []  # (offset, size), ascending, never adjacent
        self._given: list[tuple[int, int]] = []  # since the last take

    def take(self, size: int) -> int:
        """The offset of ``size`` free bytes, a multiple of the page size."""
        while self._given:
            self._merge(*self._given.pop())
        for index, (offset, room) in enumerate(self._free):
            if room >= size:
                rest = [(offset + size, room - size)] if room > size else []
                self._free[index : index + 1] = rest
                return offset
        self.grow(self._end + size)
        self._end += size
        return self._end - size

    def grow(self, size: int) -> None:
        """Make the file ``size`` bytes long."""
        os.ftruncate(self._file.fileno(), size)

    def close(self) -> None:
        """End the file; nothing of it may be mapped any more."""
        self._file.close()

    @property
    def number(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._end

    def give(self, offset: int, size: int) -> None:
        """Take pages back; at any moment, as the garbage collector may call."""
        self._given.append((offset, size))

    def _merge(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, room in sorted([*self._free, (offset, size)]):
            if merged and sum(merged[-1]) == start:
                start, room = merged[-1][0], merged.pop()[1] + room
            merged.append((start, room))
        self._free = merged

    @property
    def used_bytes(self) -> int:
        return self._end - sum(size for _, size in [*self._free, *self._given])

    def write(self, offset: int, content: Tensor) -> None:
        """Fill pages with ``content``, uint8 on the CPU."""
        view = memoryview(content.numpy().data)
        done = 0
        try:
            while done < len(view):
                part = view[done : done + _MOST_BYTES]
                done += os.pwrite(self._file.fileno(), part, offset + done)
        except OSError as error:
            raise SarError(
                f"activations: {len(view)} bytes cannot be written in {self.directory!r}: {error}"
            ) from error

    def map(self, offset: int, size: int, owner: object) -> mmap.mmap:
        """The pages as memory, private to this process; ``owner`` lives as long as the map."""
        found = _Map(self._file.fileno(), size, access=mmap.ACCESS_COPY, offset=offset)
        found.owner = owner
        return found


class _Map(mmap.mmap):
    owner: object


class _Pages:
    """A storage in the file; its pages are given back when nobody needs it any more."""

    def __init__(self, file: PageFile, content: Tensor) -> None:
        self.nbytes = len(content)
        self.size = -(-self.nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self.offset = file.take(self.size)
        weakref.finalize(self, file.give, self.offset, self.size).atexit = False
        self.file = file
        file.write(self.offset, content)

    def read(self, dtype: torch.dtype) -> Tensor:
        """The storage's numbers, [nbytes / itemsize], in mapped memory."""
        pages = self.file.map(self.offset, self.size, self)
        return torch.frombuffer(pages, dtype=dtype, count=self.nbytes // dtype.itemsize)


class _Known:
    """The pages or rounded numbers made of storages that may be saved again, while unwritten."""

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[tuple, Any] = weakref.WeakValueDictionary()

    def get(self, tensor: Tensor, *key: Any) -> Any:
        """The value that :meth:`put` got for the same memory and content, if any."""
        made = self._made.get((tensor.untyped_storage().data_ptr(), *key))
        if made is None or made.source.expired() or made.version != version_of(tensor):
            return None
        return made

    def put(self, made: Any, tensor: Tensor, *key: Any) -> None:
        storage = tensor.untyped_storage()
        made.source, made.version = StorageWeakRef(storage), version_of(tensor)
        self._made[(storage.data_ptr(), *key)] = made


class Offload:
    """Hooks that page saved tensors to a file; a storage that is saved several times, once."""

    def __init__(self, directory: str | None = None) -> None:
        self.file = PageFile(directory)
        self._known = _Known()

    def pack(self, tensor: Tensor, held: Set[int]) -> Any:
        """Write a tensor to the file; ``held`` are addresses of storages that stay in memory."""
        if not _worth_it(tensor, held, (torch.bool, torch.uint8)):
            return _Guarded(tensor)
        storage = tensor.untyped_storage()
        own = tensor
        if storage.nbytes() > 2 * tensor.nbytes:  # a part of something that may go
            own = tensor.clone(memory_format=torch.contiguous_format)
            storage = own.untyped_storage()
        pages = self._known.get(own)
        if pages is None:
            content = torch.empty(0, dtype=torch.uint8, device=own.device).set_(storage)  # type: ignore[call-overload]
            pages = _Pages(self.file, content.cpu())
            self._known.put(pages, own)
        return pages, own.dtype, own.device, (own.shape, own.stride(), own.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        """The tensor, in mapped memory where it is the CPU's."""
        if isinstance(packed, _Guarded):
            return packed.get()
        pages, dtype, device, layout = packed
        return pages.read(dtype).to(device).as_strided(*layout)


class _Guarded:
    """A tensor that stays where it is; torch does not see writes into what hooks give back."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, version_of(tensor)

    def get(self) -> Tensor:
        """The tensor; raises ``RuntimeError``, as torch does, if it has been written into."""
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                f"activations: a tensor of shape {tuple(self.tensor.shape)} that backward needs "
                f"was written into after the forward pass: it is at version "
                f"{version_of(self.tensor)}, expected {self.version}"
            )
        return self.tensor


class _Rounded:
    def __init__(self, values: Tensor) -> None:
        self.values = values


class RoundToBfloat16:
    """Hooks that round saved float32 and float64 to bfloat16: gradients lose digits."""

    def __init__(self) -> None:
        self._known = _Known()

    def pack(self, tensor: Tensor, held: Set[int]) -> Any:
        if not _worth_it(tensor, held) or tensor.dtype not in (torch.float32, torch.float64):
            return _Guarded(tensor)
        key = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        rounded = self._known.get(tensor, *key)
        if rounded is None:
            rounded = _Rounded(tensor.to(torch.bfloat16))
            self._known.put(rounded, tensor, *key)
        return rounded, tensor.dtype

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Guarded):
            return packed.get()
        return packed[0].values.to(packed[1])


def in_memory(packed: Any) -> list[Tensor]:
    """The tensors that still take memory, of what either pair of hooks has packed."""
    if isinstance(packed, _Guarded):
        return [packed.tensor]
    return [packed[0].values] if isinstance(packed[0], _Rounded) else []


def _worth_it(tensor: Tensor, held: Set[int], more: tuple[torch.dtype, ...] = ()) -> bool:
    return (
        (tensor.is_floating_point() or tensor.dtype in more)
        and tensor.layout == torch.strided
        and tensor.nbytes >= LEAST_BYTES
        and tensor.untyped_storage().data_ptr() not in held
    )
