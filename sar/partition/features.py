"""Features of one part: a mapping from names to tensors that stay in their file until read.

Keys are integers that name nodes and edges alike, however the graph is cut. Random numbers are made
from them (:mod:`sar.kernels.keyed`), so that they stay with their node or edge.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sar import expect
from sar.partition.arrays import ORIG_EID, ORIG_ID, EType
from sar.partition.column import Column, RowFile, check
from sar.partition.progress import blocks, rows_in

if TYPE_CHECKING:
    from sar.partition.load import PartitionData

_MOST_SHOWN = 20
ORIGINAL = "original"  # ids that no cut changes
_INT32 = torch.iinfo(torch.int32)


class FeatureStore(MutableMapping):
    """Named feature tensors, read from the mapped file at each access and never cached.

    ``store[name]`` is a fresh CPU tensor; assigning a name keeps that tensor in memory instead.
    A name is ``"type/column"``. ``"column"`` alone will do where one type has it, and so will
    ``"relation/column"``; where several types have it, ``ValueError`` lists them.
    uint8 features whose name ends in ``_mask(s)`` are read as bool, as the files have no bool.
    """

    def __init__(self, columns: Mapping[str, Column] | None = None) -> None:
        self._items: dict[str, Column | Tensor | Callable[[], Tensor]] = dict(columns or {})

    def map(self, name: str, rows: Column) -> None:
        self._items[name] = rows

    def synthesize(self, name: str, make: Callable[[], Tensor]) -> None:
        """Add a feature that ``make()`` computes at each access."""
        self._items[name] = make

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items or bool(self._called(name))

    def __setitem__(self, name: str, value: Tensor) -> None:
        expect.instance(value, f"feature {name!r}", Tensor, "a Tensor")
        self._items[self._full(name) if name in self else name] = value

    def __delitem__(self, name: str) -> None:
        del self._items[self._full(name)]

    def _called(self, name: object) -> list[str]:
        """Names of columns, each with its type, that end as ``name`` says."""
        return [key for key in self._items if name in _short_names(key)]

    def _full(self, name: str) -> str:
        """The name with its type."""
        found = [name] if name in self._items else self._called(name)
        if len(found) > 1:
            listed = ", ".join(map(repr, found[:_MOST_SHOWN]))
            raise ValueError(f"feature {name!r}: is of several types, expected one of {listed}")
        if not found:
            raise UnknownFeature(_unknown(name, list(self._items)))
        return found[0]

    def __getitem__(self, name: str) -> Tensor:
        item = self._resolve(name)
        return item if isinstance(item, Tensor) else self.reader(name)(0, len(item))

    def __repr__(self) -> str:
        return f"FeatureStore({', '.join(self._items)})"

    def _resolve(self, name: str) -> Column | Tensor:
        item = self._items[self._full(name)]
        return item() if callable(item) else item

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``[start, stop)`` of a feature, without reading the others."""
        return self.reader(name)(start, stop)

    def reader(self, name: str) -> Callable[[int, int], Tensor]:
        """:meth:`rows` of one feature, for many blocks: what is computed is computed once."""
        item = self._resolve(name)
        if isinstance(item, Tensor):
            return lambda start, stop: item[start:stop]
        if _is_mask(name, item.dtype):
            return lambda start, stop: item.read(start, stop).ne(0)
        return item.read

    def in_memory(self, name: str) -> bool:
        """Whether a feature is a tensor that was assigned."""
        return isinstance(self._items.get(self._full(name)), Tensor)

    def info(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """``(dtype, shape)`` of a feature, without reading it."""
        item = self._resolve(name)
        dtype = torch.bool if _is_mask(name, item.dtype) else item.dtype
        return dtype, tuple(item.shape)

    def get_as(self, name: str, dtype: torch.dtype) -> Tensor:
        """A feature converted to ``dtype`` block by block: no full copy in the stored dtype."""
        item = self._resolve(name)
        return item.to(dtype) if isinstance(item, Tensor) else item.read(0, len(item), dtype)

    def to_file(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        folder: str | os.PathLike | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> RowFile:
        """A feature in a temporary file in ``folder``, written block by block, never in memory.

        Each block is cast to ``dtype`` (default: its own) and then given to ``change``.
        """
        stored, shape = self.info(name)
        dtype, read = dtype or stored, self.reader(name)
        step = rows_in(math.prod(shape[1:]) * dtype.itemsize)

        def changed() -> Iterator[Tensor]:
            for low, high in blocks(shape[0], size=step):
                block = read(low, high).to(dtype)
                yield block if change is None else change(block)

        return RowFile(shape, dtype, changed(), folder)


def _short_names(key: str) -> tuple[str, ...]:
    """``column``, and ``relation/column`` of edges: what the column of a type may be called."""
    owner, _, name = key.rpartition("/")
    relation = owner.split(":")[1:-1]
    return name, *(f"{one}/{name}" for one in relation)


class UnknownFeature(KeyError):
    """A ``KeyError`` that is shown as it is written, not quoted."""

    def __str__(self) -> str:
        return str(self.args[0])


def _unknown(name: object, known: list[str]) -> str:
    """The message: the nearest known name, with or without its type, and all known ones."""
    word = str(name)
    bare = {one: one.rpartition("/")[2] for one in known}
    near = [one for one in known if bare[one] == word.rpartition("/")[2]]
    near += difflib.get_close_matches(word, known, n=1)
    near += [one for one in known if bare[one] in difflib.get_close_matches(word, bare.values())]
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    shown = ", ".join(map(repr, known[:_MOST_SHOWN])) or "none"
    more = f" and {len(known) - _MOST_SHOWN} more" if len(known) > _MOST_SHOWN else ""
    return f"no feature {word!r}{hint} there are: {shown}{more}"


def _is_mask(name: str, dtype: torch.dtype) -> bool:
    return dtype == torch.uint8 and name.endswith(("_mask", "_masks"))


class Keys:
    """The keys of one part's nodes and edges, made at first need and kept.

    Original ids (``orig_id``, ``orig_eid``) where the partitions hold them, the types one behind
    the other; else the partitioning's own ids, which another cut of the graph does not share.
    """

    def __init__(self, data: PartitionData) -> None:
        self._book, self._part = data.book, data.part_id
        self._stores = data.node_features, data.edge_features
        self._known: dict[str | EType, Tensor] = {}

    def nodes(self, ntype: str) -> Tensor:
        """int32 or int64 [n], 0 or more: keys of the part's nodes of a type."""
        if ntype not in self._known:
            own, name = self._book.node_ranges[ntype][self._part], f"{ntype}/{ORIG_ID}"
            self._known[ntype] = _keys(self._stores[0], name, self._before(ntype), own)
        return self._known[ntype]

    def _before(self, ntype: str) -> int:
        earlier = self._book.ntypes[: self._book.ntypes.index(ntype)]
        return sum(map(self._book.num_nodes, earlier))

    def node_names(self, ntype: str) -> tuple[Tensor, str]:
        """int64 [n] ids of the part's nodes of a type, and a name of their numbering: original ids
        inside the type and ``"original"``, or the partitioning's own ids and its digest."""
        if f"{ntype}/{ORIG_ID}" not in self._stores[0]:
            return self.nodes(ntype).long(), self._book.digest()
        return self.nodes(ntype).long() - self._before(ntype), ORIGINAL

    def edges(self, etype: EType) -> Tensor:
        """int32 or int64 [e], 0 or more: keys of the part's edges of a type, by ascending id."""
        if etype not in self._known:
            book, name = self._book, f"{':'.join(etype)}/{ORIG_EID}"
            earlier = book.canonical_etypes[: book.canonical_etypes.index(etype)]
            own, before = book.edge_ranges[etype][self._part], sum(map(book.num_edges, earlier))
            self._known[etype] = _keys(self._stores[1], name, before, own)
        return self._known[etype]

    def loops(self, etype: EType, times: int) -> Tensor:
        """int32 or int64 [n], below 0: keys of self loops added to the part's nodes, after loops
        were added ``times`` times before."""
        book = self._book
        layer = book.canonical_etypes.index(etype) + times * len(book.canonical_etypes)
        return narrow(-1 - layer * book.num_nodes() - self.nodes(etype[0]).long())


def _keys(store: FeatureStore, name: str, before: int, own: np.ndarray) -> Tensor:
    """Feature ``name`` plus ``before``; the ids of the range ``own`` where there is none."""
    if name not in store:
        return narrow(torch.arange(*own.tolist()))
    dtype, shape = store.info(name)
    is_number = dtype.is_floating_point or dtype.is_complex or dtype == torch.bool
    what = f"{name}: got {dtype} {list(shape)}"
    check(len(shape) == 1 and not is_number, f"{what}, expected integers of one column")
    keys, read = torch.empty(shape, dtype=torch.int32), store.reader(name)
    for first, last in blocks(len(keys)):
        block = narrow(read(first, last).long() + before)
        if block.dtype != torch.int32:
            keys = keys.long()
        keys[first:last] = block
    return keys


def narrow(keys: Tensor) -> Tensor:
    """In int32 where that holds them."""
    fits = not len(keys) or (int(keys.min()) >= _INT32.min and int(keys.max()) <= _INT32.max)
    return keys.int() if fits else keys
