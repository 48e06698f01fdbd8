"""What a method of cutting is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from sar.partition.arrays import GraphArrays
from sar.partition.progress import Progress, silent


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
