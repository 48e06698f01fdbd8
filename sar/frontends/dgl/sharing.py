"""Modules of a layer that read the same rows: these travel once for all of them.

``HeteroGraphConv`` calls one module after the other, and what a module asks of the graph shows when
it asks. So a layer's first call on a graph fetches rows for each relation, and is remembered. From
then on the first module that reduces a tensor which was given to modules after it, too, brings the
rows for those that reduced it the last time. They are handed out when they are asked for. A module
that asks for something else gets that, and the next call expects it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from sar.graph.store import EType, GraphStore
from sar.ops.saving import is_checkpointed, once


class Ask(NamedTuple):
    """A relation whose module reduces the rows it was given."""

    etype: EType
    op: str


class _Ready(NamedTuple):
    """Rows that wait for their module, and the state that they are good for."""

    rows: Tensor
    state: tuple


class SharedRows:
    """One call of a layer whose modules read their relations' source rows.

    Args:
        inputs: [num_src, ...] source rows by relation, in the order in which modules run.
        expected: what they asked for the last time.

    Attributes:
        asked: what they ask for this time.
    """

    def __init__(
        self, store: GraphStore, inputs: Mapping[EType, Tensor], expected: frozenset[Ask]
    ) -> None:
        self.store, self.inputs, self.expected = store, inputs, expected
        self.asked: set[Ask] = set()
        self._ready: dict[Ask, _Ready] = {}

    def reduce(self, etype: EType, x: Tensor, op: str, policy: Policy) -> Tensor | None:
        """[num_dst, ...] of what the relation's module asks; ``None`` to reduce it alone.

        Collective. Every rank decides alike, from what all of them do: which tensors are the same
        object and which modules asked for what the last time.
        """
        if self.inputs.get(etype) is not x or not self._can_join(etype, x):
            return None
        self.asked.add(Ask(etype, op))
        ready = self._ready.pop(Ask(etype, op), None)
        if ready is not None and ready.state == _state(x, policy):
            return ready.rows
        ops = {etype: op, **self._expected_after(etype, x, stream_of(op))}
        if len(ops) == 1:
            return None
        rows = reduce_jointly(self.store, ops, x, policy)
        mine, state = rows.pop(etype), _state(x, policy)
        self._ready |= {Ask(e, ops[e]): _Ready(part, state) for e, part in rows.items()}
        return mine

    def _expected_after(self, etype: EType, x: Tensor, stream: str) -> dict[EType, str]:
        """Relations after ``etype`` that are expected to reduce ``x`` in the same stream."""
        order = list(self.inputs)
        later = [e for e in order[order.index(etype) + 1 :] if self.inputs[e] is x]
        asks = sorted(ask for ask in self.expected if stream_of(ask.op) == stream)
        ops = {ask.etype: ask.op for ask in asks}
        return {e: ops[e] for e in later if e in ops}

    def _can_join(self, etype: EType, x: Tensor) -> bool:
        return x.is_floating_point() and isinstance(self.store.relations[etype], Relation)


def _state(x: Tensor, policy: Policy) -> tuple:
    """What must be unchanged between asking and handing out."""
    return version_of(x), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), policy


@contextmanager
def shared_rows(store: GraphStore, layer: Any, inputs: Mapping[EType, Tensor]) -> Iterator[None]:
    """While ``layer`` runs its modules on ``inputs``, those that read the same rows share them."""
    known = store.asked.setdefault(layer, {})
    mode = layer.training, torch.is_grad_enabled()  # dropout replaces rows in training only
    expected = once(lambda: known.get(mode, frozenset()))  # the same in a repetition
    before, store.sharing = store.sharing, SharedRows(store, inputs, expected)
    try:
        yield
        known[mode] = frozenset(store.sharing.asked)
    finally:
        store.sharing = before


def sharing(forward: Callable) -> Callable:
    """``HeteroGraphConv.forward`` that shares rows, on our graphs."""

    @wraps(forward)
    def call(self: Any, g: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        sources = inputs[0] if isinstance(inputs, tuple) and inputs else inputs
        if not isinstance(g, Counts) or not isinstance(sources, Mapping):
            return forward(self, g, inputs, *args, **kwargs)
        check_modules(self, g.canonical_etypes, sources)
        if g.group.size == 1 or is_checkpointed():
            return forward(self, g, inputs, *args, **kwargs)
        rows = {e: sources[e[0]] for e in g.canonical_etypes if e[0] in sources}
        with shared_rows(g._store, self, rows):
            return forward(self, g, inputs, *args, **kwargs)

    return call


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
