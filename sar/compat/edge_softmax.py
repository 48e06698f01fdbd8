"""Softmax over the edges that end in a node: DGL's own function, which reaches ours."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Taken from DGL at the first use only: importing this package must not import dgl.
    if name == "edge_softmax":
        from dgl.nn.functional import edge_softmax

        return edge_softmax
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
