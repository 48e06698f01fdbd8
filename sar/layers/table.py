"""The table: which class of another library each fused layer stands for."""

from __future__ import annotations

from typing import Any

from sar.layers.choice import own_forward
from sar.layers.entry import FusedLayer
from sar.layers.gat import GAT
from sar.layers.gatv2 import GATV2
from sar.layers.gcn import GCN
from sar.layers.gin import GIN
from sar.layers.sage import SAGE

_TABLE: dict[tuple[str, str], FusedLayer] = {}


def register(entry: FusedLayer) -> None:
    """Put a fused layer into the table, in place of one for the same class.

    A front end that is installed already takes it when it is installed again.
    """
    _TABLE[entry.module, entry.name] = entry


def entries() -> tuple[FusedLayer, ...]:
    """All fused layers."""
    return tuple(_TABLE.values())


def entry_of(kind: type) -> FusedLayer | None:
    """The fused layer for a class, or for the first of its bases that has one."""
    for base in kind.__mro__:
        found = _TABLE.get((base.__module__, base.__name__))
        if found is not None:
            return found
    return None


def reduction_of(module: Any) -> str | None:
    """What a module reduces of the very rows that it is given, and nothing else; ``None`` where
    that is not known. See :class:`sar.layers.entry.FusedLayer`."""
    entry = entry_of(type(module))
    if entry is None or entry.reduces is None or own_forward(module, entry) is not None:
        return None
    return entry.reduces(module)


for _entry in (SAGE, GAT, GATV2, GCN, GIN):
    register(_entry)
