"""Files of torch whose every byte is known: a digest stands behind the archive.

The file is what ``torch.save`` writes, and ``torch.load`` reads it. Behind the archive, where
readers of zip files look for nothing, stand 16 bytes of a mark and 16 of an XXH3 digest of all that
comes before. It tells damage, not forgery.
"""

from __future__ import annotations

import io
import mmap
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from sar.files import write_whole

_MARK = b"\nsar xxh3-128 of:"
_SEAL_BYTES = len(_MARK) + 16
_BLOCK = 1 << 24


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` with its digest, flushed to the disk, whole or not at all.

    Raises ``OSError`` that names ``path``.
    """

    def write(file: BinaryIO) -> None:
        digested = _Digested(file)
        torch.save(content, digested)  # type: ignore[arg-type]
        file.write(_MARK + digested.digest.digest())

    write_whole(path, write, durable=True)


def check_seal(data: Any, name: str | os.PathLike) -> None:
    """Raise ``ValueError`` for bytes that are not all as they were written.

    The message names the entry of the archive that is damaged, where it is one. Files from before
    there were digests are taken at the checksums of their entries, with a warning.
    """
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
