"""Dropout whose mask stays with the node or edge, however the graph is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sar import expect
from sar.comm import current_group
from sar.graph import GraphView, graph_of, graphs_among
from sar.graph.rows import Call, KeyedRows, Kind, SameDropoutRows, current, keyed_rows, kinds_of
from sar.kernels.jit import untraced
from sar.nn.batch_norm import replaced
from sar.ops.randomness import keyed_dropout
from sar.tracing.lazy import EdgeTensor
from sar.tracing.message_dropout import in_function

Graphs = GraphView | Sequence[GraphView]


@contextmanager
def dropout_rows(graphs: Graphs) -> Iterator[None]:
    """Inside, a :class:`Dropout` without a graph takes its rows to be those of ``graphs``.

    For the thread that enters.

    Args:
        graphs: a graph, or the blocks that a model is called with.
    """
    current.stack.append(Call(None, _checked(graphs)))
    try:
        yield
    finally:
        current.stack.pop()


def same_dropout() -> tuple[AbstractContextManager, AbstractContextManager]:
    """``context_fn`` of ``torch.utils.checkpoint``: what is recomputed has the same masks again.

    ``checkpoint(function, x, use_reentrant=False, context_fn=sar.nn.same_dropout)``; without it
    dropout of this library raises ``SarError`` there.
    """
    group = current_group()
    first, again = group.seeds.same_twice(group)
    return first, SameDropoutRows(again)


class _Bound:
    """The rows a module was given; copies of the module share them, pickles leave them out."""

    def __init__(self, rows: KeyedRows | None = None) -> None:
        self.rows = rows

    def __deepcopy__(self, memo: dict) -> _Bound:
        return self

    def __reduce__(self) -> tuple:
        return _Bound, ()


class Dropout(nn.Dropout):
    """``nn.Dropout`` for rows of a sharded graph: the same mask for every number of ranks.

    Element (row, column) is zeroed with probability p by a random number that is a function of
    :func:`sar.manual_seed`'s seed, of the number of dropouts since, of the node's or edge's
    id in the input and of the column; the others are multiplied by 1 / (1 - p). Nothing is saved
    for backward.

    Args:
        p: probability of an element to be zeroed.
        graph: whose rows inputs have: a graph or a list of blocks; collective when it is new. With
            ``None`` the call says, or :func:`dropout_rows`, or :func:`convert_dropout`'s model.
        inplace: write into the input.
    """

    keys_edges = True  # fused layers draw as it does on edges, where it has torch's arguments

    def __init__(
        self, p: float = 0.5, graph: Graphs | None = None, *, inplace: bool = False
    ) -> None:
        super().__init__(p, inplace)
        self._bound = _Bound(None if graph is None else keyed_rows(_checked(graph)))

    @untraced
    def forward(
        self,
        input: Tensor,
        graph: Graphs | None = None,
        *,
        rows: Kind | Tensor | None = None,
    ) -> Tensor:
        """[n, ...] as ``input``; ``input`` itself in evaluation and for p = 0.

        Every rank calls in the same order. Edge tensors of ``apply_edges`` know their edges.

        Args:
            graph: whose rows ``input`` has; the module's own by default.
            rows: what they are, if that cannot be told: a node type, a canonical edge type, or int
                [n] ids of your own (which the cut must not change). Inside of a layer of DGL that
                is called with one relation, they are nodes or edges of that; what the layer was
                called with as rows of sources, or destinations, are these. Else their number
                tells.

        Raises:
            ValueError: no node or edge type has as many rows, or several node types or only several
                relations have; no graph is known; ``rows`` has another length.
            TypeError: ``graph``, ``rows`` or ``input`` is of another type.
        """
        if not self.training or self.p == 0:
            return input
        if isinstance(input, EdgeTensor) or in_function():  # keyed by edges there
            return F.dropout(input, self.p, True, self.inplace)
        expect.tensor(input, "input", floating=True)
        if isinstance(rows, Tensor):
            keys, group = _own_ids(rows, input), current_group()
        else:
            known, kinds = self._rows(graph, input)
            keys, group = known.keys(input, kinds if rows is None else {rows}), known.group
        out = keyed_dropout(input, keys, group.seeds.draw(group), self.p)
        return input.copy_(out) if self.inplace else out

    def _rows(self, graph: Graphs | None, x: Tensor) -> tuple[KeyedRows, set[Kind] | None]:
        """The rows that are known, and the kinds that those of ``x`` may be; ``None``: any."""
        call = current.stack[-1] if current.stack else None
        if graph is not None:
            return keyed_rows(_checked(graph)), kinds_of(_checked(graph))
        if self._bound.rows is not None and (call is None or call.module is None):
            return self._bound.rows, None
        if call is None:
            raise ValueError(
                "graph: got none, expected one: sar.nn.Dropout(p, graph), dropout(x, graph), or a "
                "model of sar.convert_dropout that is called with its graph or blocks"
            )
        return keyed_rows(call.graphs), call.kinds_of(x)


def convert_dropout(model: nn.Module, graph: Graphs | None = None) -> nn.Module:
    """Replace every ``nn.Dropout`` in ``model`` by a :class:`Dropout`, in place.

    ``feat_drop`` and ``attn_drop`` of DGL's layers are such modules. Functions
    (``F.dropout``) cannot be replaced, except on edge tensors, where they need no replacement, and
    in a model's forward where PyG's front end is in use, which then draw the same way.

    Args:
        graph: whose rows tensors have where neither the model nor a layer of DGL in it is called
            with a graph: a graph or a list of blocks; collective. Otherwise they have those of the
            graphs among the arguments, at each call.

    Returns:
        The model, or its replacement when the model itself is an ``nn.Dropout``.
    """
    rows = None if graph is None else keyed_rows(_checked(graph))
    converted = replaced(model, lambda module: _bound_to(rows, module))
    if not getattr(converted, "_finds_dropout_rows", False):
        converted._finds_dropout_rows = True  # type: ignore[assignment]
        converted.register_forward_pre_hook(_enter, with_kwargs=True)
        converted.register_forward_hook(_leave, always_call=True)
    return converted


def asked_call() -> Call | None:
    """The outermost call in progress of a model of :func:`convert_dropout`, or graphs named."""
    calls = (one for one in current.stack if one.module is None or hasattr(one.module, _FINDS_ROWS))
    return next(calls, None)


_FINDS_ROWS = "_finds_dropout_rows"


def _bound_to(rows: KeyedRows | None, module: nn.Module) -> nn.Module:
    if type(module) is nn.Dropout:
        module = Dropout(module.p, inplace=module.inplace).train(module.training)
    if type(module) is Dropout:
        module._bound = _Bound(rows)
    return module


@untraced
def _enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if graphs := graphs_among((args, kwargs)):
        later = [one for graph in graphs for one in graph.later]
        current.stack.append(Call(module, [*graphs, *later]))


@untraced
def _leave(module: nn.Module, args: tuple, output: Any) -> None:
    # Runs also when _enter did not: after an error, or for a model that got no graph.
    if current.stack and current.stack[-1].module is module:
        current.stack.pop()


def _checked(graphs: Any) -> Sequence[GraphView]:
    graphs = graph_of(graphs)
    listed = [graphs] if isinstance(graphs, GraphView) else graphs
    if not isinstance(listed, (list, tuple)) or not listed:
        raise expect.wrong_type(graphs, "graph", "a ShardedGraph or a list")
    for one in listed:
        expect.instance(one, "graph", GraphView, "a ShardedGraph")
    return listed


def _own_ids(ids: Tensor, x: Tensor) -> Tensor:
    if ids.is_floating_point() or ids.is_complex() or ids.dim() != 1:
        raise TypeError(f"rows: got {ids.dtype} {list(ids.shape)}, expected integers [n]")
    if not x.dim() or len(ids) != len(x):
        raise ValueError(f"rows: got {len(ids)} ids, expected {len(x) if x.dim() else 0}, one each")
    return ids.to(x.device)
