"""Relations of some of another's edges, found again where a mask of the same edges comes.

A layer masks edges by their type anew in each call (``edge_index[:, edge_type == i]``). Such a mask
is a program of lazy columns: where the same program of the same, unwritten columns comes again, it
has the same values on every rank, without a word among them. Any other mask is compared by its
values, and ranks agree on the relation that all of them know.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple
from weakref import ref

import torch
import xxhash
from torch import Tensor

from sar.edges import Relation, join_relations
from sar.graph.transform import with_some_edges
from sar.tracing.edge_rows import eager
from sar.tracing.lazy import EdgeTensor
from sar.tracing.memo import outline
from sar.tracing.nodes import Call, Item, Leaf, Node, raise_if_written

_MOST = 4096
_MOST_EDGES = 8  # times those of the relation, on all ranks


class _Program(NamedTuple):
    """What a mask was computed by: its outline, and the columns in their states."""

    key: Hashable
    columns: list[Tensor]
    versions: list[int]


class _Known:
    """A filtered relation, the digest of its mask, and programs that gave the mask."""

    def __init__(self, relation: Relation, digest: bytes) -> None:
        self.relation, self.digest = relation, digest
        self.programs: list[tuple[Hashable, list[ref[Tensor]], list[int]]] = []

    def has(self, program: _Program) -> bool:
        return any(
            (key, versions) == (program.key, program.versions)
            and all(one() is column for one, column in zip(columns, program.columns))
            for key, columns, versions in self.programs
        )

    def add(self, program: _Program) -> None:
        """Remember a program, and forget those whose columns are gone."""
        there = [one for one in self.programs if all(col() is not None for col in one[1])]
        columns = [ref(column) for column in program.columns]
        self.programs = [*there, (program.key, columns, program.versions)]


class Filters:
    """Filtered relations of one relation, the latest last; all ranks know as many.

    Attributes:
        device: where they lie.
    """

    def __init__(self, device: torch.device) -> None:
        self.known: list[_Known] = []
        self.device, self._joined = device, dict[tuple[Relation, ...], Relation]()

    def find(self, relation: Relation, mask: Tensor) -> Relation:
        """The edges where bool [num_edges] is true; collective unless its program is known."""
        program = _program_of(relation, mask)
        if program is not None:
            for one in self.known:
                if one.has(program):
                    return one.relation
        found = self._by_values(relation, eager(mask))
        if program is not None:
            found.add(program)
        return found.relation

    def join(self, relations: tuple[Relation, ...]) -> Relation:
        """Filtered relations as one out of the same rows; collective on first use."""
        if relations not in self._joined:
            self._joined[relations] = join_relations(relations)
        return self._joined[relations]

    def _by_values(self, relation: Relation, values: Tensor) -> _Known:
        digest = xxhash.xxh3_128(values.cpu().numpy().tobytes()).digest()
        fits = torch.tensor([one.digest == digest for one in self.known], dtype=torch.uint8)
        everywhere = relation.group.all_reduce(fits, "min").nonzero() if self.known else fits
        if len(everywhere):
            return self.known[int(everywhere[0])]
        self.known.append(_Known(with_some_edges(relation, values), digest))
        self._forget(_MOST_EDGES * relation.num_edges_global)
        return self.known[-1]

    def _forget(self, most: int) -> None:
        """Drop the oldest until there are few enough edges; the same on all ranks."""
        while len(self.known) > _MOST or (
            len(self.known) > 1 and sum(one.relation.num_edges_global for one in self.known) > most
        ):
            gone = self.known.pop(0).relation
            self._joined = {key: one for key, one in self._joined.items() if gone not in key}


def _program_of(relation: Relation, mask: Tensor) -> _Program | None:
    """The program of a mask that columns of the edges alone decide."""
    if not isinstance(mask, EdgeTensor) or mask.scope.relation is not relation or mask.axis != 0:
        return None
    node = mask.read()
    raise_if_written([node])
    key, nodes = outline(node)
    if key is None or not all(map(_is_of_edges, nodes)):
        return None
    columns = [column for one in nodes for column in one.tensors]
    return _Program(key, columns, [version for one in nodes for version in one.versions])


def _is_of_edges(node: Node) -> bool:
    return isinstance(node, (Call, Item)) or isinstance(node, Leaf) and node.side == "e"
