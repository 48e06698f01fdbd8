"""Values of tensors and plain data as bytes, and back; nothing that is read is executed."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.errors import SarError

_LENGTH = 8  # bytes of the length of the head
_ALIGNMENT = 8


def packed(value: Any) -> Tensor:
    """uint8 [n]: dictionaries, lists, tuples, strings, numbers, ``None`` and tensors on the CPU."""
    tensors: list[Tensor] = []
    head = json.dumps(_skeleton(value, tensors)).encode()
    sizes = [_padded(_LENGTH + len(head)), *(_padded(one.nbytes) for one in tensors)]
    out, at = torch.zeros(sum(sizes), dtype=torch.uint8), sizes[0]
    out[:_LENGTH] = torch.from_numpy(np.array([len(head)], np.int64).view(np.uint8))
    out[_LENGTH : _LENGTH + len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for one, size in zip(tensors, sizes[1:], strict=True):
        out[at : at + one.nbytes] = one.contiguous().view(-1).view(torch.uint8)
        at += size
    return out


def unpacked(data: Tensor) -> Any:
    """What :func:`packed` was given; tensors are views of ``data``. Tuples come as lists."""
    length = int(data[:_LENGTH].view(torch.int64))
    head = json.loads(bytes(data[_LENGTH : _LENGTH + length].numpy()))
    return _filled(head, data, [_padded(_LENGTH + length)])


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _skeleton(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"t": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, dict):
        pairs = [[_skeleton(k, tensors), _skeleton(v, tensors)] for k, v in value.items()]
        return {"d": pairs}
    if isinstance(value, (list, tuple)):
        return {"l": [_skeleton(one, tensors) for one in value]}
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"got {type(value).__name__}, expected tensors and plain data")


def _filled(head: Any, data: Tensor, at: list[int]) -> Any:
    if not isinstance(head, dict):
        return head
    if "d" in head:
        pairs = [(_filled(k, data, at), _filled(v, data, at)) for k, v in head["d"]]
        return {tuple(k) if isinstance(k, list) else k: v for k, v in pairs}
    if "l" in head:
        return [_filled(one, data, at) for one in head["l"]]
    name, shape = head["t"]
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise SarError(f"a message: got {name!r}, expected the name of a dtype")
    size = math.prod(shape) * dtype.itemsize
    start, at[0] = at[0], at[0] + _padded(size)
    if not size:
        return torch.empty(shape, dtype=dtype)
    return data[start : start + size].view(dtype).view(shape)
