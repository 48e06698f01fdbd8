"""Modules of a layer that read the same rows: these travel once for all of them.

The first module that reduces a tensor which was given to later ones, too, brings the rows for all
that will reduce it in the same stream, as adapters say; each gets its own when it asks for them.

What was computed before plays no part in it: sums of several relations are rounded in another way
than each by itself, and a run that is resumed has to go on with the bits of one that never ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from sar._private import version_of
from sar.config import Policy
from sar.edges import AnyRelation, Relation
from sar.graph import Scope
from sar.graph.store import Structure
from sar.tracing.reducing import mean_of_sum, reduce_rows, rows_of


class Reads(NamedTuple):
    """Source rows that the module of a relation is given, and its reduction of them, if any."""

    rows: Tensor
    op: str | None


class _Ready(NamedTuple):
    """Reduced rows that wait for their module, and the state that they are good for."""

    rows: Tensor
    state: tuple


class SharedRows:
    """One call of a layer; ``reads`` are by relation, in the order in which its modules run."""

    def __init__(self, store: Structure, reads: Mapping[AnyRelation, Reads]) -> None:
        self.store, self.reads = store, reads
        self._ready: dict[Relation, _Ready] = {}

    def reduce(self, relation: AnyRelation, x: Tensor, op: str, policy: Policy) -> Tensor | None:
        """[num_dst, ...] what the module of ``relation`` reduces; ``None``: it does so alone.

        Collective. Every rank decides alike, from what all of them know: which tensors are the same
        object and what the modules are.
        """
        own = self.reads.get(relation)
        if own is None or own.rows is not x or own.op != op or not x.is_floating_point():
            return None
        if not isinstance(relation, Relation):
            return None
        state = version_of(x), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), policy
        ready = self._ready.pop(relation, None)
        if ready is not None and ready.state == state:
            return ready.rows
        ops = {relation: op, **self._later(relation, x, op)}
        if len(ops) == 1:
            return None
        rows = reduce_jointly(self.store, ops, x, policy)
        mine = rows.pop(relation)
        self._ready |= {one: _Ready(part, state) for one, part in rows.items()}
        return mine

    def _later(self, relation: Relation, x: Tensor, op: str) -> dict[Relation, str]:
        """Relations after ``relation`` that reduce ``x`` in the stream of ``op``."""
        order, found = list(self.reads), {}
        for later in order[order.index(relation) + 1 :]:
            rows, other = self.reads[later]
            if rows is x and other is not None and stream_of(other) == stream_of(op):
                if isinstance(later, Relation):
                    found[later] = other
        return found


@contextmanager
def shared_rows(store: Structure, reads: Mapping[AnyRelation, Reads]) -> Iterator[None]:
    """While a layer runs its modules, let those that read the same rows share them."""
    before, store.sharing = store.sharing, SharedRows(store, reads)
    try:
        yield
    finally:
        store.sharing = before


def stream_of(op: str) -> str:
    """The stream that carries a reduction: sums and means share one, maxima and minima do not."""
    return "sum" if op == "mean" else op


def reduce_jointly(
    store: Structure, ops: Mapping[Relation, str], x: Tensor, policy: Policy
) -> dict[Relation, Tensor]:
    """[num_dst, ...] of each relation, which may be written into; collective.

    ``ops``, of one stream, has the same relations in the same order on all ranks; ``x`` is
    [num_src, ...], floating point rows of the one source type.
    """
    kinds = set(ops.values())
    op = kinds.pop() if len(kinds) == 1 else "sum"
    scope = Scope(store.join(tuple(ops)), policy, store.device)
    rows = reduce_rows(rows_of(scope, "u", x, "x"), op)
    pieces = dict(zip(ops, _split(rows, [relation.num_dst for relation in ops]), strict=True))
    for relation, piece in pieces.items():
        if ops[relation] != op:
            pieces[relation] = mean_of_sum(piece, relation)
    return pieces


def _split(rows: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Consecutive pieces of ``rows``, which may be written into."""
    if rows.requires_grad:  # no views to autograd: backward concatenates their gradients once
        return torch.unsafe_split_with_sizes(rows, sizes)
    # Writes count as writes into the rows, which somebody may keep, but not into other pieces.
    ends = accumulate(sizes)
    return [rows.detach()[end - size : end] for size, end in zip(sizes, ends, strict=True)]
