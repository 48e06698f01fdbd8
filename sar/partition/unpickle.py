"""Reading pickles that hold numbers and nothing that could run.

Arrays of numpy and scipy, containers and plain values are read; a pickle that names anything else
is refused before it is built. Files of ``torch.save`` are zip archives, whose tensors stay where
they are; `torch.load` would refuse the ``defaultdict`` that PyG saves, or run what the file says.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from sar._private import (
    NUMPY_MAKERS,
    NUMPY_MODULES,
    REBUILD_TENSOR,
    STORAGE_FROM_BYTES,
    rebuild_tensor,
)
from sar.errors import PartitionError
from sar.partition.column import MappedColumn, MappedFile

_PLAIN = {
    "builtins": {
        "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list",
        "object", "range", "set", "slice", "str", "tuple",
    },
    "collections": {"OrderedDict", "defaultdict"},
    "copyreg": {"_reconstructor"},
    "_codecs": {"encode"},
    "numpy": {"dtype", "ndarray", "matrix"},
}  # fmt: skip
_OLD = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # names of Python 2
_SPARSE = {f"{kind}_{what}" for kind in ("bsr", "coo", "csc", "csr", "dia", "lil") for what in
           ("matrix", "array")}  # fmt: skip
_STORAGES = {
    "BoolStorage": torch.bool, "ByteStorage": torch.uint8, "CharStorage": torch.int8,
    "ShortStorage": torch.int16, "IntStorage": torch.int32, "LongStorage": torch.int64,
    "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64,
}  # fmt: skip
_MOST_BYTES = 1 << 20  # of a description
_NOTHING: Mapping[tuple[str, str], Any] = {}
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip entry: magic, lengths of name and extra field


class NotPlainError(pickle.UnpicklingError):
    """A pickle that holds more than numbers and containers of them."""


class PlainUnpickler(pickle.Unpickler):
    """Reads plain data; raises :class:`NotPlainError` at the name of anything else.

    ``name`` is the file's. ``known``: what else may be read, by module and name; ``None``: no class
    at all, only what pickle has opcodes for: text, numbers, and containers of them.
    """

    def __init__(
        self,
        file: Any,
        *,
        name: str = "a pickle",
        known: Mapping[tuple[str, str], Any] | None = _NOTHING,
        **options: Any,
    ) -> None:
        super().__init__(file, **options)
        self._name, self._known = os.fspath(getattr(file, "name", name)), known

    def find_class(self, module: str, name: str) -> Any:
        module, known = _OLD.get(module, module), self._known
        if known is not None:
            if (module, name) in known:
                return known[module, name]
            if module.startswith("scipy.sparse") and name in _SPARSE:
                return super().find_class("scipy.sparse", name)
            if name in _PLAIN.get(module, ()) or (module in NUMPY_MODULES and name in NUMPY_MAKERS):
                return super().find_class(module, name)
        what = "plain values alone" if known is None else "arrays of numbers and containers of them"
        raise NotPlainError(
            f"{self._name}: names {module}.{name}, expected {what}; not read, as it could run a "
            "program"
        )


@contextmanager
def plain_pickles() -> Iterator[None]:
    """Inside, nobody in this process unpickles anything but plain data.

    Raises :class:`NotPlainError` where the pickle is read, and at the end where somebody caught it:
    DGL then makes anew, or downloads, what it could not read.
    """
    refused: list[NotPlainError] = []

    class Plain(PlainUnpickler):
        def find_class(self, module: str, name: str) -> Any:
            try:
                return super().find_class(module, name)
            except NotPlainError as error:
                refused.append(error)
                raise

    def load(file: Any, **options: Any) -> Any:
        return Plain(file, **options).load()

    def loads(data: Any, /, **options: Any) -> Any:
        return Plain(io.BytesIO(data), **options).load()

    try:
        with mock.patch.multiple(pickle, load=load, loads=loads, Unpickler=Plain):
            yield
    finally:
        if refused:
            raise refused[0]


def read_saved(path: str) -> Any:
    """What ``torch.save`` wrote: containers and plain values, tensors as :class:`MappedColumn`.
    Raises ``PartitionError`` for a file that is missing, damaged, or names anything else."""
    file = MappedFile(path)
    with _naming(path):
        entries = _entries(file)
        (name,) = (one for one in entries if one.endswith("/data.pkl"))
        stem = name.removesuffix("data.pkl")
        low, high = entries.get(stem + "byteorder", (0, 0))
        if file.map[low:high] not in (b"", b"little"):
            raise ValueError("numbers are not little-endian")
        low, high = entries[name]
        return _Mapping(file, entries, stem, io.BytesIO(file.map[low:high])).load()


def read_pickles(path: str) -> Iterator[Any]:
    """The objects that were pickled into a file one after another, tensors among them.
    Raises as :func:`read_saved`."""
    with _naming(path), open(path, "rb") as file:
        while file.peek(1):
            yield PlainUnpickler(file, name=path, known=_LOADED).load()


def read_values(path: str) -> Any:
    """The plain values that were pickled into a small file; nothing that is larger than the file.
    Raises as :func:`read_saved`."""
    file = MappedFile(path)
    with _naming(path):
        if file.size > _MOST_BYTES:
            raise ValueError(f"it has {file.size} bytes, expected at most {_MOST_BYTES}")
        for code, number, _ in pickletools.genops(data := file.map[:]):
            if code.name.endswith("PUT") and int(number or 0) > file.size:
                raise ValueError(f"it keeps an object as number {number}, expected few of them")
        return PlainUnpickler(io.BytesIO(data), name=path, known=None).load()


def _storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


# Tensors in memory, as ``pickle.dump`` writes them.
_LOADED = {REBUILD_TENSOR: rebuild_tensor, STORAGE_FROM_BYTES: _storage}


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn errors about damaged contents into ``PartitionError`` naming the file."""
    try:
        yield
    except PartitionError:
        raise
    except OSError as error:
        raise PartitionError(f"{path}: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        text = str(error)
        raise PartitionError(text if path in text else f"{path}: {text}") from error
    except Exception as error:  # damaged bytes raise anything
        raise PartitionError(
            f"{path}: damaged, or not of torch.save: {type(error).__name__}: {error}"
        ) from error


def _entries(file: MappedFile) -> dict[str, tuple[int, int]]:
    """``[low, high)`` bytes of each entry of a zip archive; ``ValueError`` for a compressed one."""
    found = {}
    with zipfile.ZipFile(file.map) as archive:  # type: ignore[call-overload]
        for one in archive.infolist():
            header = file.map[one.header_offset : one.header_offset + _LOCAL_HEADER.size]
            magic, name, extra = _LOCAL_HEADER.unpack(header)
            low = one.header_offset + _LOCAL_HEADER.size + name + extra
            high = low + one.file_size
            if magic != b"PK\3\4" or one.compress_type != zipfile.ZIP_STORED or high > file.size:
                raise ValueError(f"entry {one.filename!r} is damaged or compressed")
            found[one.filename] = low, high
    return found


class _Storage(NamedTuple):
    """Bytes ``[low, high)`` of a file that hold numbers."""

    dtype: torch.dtype
    low: int
    high: int


class _Mapping(PlainUnpickler):
    """Unpickles tensors as maps of the file that they lie in."""

    def __init__(
        self, file: MappedFile, entries: dict[str, tuple[int, int]], stem: str, content: io.BytesIO
    ) -> None:
        known = {("torch", name): dtype for name, dtype in _STORAGES.items()}
        super().__init__(content, name=file.path, known={**known, REBUILD_TENSOR: self._tensor})
        self._file, self._entries, self._stem = file, entries, stem

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, *_ = pid
        return _Storage(dtype, *self._entries[f"{self._stem}data/{key}"])

    def _tensor(self, storage: _Storage, offset: int, size: Any, stride: Any, *_: Any) -> Any:
        shape, steps = tuple(map(int, size)), tuple(map(int, stride))
        if min((offset, *shape), default=0) < 0 or len(steps) != len(shape):
            raise ValueError(f"a tensor of shape {shape} at {offset}")
        dense = tuple(int(one) for one in np.cumprod((1, *shape[:0:-1]), dtype=object)[::-1])
        holds = 0 not in shape
        if holds and any(n > 1 and s != d for n, s, d in zip(shape, steps, dense)):
            raise ValueError(f"a tensor of shape {shape} and strides {steps}, expected {dense}")
        low = storage.low + offset * storage.dtype.itemsize
        count = shape[0] * dense[0] if shape else 1
        if holds and low + count * storage.dtype.itemsize > storage.high:
            raise ValueError(f"a tensor of shape {shape} is larger than its storage")
        return MappedColumn(self._file, low if holds else storage.low, storage.dtype, shape)
