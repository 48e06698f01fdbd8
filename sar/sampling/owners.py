"""Questions to the owners of ids: who has which original id, and which edges exist."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sar.errors import PartitionError
from sar.kernels.sampling import split
from sar.partition.arrays import ORIG_ID
from sar.partition.book import EType
from sar.partition.load import PartitionData
from sar.sampling.structure import node_ids, source_ids, target_ids
from sar.sampling.swap import Swap


def ask(
    swap: Swap,
    ids: Tensor,
    bounds: Tensor,
    answer: Callable[[Tensor], Tensor],
    beside: Tensor | None = None,
) -> Tensor:
    """int64 [m]: what the owners answer to each of some ids; collective.

    Args:
        ids: int64 [m], owned as :func:`sar.kernels.sampling.split` says.
        answer: int64 of int64 [k, 2], each a row of this rank and what was asked beside it.
        beside: int64 [m].
    """
    order, rows, sizes = split(ids, bounds)
    at = order.long()
    more = torch.zeros_like(ids) if beside is None else beside
    question = torch.stack([rows.long(), more[at]], dim=1)
    asked = swap.sizes(torch.tensor(sizes).view(-1, 1)).view(-1).tolist()
    replies = swap.send(answer(swap.send(question, sizes, asked)), asked, sizes)
    return torch.empty_like(ids).index_copy_(0, at, replies)


def look_up(swap: Swap, ids: Tensor, bounds: Tensor, table: Tensor) -> Tensor:
    """int64 [m]: what the owners' tables, [k] of integers, say of each of some ids; collective."""
    return ask(swap, ids, bounds, lambda asked: table[asked[:, 0]].long())


class Directory:
    """Where the nodes of a type are, by original ids: 8 bytes a node, spread over the ranks.

    Made collectively. Raises ``ValueError`` on every rank where partitions hold no original ids.
    """

    def __init__(self, data: PartitionData, ntype: str, swap: Swap) -> None:
        self._swap, count, error = swap, data.book.num_nodes(ntype), None
        ids, size, rank = node_ids(data.book, ntype), swap.group.size, swap.group.rank
        self._bounds = torch.arange(size + 1) * count // size
        first, last = ids.bounds[rank : rank + 2].tolist()
        try:
            order, rows, sizes = split(original_ids(data, ntype), self._bounds)
        except Exception as caught:  # any, too little memory as well: the others would wait
            error = caught
        swap.group.agree(error, "original ids")
        mine = torch.stack([rows.long(), torch.arange(first, last)[order.long()]], dim=1)
        came = swap.sizes(torch.tensor(sizes).view(-1, 1)).view(-1).tolist()
        found = swap.send(mine, sizes, came)
        self._ids = torch.empty(len(found), dtype=torch.int64)
        self._ids[found[:, 0]] = found[:, 1]

    def find(self, original: Tensor) -> Tensor:
        """int64 [m] ids, as :func:`node_ids` numbers nodes, of original ids; collective."""
        return look_up(self._swap, original, self._bounds, self._ids)


def original_ids(data: PartitionData, ntype: str) -> Tensor:
    """int64 [n] of this part's nodes. Raises ``ValueError`` where the partitions hold none."""
    name, count = f"{ntype}/{ORIG_ID}", data.book.num_nodes(ntype)
    if name not in data.node_features:
        raise ValueError(f"original_ids: got True, but the partitions hold no {name!r}")
    ids = data.node_features[name].long()
    if len(ids) and (ids.min() < 0 or ids.max() >= count):
        raise PartitionError(f"{name}: got ids that are not below {count}, the number of nodes")
    return ids


class EdgeSet:
    """Which pairs of nodes a relation has: 8 bytes an edge of this part."""

    def __init__(self, data: PartitionData, etype: EType, swap: Swap) -> None:
        self._swap, self._width = swap, node_ids(data.book, etype[0]).total
        self._bounds = node_ids(data.book, etype[2]).bounds
        dst = target_ids(data, etype) - int(self._bounds[data.part_id])
        self._pairs = (dst * self._width + source_ids(data, etype)).unique().numpy()

    def has(self, src: Tensor, dst: Tensor) -> Tensor:
        """bool [m] whether there is an edge from ``src`` to ``dst``, int64 [m] ids; collective."""
        return ask(self._swap, dst, self._bounds, self._answer, src).bool()

    def _answer(self, pairs: Tensor) -> Tensor:
        wanted = (pairs[:, 0] * self._width + pairs[:, 1]).numpy()
        at = np.searchsorted(self._pairs, wanted)
        found = np.append(self._pairs, -1)[at] == wanted
        return torch.from_numpy(found.astype(np.int64))
