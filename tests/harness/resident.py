"""What an object keeps in memory: the storages of all tensors that can be reached from it."""

from __future__ import annotations

import gc
import types
from typing import Any

from torch import Tensor

from sar.comm import Group

_WORLD = (type, types.ModuleType, types.FrameType, Group)  # they lead to everything there is


def reachable_bytes(*roots: Any) -> int:
    """Bytes of the storages reachable from ``roots``, each once; not through groups of ranks."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    left = list(roots)
    while left:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, _WORLD):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, types.FunctionType):  # not its globals
            left += [cell.cell_contents for cell in thing.__closure__ or ()]
            left += [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
        else:
            left += gc.get_referents(thing)
    return sum(storages.values())
