"""Modules of a layer that read the same rows: these travel once for all of them.

``HeteroGraphConv`` calls one module after the other. What layers of the table reduce is said there.
So the first one that reduces a tensor which was given to layers after it, too, brings the rows for
those that will reduce it in the same stream. They are handed out when they are asked for. A module
that asks for something else gets that.

What was computed before plays no part in it: sums of several relations are rounded in another way
than each by itself, and a run that is resumed has to go on with the bits of one that never ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar._private import version_of
from sar.config import Policy
from sar.edges import Relation
from sar.frontends.dgl.counts import Counts
from sar.frontends.dgl.joint import reduce_jointly, stream_of
from sar.frontends.dgl.store import GraphStore
from sar.models.known import reduction_of
from sar.partition.book import EType


class Reads(NamedTuple):
    """The source rows that the module of a relation is given, and its reduction of them, if any."""

    rows: Tensor
    op: str | None


class _Ready(NamedTuple):
    """Rows that wait for their module, and the state that they are good for."""

    rows: Tensor
    state: tuple


class SharedRows:
    """One call of a layer whose modules read their relations' source rows.

    Args:
        reads: by relation, in the order in which modules run.
    """

    def __init__(self, store: GraphStore, reads: Mapping[EType, Reads]) -> None:
        self.store, self.reads = store, reads
        self._ready: dict[EType, _Ready] = {}

    def reduce(self, etype: EType, x: Tensor, op: str, policy: Policy) -> Tensor | None:
        """[num_dst, ...] of what the relation's module asks; ``None`` to reduce it alone.

        Collective. Every rank decides alike, from what all of them know: which tensors are the same
        object and what the modules are.
        """
        own = self.reads.get(etype)
        if own is None or own.rows is not x or own.op != op or not self._can_join(etype, x):
            return None
        ready, state = self._ready.pop(etype, None), _state(x, policy)
        if ready is not None and ready.state == state:
            return ready.rows
        ops = {etype: op, **self._later(etype, x, op)}
        if len(ops) == 1:
            return None
        rows = reduce_jointly(self.store, ops, x, policy)
        mine = rows.pop(etype)
        self._ready |= {e: _Ready(part, state) for e, part in rows.items()}
        return mine

    def _later(self, etype: EType, x: Tensor, op: str) -> dict[EType, str]:
        """Relations after ``etype`` that reduce ``x`` in the stream of ``op``."""
        order, found = list(self.reads), {}
        for later in order[order.index(etype) + 1 :]:
            rows, other = self.reads[later]
            if rows is x and other is not None and stream_of(other) == stream_of(op):
                found[later] = other
        return found

    def _can_join(self, etype: EType, x: Tensor) -> bool:
        return x.is_floating_point() and isinstance(self.store.relations[etype], Relation)


def _state(x: Tensor, policy: Policy) -> tuple:
    """What must be unchanged between asking and handing out."""
    return version_of(x), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), policy


@contextmanager
def shared_rows(store: GraphStore, reads: Mapping[EType, Reads]) -> Iterator[None]:
    """While a layer runs its modules, those that read the same rows share them."""
    before, store.sharing = store.sharing, SharedRows(store, reads)
    try:
        yield
    finally:
        store.sharing = before


def sharing(forward: Callable) -> Callable:
    """``HeteroGraphConv.forward`` that shares rows, on our graphs."""

    @wraps(forward)
    def call(self: Any, g: Any, inputs: Any, mod_args: Any = None, mod_kwargs: Any = None) -> Any:
        given = inputs if isinstance(inputs, tuple) and inputs else (inputs,)
        if not isinstance(g, Counts) or not isinstance(given[0], Mapping):
            return forward(self, g, inputs, mod_args, mod_kwargs)
        check_modules(self, g.canonical_etypes, given[0])
        if g.group.size == 1:
            return forward(self, g, inputs, mod_args, mod_kwargs)
        reads = _reads(self, g.canonical_etypes, given, {**(mod_args or {}), **(mod_kwargs or {})})
        with shared_rows(g._store, reads):
            return forward(self, g, inputs, mod_args, mod_kwargs)

    return call


def _reads(layer: Any, etypes: list[EType], given: Sequence, more: Mapping) -> dict[EType, Reads]:
    """Of the relations whose modules run; one that is given ``more`` may reduce other rows."""
    found = {}
    for etype in etypes:
        if etype[0] in given[0] and etype[2] in given[-1]:
            module = layer.mod_dict.get(etype, layer.mod_dict.get(etype[1]))
            op = None if etype[1] in more else reduction_of(module)
            found[etype] = Reads(given[0][etype[0]], op)
    return found


def check_modules(layer: Any, etypes: list[EType], sources: Mapping) -> None:
    """Name both sides when a ``HeteroGraphConv`` has no module for a relation of the graph.

    DGL would raise a ``KeyError`` with the relation's name alone. Like DGL, relations whose source
    type has no input are passed over, and modules that the graph has no relation for do not matter.
    """
    modules = layer.mod_dict
    for etype in etypes:
        if etype[0] in sources and etype not in modules and etype[1] not in modules:
            raise ValueError(
                f"{type(layer).__name__}: got modules for {sorted(map(str, modules))}, "
                f"none for {etype}; the graph has {etypes}"
            )
