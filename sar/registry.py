"""Front ends by name: each makes batches and graphs look like those of another library.

Whoever needs one asks for it here, and it is imported then. So nothing else names a library.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class FrontEnd(Protocol):
    """What a front end offers; a module with these names is one.

    Attributes:
        BLOCKS: what its blocks are called, where its batches are lists of them, one a hop, for
            which all nodes draw again at each hop; else ``None``.
        LAYERS: what it says of its library's layers, a :class:`sar.models.known.Layers`.
        COLUMNS: names that its models have for columns of edges, and what partitions usually call
            these; it may be left out.

    What :func:`sar.validate` asks for may be left out as well: ``is_graph(source)``, whether an
    object is a graph of the library; ``whole_graph(arrays)``, the library's graph of
    ``GraphArrays``, and ``rank_graph(partition_data)``, a rank's, collective; of both
    ``node_columns(graph)``, columns by node type, and ``num_relations(graph)``; ``FEATURES`` and
    ``LABELS``, usual names of columns; ``PLACES``, the usual arguments of a model.
    """

    BLOCKS: str | None

    LAYERS: Any

    def install(self) -> None:
        """Let the library's layers take sharded graphs; called before a model runs on one."""

    def batch_maker(self, subgraph_type: str) -> Callable[[Any], Any]:
        """What makes a batch of a :class:`sar.sampling.Drawn`."""

    def read_batch(
        self, batch: Any, input_type: str, name: str, device: Any
    ) -> tuple[Any, dict[str, Any], Any]:
        """What a model is called with of a batch, column ``name`` of its input nodes by type, and
        which of the loader's inputs the seeds are; all on ``device``."""

    def arguments(self, names: Sequence[str], graph: Any, features: Any) -> list[Any]:
        """What parameters of a model get by their names, see :class:`sar.models.Call`.

        Args:
            graph: a sharded graph, or what ``read_batch`` gave.
        """

    def hold(self, graph: Any, values: Mapping[str, Any]) -> Any:
        """What a model gets that takes all in one object; may be left out where there is none."""


_ENTRIES: dict[str, tuple[Any, str | None]] = {}  # a module's name until it is imported; library


def register(name: str, front_end: FrontEnd | str, library: str | None = None) -> None:
    """Add a front end, or the name of the module that is one; ``library`` has to be installed for
    it."""
    _ENTRIES[name] = front_end, library


def front_end(name: str) -> Any:
    """The front end of that name, imported now; ``ValueError`` where there is none."""
    if name not in _ENTRIES:
        near = difflib.get_close_matches(name, _ENTRIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"front end: got {name!r}, expected one of {', '.join(_ENTRIES)}{hint}")
    found, library = _ENTRIES[name]
    if isinstance(found, str):
        found = importlib.import_module(found)
        _ENTRIES[name] = found, library
    return found


def front_ends() -> list[str]:
    return list(_ENTRIES)


def imported() -> list[Any]:
    """The front ends that somebody has imported."""
    given = {name: found for name, (found, _) in _ENTRIES.items()}
    used = [n for n, found in given.items() if not isinstance(found, str) or found in sys.modules]
    return [front_end(name) for name in used]


def modules_in_use() -> list[str]:
    """Libraries that this process has imported, and the modules of their front ends."""
    used = [(found, library) for found, library in _ENTRIES.values() if library in sys.modules]
    names = [(library, getattr(found, "__name__", found)) for found, library in used]
    return [name for pair in names for name in pair if isinstance(name, str)]


def front_end_of(library: str) -> str | None:
    """The name of the front end that is for a library; nothing is imported."""
    return next((name for name, (_, one) in _ENTRIES.items() if one == library), None)


def is_installed(name: str) -> bool:
    """Whether the front end's library is there; nothing is imported."""
    library = _ENTRIES[name][1] if name in _ENTRIES else None
    return library is None or importlib.util.find_spec(library) is not None


def install() -> None:
    """Let layers of all libraries whose front ends are in use take sharded graphs."""
    for one in imported():
        one.install()
