"""The part of each node, by a method of cutting; options of a cut, and the memory that it takes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sar.errors import PartitionError
from sar.files import scratch_folder
from sar.partition.arrays import GraphArrays
from sar.partition.book_json import MAX_PARTS
from sar.partition.methods.base import (
    Contiguous,
    CutOptions,
    Given,
    Method,
    Random,
    check_parts,
)
from sar.partition.methods.coarsen import Coarsen
from sar.partition.methods.hotness import Hotness
from sar.partition.methods.solver import Metis
from sar.partition.progress import Progress, silent
from sar.partition.transform import Transforms
from sar.partition.write import check_graph_name
from sar.words import BALANCES, DEFAULT_METHOD, KEEP, METHODS

_KINDS: tuple[type[Method], ...] = (Coarsen, Hotness, Metis, Random, Contiguous)
_NAMED = dict(zip(METHODS, _KINDS, strict=True))
# Of imports and buckets; of a node when clusters are made, and when halo rows are balanced, bits of
# parts left out; of an edge with METIS.
_BASE_BYTES, _NODE_BYTES, _HALO_NODE_BYTES, _METIS_EDGE_BYTES = 480 << 20, 36, 28, 160


def find_method(method: str | Method) -> Method:
    """The method of that name, or ``method`` itself. Raises ``ValueError``, ``TypeError``."""
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise TypeError(f"method is {type(method).__name__}, expected a name or a Method")
    if method not in _NAMED:
        raise ValueError(f"method is {method!r}, expected one of {', '.join(METHODS)}")
    return _NAMED[method]()


def check_balance(method: Method, balance: Iterable[str] | None) -> frozenset[str] | None:
    """The kinds to balance. Raises ``ValueError`` for an unknown one or one beyond the method."""
    if balance is None:
        return None
    wanted = frozenset([balance] if isinstance(balance, str) else balance)
    for one in sorted(wanted - {"nodes"}):
        if one not in BALANCES:
            raise ValueError(f"balance: got {one!r}, expected some of nodes, {', '.join(BALANCES)}")
        if one not in method.balances:
            can = ", ".join(sorted(method.balances)) or "nothing but nodes"
            raise ValueError(f"balance: method {method.name!r} balances {can}, got {one!r}")
    return wanted - {"nodes"}


def assign(
    graph: GraphArrays,
    num_parts: int,
    method: str | Method = DEFAULT_METHOD,
    seed: int = 0,
    *,
    balance: Iterable[str] | None = None,
    scratch: str | os.PathLike | None = None,
    unbalanced: Callable[[np.ndarray], None] | None = None,
    progress: Progress = silent,
) -> np.ndarray:
    """Part of every node: int [N], types in the order of `graph.num_nodes`, each balanced by
    itself. The same arguments give the same result.

    ``method``, ``balance``, ``seed`` are as of `PartitionOptions`, ``unbalanced``, ``progress`` as
    of `CutOptions`; ``scratch`` is for files larger than memory, by default the system's temporary
    folder. Raises ValueError for what cannot be and for a graph that `GraphArrays.validate`
    refuses; MissingDependencyError for what the method needs, PartitionError when it gives up.
    """
    found = find_method(method)
    wanted = check_balance(found, balance)
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}, expected 1 or more")
    if seed < 0:
        raise ValueError(f"seed is {seed}, expected 0 or more")
    if num_parts > max(graph.total_nodes, 1):
        raise ValueError(
            f"num_parts is {num_parts}, but graph {graph.name!r} has {graph.total_nodes} nodes: "
            "expected at most one part a node"
        )
    graph.validate()  # loops over edges do not check ids
    if num_parts == 1 and not isinstance(found, Given):
        return np.zeros(graph.total_nodes, dtype=np.int32)
    with scratch_folder(None if scratch is None else Path(scratch)) as folder:
        options = CutOptions(num_parts, folder, seed, wanted, unbalanced, progress)
        parts = found.assign(graph, options)
    what = f"method {found.name!r} gave wrong parts"  # perhaps it is the user's own
    return check_parts(parts, graph.total_nodes, num_parts, what, PartitionError)


@dataclass(frozen=True)
class PartitionOptions:
    """How a graph is cut and written.

    Attributes:
        num_parts: 1 or more; with method "keep" as many as the input has.
        method: a name of `sar.partition.cut.METHODS`, "keep" for the parts of partitions that are
            read, or a `Method`.
        balance: of "edges", "halo" and "train", what parts share equally beside nodes; ``None``:
            what the method does by itself.
        seed: of the cut, 0 or more.
        transforms: what is done to edges first.
        allow_nan: take data that are no finite numbers.
        memory: bytes of memory that the whole run may use, the system's cache of files left out;
            ``None``: no bound.
        name: of the graph and its JSON. format: "dgl" or "pyg". overwrite: replace partitions.
    """

    num_parts: int
    method: str | Method = DEFAULT_METHOD
    balance: frozenset[str] | None = None
    seed: int = 0
    transforms: Transforms = Transforms()
    allow_nan: bool = False
    memory: int | None = None
    name: str | None = None
    format: str = "dgl"
    overwrite: bool = False

    def check(self) -> None:
        """Raise ValueError or TypeError for what can be told before anything is read."""
        if not isinstance(self.num_parts, int):
            raise TypeError(f"num_parts is {self.num_parts!r}, expected an int")
        if self.num_parts < 1:
            raise ValueError(f"num_parts is {self.num_parts}, expected 1 or more")
        if self.num_parts > MAX_PARTS:
            raise ValueError(f"num_parts is {self.num_parts}, expected at most {MAX_PARTS}")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, expected 0 or more")
        if self.name is not None:
            check_graph_name(self.name)
        if self.method == KEEP:
            if self.balance:
                raise ValueError(f"method {KEEP!r} balances nothing, got {sorted(self.balance)}")
        else:
            check_balance(find_method(self.method), self.balance)


def check_memory(graph: GraphArrays, options: PartitionOptions) -> None:
    """Raise ``ValueError`` naming the need where ``options.memory`` is below it: the peak of a run
    as it was measured, and a tenth."""
    a_node = _NODE_BYTES
    if options.balance and "halo" in options.balance:
        a_node = max(a_node, _HALO_NODE_BYTES + 8 * -(-options.num_parts // 64))
    needed = _BASE_BYTES + a_node * graph.total_nodes
    if options.method == Metis.name:
        needed += _METIS_EDGE_BYTES * graph.total_edges
    if options.memory is not None and needed > options.memory:
        enough = math.ceil(needed / 2**30 * 100) / 100
        raise ValueError(
            f"memory is {options.memory:,} bytes ({options.memory / 2**30:.2f} GiB), but cutting "
            f"{graph.total_nodes:,} nodes into {options.num_parts} needs about {enough:.2f} GiB"
        )
