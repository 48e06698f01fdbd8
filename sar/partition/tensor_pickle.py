"""Tensors in files of torch and of pickle, read without running anything that they name."""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sar.errors import PartitionError

_PLAIN = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "set"): set,
}


_OLD = {"__builtin__": "builtins"}  # as Python 2 called it, and so does torch
_DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _Plain(pickle.Unpickler):
    """Builds plain data and tensors; refuses all else before it is built.

    Args:
        storages: gives the bytes of a storage by its key, for torch's own files.
    """

    def __init__(self, file: Any, path: Path, storages: zipfile.ZipFile | None = None) -> None:
        super().__init__(file)
        self._path, self._storages = path, storages

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (_OLD.get(module, module), name) in _PLAIN:
            return _PLAIN[_OLD.get(module, module), name]
        raise PartitionError(f"{self._path}: names {module}.{name}, which is no plain data")

    def persistent_load(self, pid: Any) -> Any:
        if self._storages is None or pid[0] != "storage":
            raise PartitionError(f"{self._path}: holds {pid[0]!r}, expected storages of tensors")
        root = self._storages.namelist()[0].partition("/")[0]
        data = bytearray(self._storages.read(f"{root}/data/{pid[2]}"))
        return torch.frombuffer(data, dtype=pid[1]) if data else torch.empty(0, dtype=pid[1])


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    flat = storage if isinstance(storage, Tensor) else torch.tensor([], dtype=storage.dtype)
    if not isinstance(storage, Tensor):
        flat = flat.set_(storage)
    needed = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and (offset < 0 or min(stride, default=0) < 0 or needed > len(flat)):
        raise ValueError("a tensor reaches beyond its storage")
    return flat.as_strided(size, stride, offset).clone()


def _storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def read_torch(path: Path) -> Any:
    """What ``torch.save`` wrote. Raises ``PartitionError`` for a file that is missing, damaged or
    holds more than tensors and plain data."""
    try:
        with zipfile.ZipFile(path) as archive:
            root = archive.namelist()[0].partition("/")[0]
            return _Plain(io.BytesIO(archive.read(f"{root}/data.pkl")), path, archive).load()
    except PartitionError:
        raise
    except Exception as error:  # a damaged file raises many kinds
        raise PartitionError(f"{path}: cannot be read as torch's: {error}") from error


def read_pickles(path: Path) -> list[Any]:
    """The objects that were pickled into a file, one by one; errors as :func:`read_torch`."""
    found = []
    try:
        data = path.read_bytes()
        file = io.BytesIO(data)
        while file.tell() < len(data):
            found.append(_Plain(file, path).load())
    except PartitionError:
        raise
    except Exception as error:  # a damaged file raises many kinds
        raise PartitionError(f"{path}: cannot be read as pickles: {error}") from error
    return found
