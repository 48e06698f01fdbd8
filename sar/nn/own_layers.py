"""Rows of other ranks for layers of one's own: all that an edge starts in, round by round, or any.

Each function takes a sharded graph, or what names its edges, checks on every rank before rows
travel, and hands over to :mod:`sar.ops.halo` and :mod:`sar.ops.rounds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sar import expect
from sar.comm import current_group
from sar.edges import Relation, as_stored
from sar.graph.directory import directory_of
from sar.graph.rows import current
from sar.graph.view import GraphArgument, GraphView, canonical_of, read_argument
from sar.kernels.jit import untraced
from sar.nn.drift import watch_rows
from sar.ops.halo import TRAINED, halo_rows, rows_of_owners
from sar.ops.rounds import sum_over_rounds
from sar.partition.book import EType
from sar.partition.features import ORIGINAL
from sar.tracing.capture import TORCH_CAPTURES
from sar.tracing.message_dropout import inside_function


@untraced
def halo(graph: Any, x: Tensor, *, etype: str | EType | None = None) -> Tensor:
    """The rows of other ranks in which edges of this rank start; collective, in backward too.

    With :func:`local_edges` it gives any layer for two sides its input: ``torch.cat([x, halo])``
    are the sources, ``x`` the destinations. All of them are held until you drop them.

    Args:
        graph: a sharded graph or its slice ``graph[etype]``, PyG's data of one, or its
            ``edge_index``.
        x: [num_src, ...] of any type, this rank's rows of the sources. A gradient needs float64,
            float32, bfloat16 or float16.
        etype: the relation, where there are several.

    Returns:
        [halo, ...] of the type of ``x``: each row once, by rank of the owner and then by its row
        there. A gradient goes to the owners, who add it.

    Raises, on every rank:
        TypeError: ``graph`` is no sharded graph, ``x`` no such tensor of nodes.
        ValueError: a row too many or too few, an unknown relation, edges that are turned round;
            rows of another shape or type on another rank; gradients that only some ranks ask for.
    """
    with _agreed("halo", graph, _by_name(etype), {"etype": etype}) as call:
        view, relation = _relation_of(call.said, etype)
        call.rows(x, relation.num_src, "source")
    _tell(view, "halo", x)
    return halo_rows(relation.plan, x, view.policy)


def local_edges(graph: Any, *, etype: str | EType | None = None) -> Tensor:
    """The edges that end in rows of this rank, as numbers of rows; no communication.

    Args:
        graph, etype: as of :func:`halo`.

    Returns:
        int64 [2, num_edges] in the order of the columns of edges: of sources, rows of
        ``torch.cat([x, sar.halo(graph, x)])``; of destinations, rows of this rank. It is made anew
        by each call, 16 bytes an edge: keep it.

    Raises ``TypeError`` or ``ValueError`` as :func:`halo`, on this rank.
    """
    _, relation = _relation_of(_argument(graph, _by_name(etype)), etype)
    src, dst, position, offsets = relation.arrays()
    edges = torch.empty((2, relation.num_edges), dtype=torch.int64, device=src.device)
    starts = [0 if p == relation.group.rank else n for p, n in enumerate(relation.halo_starts)]
    counts = torch.tensor(offsets, device=src.device).diff()
    edges[0, position.long()] = src + torch.tensor(starts, device=src.device).repeat_interleave(
        counts, output_size=relation.num_edges
    )
    edges[1, position.long()] = dst.long()
    return edges


@untraced
def sum_rounds(
    graph: Any,
    part: Callable[..., Tensor],
    x: Tensor,
    *others: Tensor,
    etype: str | EType | None = None,
) -> Tensor:
    """Sum a function of the rows of one round at a time; collective, in backward too.

    Two rounds of rows are in memory, as many as the graph's policy says. ``part`` is called for the
    rows of this rank, then for those of each round, also where no edges start in them. Backward
    fetches the rows again and calls ``part`` again, with the same random numbers. Parameters that
    ``part`` uses get their gradients, whether they are among ``others`` or not. What was computed
    from parameters belongs to ``others``, or its making is differentiated once a round.

    Args:
        graph, etype: as of :func:`halo`.
        part: called as ``part(rows, src, dst, positions, *others)``: [n, ...] rows; int64 [e] rows
            of ``rows`` that edges start in, and rows of this rank that they end in; int64 [e], the
            edges' places in columns of edges. Returns [num_dst, ...], floating point: what these
            edges add to each destination. It calls nothing collective and writes into none of its
            arguments. It is tried once on a few edges, whole and in halves.
        x: [num_src, ...] as of :func:`halo`.
        others: tensors that ``part`` gets as they are, with gradients.

    Returns:
        [num_dst, ...] in the type that ``part`` returns; of 16 bits, summed in float32.

    Raises, on every rank:
        TypeError, ValueError: as :func:`halo`; ``part`` is no function, gives another shape or
            type, is no sum over edges, or wrote into its arguments; something else is no tensor.
        Exception: what ``part`` raises on any rank; of a class of its own, as ``SarError``.
    """
    with _agreed("sum_rounds", graph, _by_name(etype), {"etype": etype}) as call:
        view, relation = _relation_of(call.said, etype)
        if not callable(part):
            raise expect.wrong_type(part, "part", "a function")
        for number, other in enumerate(others):
            _plain(other, f"others[{number}]")
        call.rows(x, relation.num_src, "source")
    _tell(view, "rounds", x, *others)
    return sum_over_rounds(relation, part, x, others, view.policy, TORCH_CAPTURES, inside_function)


@untraced
def fetch(
    graph: Any, x: Tensor, ids: Tensor, *, ntype: str | None = None, original: bool = True
) -> Tensor:
    """Rows of any nodes, whichever ranks own them; collective, in backward too.

    What ``x[ids]`` gives in one process. Each rank asks for what it wants, also for nothing. A row
    that is asked for several times travels once.

    Args:
        graph: a sharded graph or its slice, PyG's data of one, or its ``edge_index``.
        x: [num_nodes, ...] of any type, this rank's rows of nodes, as of :func:`halo`.
        ids: integers of any shape: of nodes, as they were numbered in the graph that was cut.
        ntype: the node type, where there are several; ids count inside the type.
        original: whether ids are those. If not, they are the partitioning's own, from 0 over all
            types, which DGL's graphs have as ``"_ID"``.

    Returns:
        [*ids.shape, ...] of the type of ``x``. A gradient goes to the owners, who add it.

    Raises, on every rank:
        TypeError: ``graph`` is no sharded graph, ``ids`` are no integers, ``x`` no such tensor.
        ValueError: an id that no node has, a row too many or too few, an unknown type, a block;
            partitions without original ids, or whose ids are not the numbers below N; rows of
            another shape or type on another rank; gradients that only some ranks ask for.
    """
    with _agreed("fetch", graph, _any, {"ntype": ntype, "original": original}) as call:
        view, kind = _nodes_of(call.said, ntype)
        expect.boolean(original, "original")
        if original and view.node_names(kind)[1] != ORIGINAL:
            raise ValueError("original: got True, but the partitions hold no original ids")
        _plain(ids, "ids")
        if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
            raise TypeError(f"ids: got {ids.dtype}, expected integers")
        call.rows(x, len(view.source_rows(kind)), "node")
    _tell(view, "fetch", x)
    nids, place = _global_ids(view, kind, ids.detach().cpu().long(), original)
    _, owner, row = view._store.book.locate(nids)
    found = rows_of_owners(x, owner, row, view.policy, view.group)
    rows = found.index_select(0, place.view(-1).to(x.device))
    return rows.view(*ids.shape, *x.shape[1:])


def _nodes_of(said: GraphArgument, ntype: str | None) -> tuple[GraphView, str]:
    """The graph, and its only node type or the one that was named."""
    view = said.sharded_graph
    if view.is_block:
        raise ValueError("graph: got a block, expected a whole graph, whose ranks have all rows")
    ntypes = view._store.book.ntypes
    if ntype is None and len(ntypes) == 1:
        return view, ntypes[0]
    return view, str(expect.one_of(ntype, "ntype", ntypes))


def _global_ids(view: GraphView, ntype: str, ids: Tensor, original: bool) -> tuple[Tensor, Tensor]:
    """The distinct global ids of nodes, ascending, and which of them each of ``ids`` is;
    collective."""
    book, count = view._store.book, view.num_nodes_global(ntype)
    known = directory_of(view, ntype) if original else None
    first, last = (0, book.num_nodes()) if known is None else (known.first, known.first + count)
    distinct, place = torch.unique(ids, return_inverse=True)
    with view.group.agreed("fetch"):
        if len(distinct) and not first <= int(distinct[0]) <= int(distinct[-1]) < last:
            got = f"{int(distinct[0])} to {int(distinct[-1])}"
            raise ValueError(f"ids: got {got}, expected {first} to {last - 1}, which nodes have")
        kinds = book.locate(distinct)[0] if known is None else distinct[:0]
        if (kinds != book.ntypes.index(ntype)).any():
            raise ValueError(f"ids: got ids of other nodes, expected those of type {ntype!r}")
    if known is None:
        return distinct, place
    nids, order = torch.unique(known.nids(distinct - first), return_inverse=True)
    return nids, order[place]


def _plain(value: Any, name: str) -> None:
    """``TypeError`` for anything but a tensor with numbers, such as a lazy column of edges."""
    if type(value) is not Tensor and not isinstance(value, torch.nn.Parameter):
        raise expect.wrong_type(value, name, "a plain tensor; a column of edges has .materialize()")


class _Call:
    """The checks of one call, and what all ranks have to have alike."""

    def __init__(self, said: GraphArgument, alike: dict[str, Any]) -> None:
        self.said, self.alike = said, alike

    def rows(self, x: Tensor, count: int, what: str) -> None:
        """Check this rank's rows of sources or nodes."""
        device = self.said.sharded_graph.device
        _plain(x, "x")
        expect.dense(x, "x")
        asks = x.requires_grad and torch.is_grad_enabled()
        if x.is_complex() or (asks and x.dtype not in TRAINED):
            raise TypeError(
                f"x: got {x.dtype}, expected real numbers, of a float type for gradients"
            )
        if x.dim() == 0 or len(x) != count:
            raise ValueError(f"x: got shape {tuple(x.shape)}, expected [{count}, ..], {what} rows")
        if x.device != device:
            raise ValueError(f"x: got a tensor on {x.device}, expected {device}, as the graph")
        self.alike |= {
            "shape of a row of x": tuple(x.shape[1:]), "dtype of x": x.dtype,
            "x.requires_grad": asks, "torch.is_grad_enabled()": torch.is_grad_enabled(),
        }  # fmt: skip


Choose = Callable[[Mapping[EType, GraphArgument]], GraphArgument]


@contextmanager
def _agreed(name: str, graph: Any, choose: Choose, alike: dict[str, Any]) -> Iterator[_Call]:
    """A block of checks whose error all ranks raise; ``choose`` picks one of several relations."""
    said, group, problem = None, current_group(), None
    try:
        said = _argument(graph, choose)
        group = said.sharded_graph.group
    except Exception as error:  # noqa: BLE001 - raised on every rank
        problem = error
    with group.agreed(name, alike):
        if said is None or problem is not None:
            raise problem or RuntimeError("unreachable: an error or a graph")
        yield _Call(said, alike)


def _argument(graph: Any, choose: Choose) -> GraphArgument:
    """What names the edges, or those of a relation of several."""
    said = read_argument(graph)
    if isinstance(said, Mapping):
        named = {key: one for key, one in said.items() if isinstance(one, GraphArgument)}
        said = choose(named) if named else said
    if not isinstance(said, GraphArgument):
        expected = "a sharded graph, data of one or its edge index"
        raise expect.wrong_type(graph, "graph", expected)
    return said


def _by_name(etype: str | EType | None) -> Choose:
    return lambda named: named[canonical_of(etype, list(named))]


def _any(named: Mapping[EType, GraphArgument]) -> GraphArgument:
    return next(iter(named.values()))


def _relation_of(said: GraphArgument, etype: str | EType | None) -> tuple[GraphView, Relation]:
    view = said.sharded_graph
    if said.is_turned:
        raise ValueError("graph: got edges turned round, expected them as they were loaded")
    return view, as_stored(view.scope(etype).relation, "graph")


def _tell(view: GraphView, what: str, *rows: Tensor) -> None:
    """Say what runs. What rows depend on is compared over ranks now and then, where no layer of the
    graph's library does it."""
    view.group.meter.tell(what)
    if all(call.module is None for call in current.stack):
        watch_rows(lambda: rows, view.group)
