"""Node types and relations of a graph that is planned, and rows that travel for some of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sar.errors import SarError
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO
from sar.partition.book import EType
from sar.partition.cover import count_fewest
from sar.partition.load import load_partition

Ends = tuple[np.ndarray, np.ndarray, Sequence[int]]  # src, dst, bounds by the part of the source


@dataclass(frozen=True)
class Types:
    """What a graph is made of.

    Attributes:
        nodes: by node type.
        relations, edges: the canonical edge types, and how many edges each has.
        features: columns of the input, of the node types that have some.
        target: the node type that is predicted.
    """

    nodes: dict[str, int]
    relations: list[EType]
    edges: list[int]
    features: dict[str, int]
    target: str

    @classmethod
    def of_one(cls, features: int) -> Types:
        """Of a graph with one type of nodes and of edges."""
        return cls({NTYPE_HOMO: 1}, [ETYPE_HOMO], [1], {NTYPE_HOMO: features}, NTYPE_HOMO)

    @property
    def is_homogeneous(self) -> bool:
        return len(self.nodes) == len(self.relations) == 1

    @property
    def width(self) -> int | dict[str, int]:
        """Columns of the input, by node type where there are several."""
        return self.features[self.target] if self.is_homogeneous else self.features


@dataclass(frozen=True)
class SetBytes:
    """Of some relations of a graph of several types whose rows travel together: bytes of a row in
    each exchange, as in :class:`sar.plan.Costs`."""

    relations: list[EType]
    pulled_bytes: list[int]
    summed_bytes: list[int]
    turned_bytes: list[tuple[list[int], list[int]]]


class Travel(NamedTuple):
    """Rows of an exchange: ``"pulled"`` source rows, ``"summed"`` for sums of copied rows, where
    partial sums may travel, or ``"ended"``, in which edges end; of some relations together."""

    kind: str
    relations: tuple[EType, ...]


@dataclass
class RowCounts:
    """Rows of exchanges on partitions, int64 [P, P], at [p, q] what p receives from q.

    The parts are read for each :meth:`count`, and what was counted is kept.
    """

    path: str | os.PathLike
    num_parts: int
    num_nodes: Mapping[str, Sequence[int]]
    known: dict[Travel, np.ndarray] = field(default_factory=dict)

    def count(self, wanted: Iterable[Travel]) -> None:
        """Count what is not known yet."""
        new = [one for one in dict.fromkeys(wanted) if one not in self.known]
        for one in new:
            self.known[one] = np.zeros((self.num_parts, self.num_parts), np.int64)
        for part in range(self.num_parts if new else 0):
            with warnings.catch_warnings():  # that there are no digests is known
                warnings.simplefilter("ignore")
                edges = load_partition(self.path, part).edges
            ends = {e: (s.src.numpy(), s.dst.numpy(), s.offsets) for e, s in edges.items()}
            for one in new:
                rows = received(one, ends, self.num_nodes, part)
                if one.kind == "ended":
                    self.known[one][:, part] = rows
                else:
                    self.known[one][part] = rows


def received(
    one: Travel, ends: Mapping[EType, Ends], num_nodes: Mapping[str, Sequence[int]], part: int
) -> np.ndarray:
    """[P] rows that ``part`` receives from each part; sends to each, for rows in which edges end.

    ``ends`` are rows inside of parts, ``num_nodes`` those of each part by type.
    """
    size = len(ends[one.relations[0]][2]) - 1
    found = np.zeros(size, np.int64)
    if one.kind == "summed":
        return _fewest(one, ends, num_nodes, part)
    for peer in range(size):
        if peer == part:
            continue
        side = 2 if one.kind == "ended" else 0
        used: dict[str, np.ndarray] = {}
        for etype in one.relations:
            src, dst, bounds = ends[etype]
            rows = (dst if side else src)[bounds[peer] : bounds[peer + 1]]
            count = num_nodes[etype[side]][part if side else peer]
            marks = used.setdefault(etype[side], np.zeros(count, bool))
            marks[rows] = True
        found[peer] = sum(int(marks.sum()) for marks in used.values())
    return found


def _fewest(
    one: Travel, ends: Mapping[EType, Ends], num_nodes: Mapping[str, Sequence[int]], part: int
) -> np.ndarray:
    """Of relations out of one type, as one relation whose destinations lie behind each other."""
    srcs, dsts, bounds, first = [], [], [0], 0
    starts = {}
    for etype in one.relations:
        starts[etype], first = first, first + num_nodes[etype[2]][part]
    for peer in range(len(ends[one.relations[0]][2]) - 1):
        for etype in one.relations:
            src, dst, spans = ends[etype]
            own = slice(spans[peer], spans[peer + 1])
            srcs.append(src[own])
            dsts.append(dst[own].astype(np.int64) + starts[etype])
        bounds.append(sum(map(len, srcs)))
    both = np.concatenate(srcs), np.concatenate(dsts)
    return count_fewest(*both, bounds, num_nodes[one.relations[0][0]], part)


def likely_sets(relations: Sequence[EType]) -> list[tuple[EType, ...]]:
    """Relations whose rows may travel together: each, those out of a type, into one, of a pair of
    types, all."""
    found: list[tuple[EType, ...]] = [(one,) for one in relations]
    keys: list[Any] = [lambda e: e[0], lambda e: e[2], lambda e: (e[0], e[2]), lambda e: None]
    for key in keys:
        groups: dict[Any, list[EType]] = {}
        for one in relations:
            groups.setdefault(key(one), []).append(one)
        found += map(tuple, groups.values())
    return list(dict.fromkeys(found))


def tell_rows(
    log: Sequence[tuple[int, int]], counts: RowCounts, sets: Iterable[tuple[EType, ...]]
) -> list[tuple[Travel, int]] | None:
    """What travels in exchanges of two parts: of (rows, bytes of one), with the bytes; ``None``
    where a number of rows may be that of several. Raises ``SarError`` where it is of none."""
    travels = list[Travel]()
    for some in dict.fromkeys(sets):
        travels.append(Travel("pulled", some))
        if len({etype[0] for etype in some}) == 1:
            travels.append(Travel("summed", some))
        if len(some) == 1:
            travels.append(Travel("ended", some))
    counts.count(travels)
    rows_of = {one: int(counts.known[one][0, 1]) for one in travels}
    known = {rows: [one] for one, rows in rows_of.items()}
    if len(known) < len(travels):
        return None
    for some in dict.fromkeys(sets):  # rows of each relation for itself, in one exchange
        apart = [Travel("pulled", (etype,)) for etype in some]
        rows = sum(rows_of[one] for one in apart)
        if len({etype[0] for etype in some}) < len(some) and rows in known:
            return None
        known.setdefault(rows, apart)
    moved = [(rows, size) for rows, size in log if rows]
    unknown = [rows for rows, _ in moved if rows not in known]
    if unknown:
        raise SarError(
            f"the model sends {unknown[0]} rows that belong to no relations; it is not planned"
        )
    return [(one, size) for rows, size in moved for one in known[rows]]


def by_set(
    relations: list[EType], told: list[tuple[Travel, int]], as_rows: list[tuple[Travel, int]]
) -> list[SetBytes]:
    """Bytes of rows by the relations that they are of, from (what travels, bytes) in order."""
    found = []
    for some in dict.fromkeys([(relations[0],), *(one.relations for one, _ in told)]):
        mine = [(one.kind, size) for one, size in told if one.relations == some]
        pulled, summed, ended = (
            [size for kind, size in mine if kind == wanted]
            for wanted in ("pulled", "summed", "ended")
        )
        instead = [size for one, size in as_rows if one.relations == some]
        for size in (*pulled, *summed):
            instead.remove(size)  # the first, which is of the forward pass
        pairs = (
            [sizes[start : start + 2] for start in range(0, len(sizes), 2)]
            for sizes in (instead, ended)
        )
        found.append(SetBytes([*some], pulled, summed, list(zip(*pairs, strict=True))))
    return found
