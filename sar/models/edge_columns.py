"""Columns of edges as models get them: which parameter each goes to, and what it is of a graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from sar import registry
from sar.graph import GraphView
from sar.options import closest

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def usual_names(front_end: str) -> Mapping[str, str]:
    """The names that a library's models have for columns of edges, and what partitions call these.

    They are the front end's ``COLUMNS``.
    """
    names: Mapping[str, str] = getattr(registry.front_end(front_end), "COLUMNS", {})
    return names


def bare(name: str) -> str:
    """The column that an argument's name says, without its type and ``_dict``."""
    return name.rpartition("/")[2].removesuffix("_dict")


def stored_name(column: str, known: Collection[str], usual: Mapping[str, str]) -> str | None:
    """Which of the ``known`` columns that partitions hold a model calls ``column``."""
    found = column if column in known else usual.get(column)
    return found if found is not None and found in known else None


def assign(
    takes: Sequence[inspect.Parameter],
    columns: Sequence[str],
    usual: Mapping[str, str],
    may_read: bool,
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Columns by the parameters that they go to, and those that are read from the graph instead,
    where that is known and no parameter is for columns; see :func:`sar.models.read_call`."""
    takes = [one for one in takes if one.kind in _BY_NAME]
    needed = [one.name for one in takes if one.default is one.empty]
    optional = [o.name for o in takes if o.name not in needed and bare(o.name) in usual]
    names, left, found = [*needed, *optional], list[str](), dict[str, str]()
    for word in columns:
        to, is_said, column = word.rpartition("=")
        if is_said and to not in [one.name for one in takes]:
            known = ", ".join(names) or "none"
            raise ValueError(
                f"edge_features: got {word!r}, expected one of forward's parameters "
                f"{known}{closest(to, names)}"
            )
        to = to or next((name for name in names if _is_called(column, name, usual)), "")
        if to in found:
            raise ValueError(f"edge_features: got two columns for {to}: {found[to]} and {column}")
        if to:
            found[to] = column
        else:
            left.append(column)
    if left and not names and may_read:
        return {}, tuple(left)
    found |= dict(zip(_open(names, needed, found, left), left, strict=True))
    found |= {name: name for name in needed if name not in found}
    ends = {name: "_dict" if name.endswith("_dict") else "" for name in found}
    return {name: column + ends[name] for name, column in found.items()}, ()


def _open(
    names: list[str], needed: list[str], found: Collection[str], left: list[str]
) -> list[str]:
    """The parameters that ``left`` columns go to, in order; raises unless that is clear."""
    none = [name for name in names if name not in found]
    some = [name for name in none if name in needed]
    chosen = some or none
    if not left:
        return []
    if len(left) != len(chosen) or (len(chosen) > 1 and not some):
        said = f"{chosen[0] if chosen else 'PARAMETER'}={left[0]}"
        raise ValueError(
            f"edge_features: got {', '.join(left)} for the parameters {', '.join(chosen) or 'none'}"
            f" of forward; expected one for each, or which is which: {said}"
        )
    return chosen


def _is_called(column: str, parameter: str, usual: Mapping[str, str]) -> bool:
    """Whether a parameter is one for a column of this name, with its type or without."""
    name = parameter.removesuffix("_dict")
    return column.rpartition("/")[2] in (name, usual.get(name))


Getters = Mapping[Any, Callable[[str], Any]]  # what reads a column of each relation's edges


def getters_of(graph: GraphView) -> Getters:
    return {e: graph._over(graph._store, [e]).edge_column for e in graph.canonical_etypes}


def argument_of(getters: Getters, name: str, usual: Mapping[str, str]) -> Any:
    """The column that an argument of this name is; by relation, of those that have it, for
    ``_dict``. Raises ``KeyError`` where none has it."""
    found = by_relation(getters, name, usual)
    if name.endswith("_dict"):
        return found
    if len(getters) > 1:
        raise ValueError(f"call: got {name!r} for several relations, expected {name}_dict")
    return next(iter(found.values()))


def by_relation(getters: Getters, name: str, usual: Mapping[str, str]) -> dict[Any, Any]:
    """The column of each relation that has it, by its name or its usual one."""
    base, found = bare(name), dict[Any, Any]()
    for etype, get in getters.items():
        for stored in dict.fromkeys([base, usual.get(base, base)]):
            with suppress(KeyError):
                found[etype] = get(stored)
                break
    if not found:
        raise KeyError(f"no column of edges {base!r}")
    return found
