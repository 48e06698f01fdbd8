"""What a run that is continued has to share with its checkpoint."""

from __future__ import annotations

import warnings
from typing import Any

from sar.comm import Group
from sar.graph import GraphView


def graph_identity(graph: Any) -> dict[str, Any]:
    """What tells the graph and its cut from others; empty for no graph of the library's."""
    if not isinstance(graph, GraphView):
        return {}
    book = graph._store.book
    return {"graph": book.graph_digest, "cut": book.digest(), "num_parts": book.num_parts}


def check_graph(saved: dict[str, Any] | None, mine: dict[str, Any], group: Group) -> None:
    """Refuse to go on with another graph, where partitions tell it; the same on all ranks."""
    if not mine or not saved:
        return
    same_cut = saved["cut"] == mine["cut"]
    known = saved["graph"] is not None and mine["graph"] is not None
    same_graph = saved["graph"] == mine["graph"] if known else same_cut
    if same_graph or same_cut:
        return
    if known or saved["num_parts"] == mine["num_parts"]:
        raise ValueError(
            "the checkpoint was made with another graph, or another cut of partitions that do "
            "not tell what they are cuts of; train on the same one, or start anew"
        )
    if group.rank == 0:
        warnings.warn(
            "the checkpoint was made with another number of parts, and the partitions hold no "
            "digest of the graph: that it is the same one cannot be told",
            stacklevel=4,
        )


def check_config(saved: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raise ``ValueError`` that names the options in which the run differs from its checkpoint."""
    names = [name for name in {**saved, **mine} if saved.get(name) != mine.get(name)]
    if names:
        parts = [f"{name} {saved.get(name)!r}, now {mine.get(name)!r}" for name in names]
        raise ValueError(
            f"the checkpoint was made with other options: {'; '.join(parts)}. Give the same ones, "
            "or start anew in another folder"
        )
