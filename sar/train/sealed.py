"""Files of ``torch.save`` with a mark (16 bytes) and an XXH3-128 digest behind the archive.

``torch.load`` reads them, as readers of zip files look for nothing there. The digest tells damage,
not forgery, so nothing is read on trust: ``torch.load`` runs nothing that a file names, but would
inflate entries, and make buffers, tensors without numbers of their own, and nests that refer to
themselves.
"""

from __future__ import annotations

import io
import mmap
import os
import pickletools
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from sar.files import write_whole

_MARK = b"\nsar xxh3-128 of:"
_SEAL_BYTES = len(_MARK) + 16
_BLOCK = 1 << 24
_COPIES = 8  # of a tensor's numbers, under several names
_BUFFERS = ("builtins bytearray", "__builtin__ bytearray")


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` and its digest to the disk, whole or not; an ``OSError`` names ``path``."""

    def write(file: BinaryIO) -> None:
        digested = _Digested(file)
        torch.save(content, digested)  # type: ignore[arg-type]
        file.write(_MARK + digested.digest.digest())

    write_whole(path, write, durable=True)


def check_seal(data: Any, name: str | os.PathLike) -> None:
    """Raise ``ValueError`` for bytes that are not all as they were written. The message names the
    damaged entry of the archive, where it is one. Files from before there were digests are taken at
    the checksums of their entries, with a warning."""
    with memoryview(data) as view:
        body, seal = view[:-_SEAL_BYTES], bytes(view[-_SEAL_BYTES:])
        is_sealed = seal.startswith(_MARK)
        if is_sealed and _digest(body) == seal[len(_MARK) :]:
            return
        damaged = _damaged_entry(view)
    if is_sealed or damaged:
        where = damaged or "its directory or its digest"
        path = os.fspath(name)
        raise ValueError(f"{path}: damaged, or not a checkpoint: {where} is not as written")
    warnings.warn(
        f"{os.fspath(name)}: holds no digest, as files of older versions; only the checksums of "
        "its entries were verified",
        stacklevel=3,
    )


def check_file(path: Path) -> None:
    """:func:`check_seal` of a file, block by block."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ValueError(f"{path}: damaged, or not a checkpoint: it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            check_seal(data, path)


class _Digested:
    """What ``torch.save`` writes to: a file whose bytes are digested on their way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()


def _digest(body: memoryview) -> bytes:
    found = xxhash.xxh3_128()
    for low in range(0, len(body), _BLOCK):
        found.update(body[low : low + _BLOCK])
    return found.digest()


def _damaged_entry(data: memoryview) -> str | None:
    """The first entry whose checksum is wrong, or why there are none to check."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entry = archive.testzip()
    except Exception as problem:  # zipfile and zlib raise many kinds for foreign bytes
        return f"its directory ({problem})"
    return None if entry is None else f"entry {entry}"


def load_archive(source: bytes | Path, name: Path, form: int) -> dict[str, Any]:
    """Plain values and tensors on the CPU, maps of the file where ``source`` is its path. ``name``
    is the file's, for messages; ``form`` is what it says under ``format``. Raises ``ValueError``
    for what is damaged, foreign, of another format, or asks for more memory than its size."""
    is_path = isinstance(source, Path)
    try:
        size = _check_entries(_opened(source))
        content = torch.load(_opened(source), map_location="cpu", weights_only=True, mmap=is_path)
        _check_sizes(content, size)
    except Exception as problem:  # torch raises many kinds for a damaged or foreign file
        raise ValueError(f"{name}: damaged, or not a checkpoint: {problem}") from problem
    if not isinstance(content, dict) or content.get("format") != form:
        raise ValueError(f"{name}: expected a checkpoint of format {form}")
    return content


def _opened(source: bytes | Path) -> Any:
    return source if isinstance(source, Path) else io.BytesIO(source)


def _check_entries(source: Any) -> int:
    """Bytes of all entries; ``ValueError`` where they are packed, overlap, or make a bytearray."""
    with zipfile.ZipFile(source) as archive:
        entries = archive.infolist()
        size = sum(entry.file_size for entry in entries)
        room = max((entry.header_offset + entry.compress_size for entry in entries), default=0)
        if size > room or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError(f"its entries take {size} bytes, the file has room for {room}")
        for entry in entries:
            if entry.filename.endswith("data.pkl"):
                codes = pickletools.genops(archive.read(entry))
                if any(argument in _BUFFERS for _, argument, _ in codes):
                    raise ValueError("it makes a bytearray, expected tensors and plain values")
    return size


def _check_sizes(content: Any, size: int) -> None:
    """Raise ``ValueError`` if values, as a tree (shared ones count twice), exceed ``size``."""
    left, visits, numbers = [content], 0, 0
    while left:
        value = left.pop()
        visits += 1
        if isinstance(value, Tensor):
            numbers += value.numel() * value.element_size()
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            left += value
        if visits > size or numbers > _COPIES * size:
            raise ValueError(f"its values are larger than its {size} bytes can hold")
