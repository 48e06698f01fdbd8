"""Keys: integers that name the nodes and edges of a graph alike, however it is cut.

Random numbers are made from them (:mod:`sar.kernels.keyed`), so that they stay with their node or
edge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sar.errors import PartitionError
from sar.partition.arrays import ORIG_EID, ORIG_ID
from sar.partition.book import EType
from sar.partition.features import FeatureStore

if TYPE_CHECKING:
    from sar.partition.load import PartitionData

_BLOCK_ROWS = 1 << 20
ORIGINAL = "original"  # ids that no cut changes
_INT32 = torch.iinfo(torch.int32)


class Keys:
    """The keys of one part's nodes and edges, made at first need and kept.

    The original ids where the partitioning holds them (``orig_id``, ``orig_eid``), those of one
    type behind those of the types before; else the partitioning's own ids, which another
    cut of the graph does not share.
    """

    def __init__(self, data: PartitionData) -> None:
        self._book, self._part = data.book, data.part_id
        self._stores = data.node_features, data.edge_features
        self._known: dict[str | EType, Tensor] = {}

    def nodes(self, ntype: str) -> Tensor:
        """int32 or int64 [n], 0 or more: keys of the part's nodes of a type."""
        if ntype not in self._known:
            book = self._book
            earlier = book.ntypes[: book.ntypes.index(ntype)]
            before = sum(book.num_nodes(one) for one in earlier)
            own = book.node_ranges[ntype][self._part].tolist()
            name = f"{ntype}/{ORIG_ID}"
            self._known[ntype] = _keys(self._stores[0], name, before, own[0], own[1])
        return self._known[ntype]

    def node_names(self, ntype: str) -> tuple[Tensor, str]:
        """int64 [n] ids that name the part's nodes of a type, and what numbers them so.

        Original ids inside the type and ``"original"``; where the partitioning does not hold them,
        its own ids and its digest.
        """
        if f"{ntype}/{ORIG_ID}" not in self._stores[0]:
            return self.nodes(ntype).long(), self._book.digest()
        earlier = self._book.ntypes[: self._book.ntypes.index(ntype)]
        before = sum(self._book.num_nodes(one) for one in earlier)
        return self.nodes(ntype).long() - before, ORIGINAL

    def edges(self, etype: EType) -> Tensor:
        """int32 or int64 [e], 0 or more: keys of the part's edges of a type, by ascending id."""
        if etype not in self._known:
            book = self._book
            earlier = book.canonical_etypes[: book.canonical_etypes.index(etype)]
            before = sum(book.num_edges(one) for one in earlier)
            own = book.edge_ranges[etype][self._part].tolist()
            name = f"{':'.join(etype)}/{ORIG_EID}"
            self._known[etype] = _keys(self._stores[1], name, before, own[0], own[1])
        return self._known[etype]

    def loops(self, etype: EType, times: int) -> Tensor:
        """int32 or int64 [n], below 0: keys of self loops that were added to the part's nodes.

        Args:
            times: how often loops were added to the graph before.
        """
        book = self._book
        layer = book.canonical_etypes.index(etype) + times * len(book.canonical_etypes)
        return _narrow(-1 - layer * book.num_nodes() - self.nodes(etype[0]).long())


def _keys(store: FeatureStore, name: str, before: int, start: int, stop: int) -> Tensor:
    """Feature ``name`` plus ``before``; the ids from ``start`` to ``stop`` where there is none."""
    if name not in store:
        return _narrow(torch.arange(start, stop))
    dtype, shape = store.info(name)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or len(shape) != 1:
        raise PartitionError(f"{name}: got {dtype} {list(shape)}, expected integers of one column")
    keys, read = torch.empty(shape, dtype=torch.int32), store.reader(name)
    for first in range(0, len(keys), _BLOCK_ROWS):
        last = min(first + _BLOCK_ROWS, len(keys))
        block = _narrow(read(first, last).long() + before)
        if block.dtype != torch.int32:
            keys = keys.long()
        keys[first:last] = block
    return keys


def _narrow(keys: Tensor) -> Tensor:
    """As int32 where all fit."""
    fits = not len(keys) or (int(keys.min()) >= _INT32.min and int(keys.max()) <= _INT32.max)
    return keys.int() if fits else keys
