"""The names with which old scripts prepare DGL; DGL's own functions and layers take their place."""

from __future__ import annotations

from typing import Any


def patch_dgl() -> None:
    """Do nothing: DGL's layers run on sharded graphs as they are, or say that they do not."""


def __getattr__(name: str) -> Any:
    # Taken from DGL at the first use only: importing this package must not import dgl.
    if name == "patched_edge_softmax":
        from dgl.nn.functional import edge_softmax

        return edge_softmax
    if name == "RelGraphConv":
        from dgl.nn import RelGraphConv

        return RelGraphConv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
