"""Reading what ``torch.save`` wrote without trusting it: nothing is made that is much larger.

A digest tells damage, not forgery. ``torch.load`` runs nothing that a file names, but would inflate
entries, and make buffers, tensors without numbers of their own, and nests that refer to themselves.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_COPIES = 8  # of a tensor's numbers, under several names
_BUFFERS = ("builtins bytearray", "__builtin__ bytearray")


def load_archive(source: bytes | Path, name: Path) -> Any:
    """Plain values and tensors on the CPU, maps of the file where ``source`` is its path.

    Args:
        name: of the file, for messages.

    Raises ``ValueError`` for what is damaged, foreign, or asks for more memory than its size.
    """
    try:
        is_mapped = isinstance(source, Path)
        file: Any = source if isinstance(source, Path) else io.BytesIO(source)
        size = _check_entries(file)
        if not is_mapped:
            file.seek(0)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
        _check_sizes(content, size)
    except Exception as problem:  # torch raises many kinds for a damaged or foreign file
        raise ValueError(f"{name}: damaged, or not a checkpoint: {problem}") from problem
    return content


def _check_entries(source: Any) -> int:
    """The bytes of all entries, which lie one after another as they are."""
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
    """Visit values as a tree: what is referred to twice counts twice."""
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
