"""What a method of cutting is, and the methods that look at no edges."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from sar.errors import PartitionError, SarError
from sar.partition.arrays import GraphArrays
from sar.partition.column import map_array
from sar.partition.progress import Progress, silent

# A line of a text file; more digits are no part that 32 bits can number.
_PART = re.compile(r"\s*\+?\d{1,9}\s*")


@dataclass(frozen=True)
class CutOptions:
    """What a cut is asked for.

    Attributes:
        num_parts: 1 or more.
        scratch: an empty folder for files that are larger than memory; removed after the cut.
        seed: the same graph and options give the same parts.
        balance: of `BALANCES`, what parts share equally beside the nodes of each type; ``None``:
            what the method does by itself.
        unbalanced: is called with the parts that the same cut has without ``balance``, by a method
            that balances them afterwards.
        progress: called with what is done, how much of it, and of how much.
    """

    num_parts: int
    scratch: Path
    seed: int = 0
    balance: frozenset[str] | None = None
    unbalanced: Callable[[np.ndarray], None] | None = None
    progress: Progress = silent


class Method(ABC):
    """Decides who owns which node. Subclass it, and hand an instance to `sar.partition_graph`.

    Attributes:
        name: what the partitions' JSON says under ``part_method``.
        balances: of `BALANCES`, what it can share equally where it is asked.
    """

    name: ClassVar[str]
    balances: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def assign(self, graph: GraphArrays, options: CutOptions) -> np.ndarray:
        """Part of every node: int [N], types in the order of ``graph.num_nodes``.

        ``graph`` has edges that may lie in mapped files: go through them in blocks. There are at
        least as many nodes as parts, and more than one part.
        """


class Contiguous(Method):
    """Runs of consecutive ids, of equal length for each node type."""

    name = "contiguous"

    def assign(self, graph: GraphArrays, options: CutOptions) -> np.ndarray:
        return equal_shares(graph, options.num_parts, None)


class Random(Method):
    """Each node type is shuffled and dealt out equally."""

    name = "random"

    def assign(self, graph: GraphArrays, options: CutOptions) -> np.ndarray:
        return equal_shares(graph, options.num_parts, np.random.default_rng(options.seed))


def equal_shares(graph: GraphArrays, num_parts: int, rng: np.random.Generator | None) -> np.ndarray:
    """Parts of equal sizes per type, in order of id, or shuffled by ``rng``."""
    parts = []
    for number, count in enumerate(graph.num_nodes.values()):
        part = (np.arange(count, dtype=np.int64) * num_parts // max(count, 1)).astype(np.int32)
        if rng is not None:
            # Rotate, so that the types' spare nodes do not all land in the same parts.
            part = (rng.permutation(part) + number) % num_parts
        parts.append(part)
    return np.concatenate(parts)


class Given(Method):
    """Parts from files, or from an array.

    Args:
        source: integers [N] (array, tensor, list), types one after another; or a path: a `.npy` of
            them, a text file of one part a line, or a folder with a `.npy` or `.txt` for each node
            type, by its name, as DGL's partitioning pipeline has them.
    """

    name = "given"

    def __init__(self, source: ArrayLike | str | os.PathLike) -> None:
        self._source = source
        if isinstance(source, (str, os.PathLike)) and not os.path.exists(source):
            raise FileNotFoundError(f"assignment {os.fspath(source)!r}: there is no such file")

    def assign(self, graph: GraphArrays, options: CutOptions) -> np.ndarray:
        """Raises ``ValueError`` naming file, row and value, ``FileNotFoundError``,
        ``PartitionError`` for a damaged file."""
        if not isinstance(self._source, (str, os.PathLike)):
            sizes = graph.total_nodes, options.num_parts
            return check_parts(self._source, *sizes, "assignment").astype(np.int32)
        path = Path(self._source)
        if path.is_dir():
            columns = []
            for ntype, count in graph.num_nodes.items():
                files = (path / f"{ntype}{suffix}" for suffix in (".npy", ".txt"))
                file = next(filter(Path.is_file, files), None)
                if file is None:
                    raise FileNotFoundError(f"{path}: holds no {ntype}.npy and no {ntype}.txt")
                columns.append(_read(file, count, options.num_parts))
            return np.concatenate(columns)
        return _read(path, graph.total_nodes, options.num_parts)


def _read(path: Path, count: int, num_parts: int) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if path.suffix == ".npy":
        try:
            return check_parts(map_array(path), count, num_parts, str(path)).astype(np.int32)
        except SarError as error:
            raise PartitionError(str(error)) from error
    parts = np.empty(count, np.int32)
    rows = 0
    with open(path, encoding="ascii", errors="replace") as file:
        for rows, line in enumerate(file, 1):
            if not _PART.fullmatch(line):
                raise ValueError(
                    f"{path}: row {rows - 1} is {line.rstrip()[:40]!r}, expected a part from 0 to "
                    f"{num_parts - 1}"
                )
            if rows <= count:
                parts[rows - 1] = int(line)
    if rows != count:
        raise ValueError(f"{path}: has {rows} rows, expected {count}, one for each node")
    return check_parts(parts, count, num_parts, str(path))


def check_parts(
    parts: Any, count: int, num_parts: int, what: str, error: type[Exception] = ValueError
) -> np.ndarray:
    """``parts`` as an array, checked to be one of each node; an ``error`` begins with ``what``."""
    found = np.asarray(parts)
    if num_parts < 1:
        raise error(f"num_parts is {num_parts}, expected 1 or more")
    if found.shape != (count,) or found.dtype.kind not in "iu":
        raise error(
            f"{what}: got {found.dtype} of shape {found.shape}, expected {count} integers, one "
            "for each node"
        )
    wrong = np.flatnonzero((found < 0) | (found >= num_parts))
    if len(wrong):
        raise error(
            f"{what}: row {wrong[0]} is part {found[wrong[0]]}, expected 0 to {num_parts - 1}"
        )
    return found
