"""How a graph is cut and written, and what memory that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sar.partition.arrays import GraphArrays
from sar.partition.book_json import MAX_PARTS
from sar.partition.cut import check_balance, find_method
from sar.partition.methods.base import Method
from sar.partition.methods.solver import Metis
from sar.partition.transform import Transforms
from sar.partition.write import check_graph_name
from sar.words import DEFAULT_METHOD, KEEP

# Of imports and buckets; of a node when clusters are made, and when halo rows are balanced, bits of
# parts left out; of an edge with METIS.
_BASE_BYTES, _NODE_BYTES, _HALO_NODE_BYTES, _METIS_EDGE_BYTES = 480 << 20, 36, 28, 160


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
    """Raises ``ValueError`` for a budget that is too small, and says what is needed."""
    needed = memory_needed(graph, options)
    if options.memory is not None and needed > options.memory:
        enough = math.ceil(needed / 2**30 * 100) / 100
        raise ValueError(
            f"memory is {options.memory:,} bytes ({options.memory / 2**30:.2f} GiB), but cutting "
            f"{graph.total_nodes:,} nodes into {options.num_parts} needs about {enough:.2f} GiB"
        )


def memory_needed(graph: GraphArrays, options: PartitionOptions) -> int:
    """Bytes at the peak of a run, about: measured, with a tenth to spare."""
    a_node = _NODE_BYTES
    if options.balance and "halo" in options.balance:
        a_node = max(a_node, _HALO_NODE_BYTES + 8 * -(-options.num_parts // 64))
    needed = _BASE_BYTES + a_node * graph.total_nodes
    if options.method == Metis.name:
        needed += _METIS_EDGE_BYTES * graph.total_edges
    return needed
