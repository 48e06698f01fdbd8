"""Edge columns written piece by piece with user functions, computed when they are read.

A layer may call ``apply_edges(udf, eids)`` only where ``eids`` is not empty, which differs between
ranks, while computing the piece needs every rank. So a piece is only noted; the column is
computed by the call that reads it, which every rank makes. The ranks first agree what the pieces
of all of them read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sar.comm import SeedStream
from sar.config import Policy
from sar.edges import AnyRelation
from sar.errors import SarError
from sar.frontends.dgl.pending_agreement import agree
from sar.frontends.dgl.store import GraphStore
from sar.ops import Inputs, Messages, run_messages
from sar.partition.book import EType
from sar.tracing.capture import TORCH_CAPTURES
from sar.tracing.lazy import eager
from sar.tracing.message_dropout import Drawn, KeyedDropout
from sar.tracing.udf import Probe, call_udf, frozen, probe

_NO_PIECE = -1

Key = tuple[str, int]  # a column's name and its version


@dataclass(frozen=True)
class Piece:
    """A user function and the positions (int64 [n]) of the edges it is for.

    ``src``, ``dst`` and ``edge`` are the columns that it reads, in the order of the probe's names;
    an edge column that was pending itself is computed along with this one, block by block.
    Without ``with_grad`` it was noted where gradients were disabled, and its values have none.
    Its dropouts have seeds of the ``time`` when it was noted.
    """

    function: Callable
    seen: Probe
    eids: Tensor
    with_grad: bool
    time: tuple[int, int]
    src: list[Key]
    dst: list[Key]
    edge: list[Key | PendingColumn]

    def dropouts(self, seeds: SeedStream) -> list[Drawn]:
        """Those on rows of edges with a seed each, whichever of its columns is computed."""
        return [
            Drawn(p, seeds.noted(self.time, number) if on_edges and p > 0 else None)
            for number, (p, on_edges) in enumerate(self.seen.dropouts)
        ]


@dataclass(frozen=True)
class PendingColumn:
    """A column of pieces, later ones over earlier ones; frames and their copies share it.

    Attributes:
        store: of the graph that the last piece was noted on.
        src, dst, edge: the columns that the pieces read, as they were when a piece was noted.
            Those that pending columns among them read are here, too.
        before: where in ``edge`` the values outside all pieces are; ``None`` for 0.
        problem: why the pieces cannot be computed together; every rank raises it.
    """

    store: GraphStore
    etype: EType
    name: str
    policy: Policy
    pieces: tuple[Piece, ...] = ()
    src: dict[Key, Tensor] = field(default_factory=dict)
    dst: dict[Key, Tensor] = field(default_factory=dict)
    edge: dict[Key, Tensor] = field(default_factory=dict)
    before: Key | None = None
    problem: str | None = None

    @property
    def like(self) -> Tensor:
        """[0, ...] of the dtype, device and trailing shape of the last piece."""
        return self.pieces[-1].seen.outputs[self.name]

    def materialize(self) -> Tensor:
        """[num_edges, ...] values on the local edges; collective."""
        return self.run("edges")

    def run(self, reduce: str) -> Tensor:
        """Stream the pieces of all ranks and reduce their values; collective."""
        agreed = agree(self)
        if agreed["dropout"]:
            self.store.group.seeds.draw(self.store.group)  # what is noted later gets other seeds
        src = self._find("source", self.src, agreed["src"])
        lazy = self._find("edge", self.edge, agreed["lazy"]) if agreed["lazy"] else {}
        # On every rank, though only some have pieces that read them, forward and backward.
        columns = self.edge | {key: eager(tensor) for key, tensor in lazy.items()}
        dtype = getattr(torch, agreed["dtype"])
        like = torch.empty((0, *agreed["shape"]), dtype=dtype, device=self.store.device)
        pieces = [piece for column in self.columns() for piece in column.pieces]
        dropouts = {id(piece): piece.dropouts(self.store.group.seeds) for piece in pieces}
        messages = Messages(
            _Piecewise(self, list(src), list(columns), like, dropouts),
            is_udf=True,
            ordered=True,
            capturing=TORCH_CAPTURES,
            captures=_captures(pieces, agreed["grad"]),
            hidden=tuple({id(t): t for p in pieces for t in p.seen.hidden}.values()),
        )
        edge = [*(column.numbers() for column in self.columns()), *columns.values()]
        inputs = Inputs(list(src.values()), list(self.dst.values()), edge)
        relation = self.store.relations[self.etype]
        return run_messages(relation, messages, reduce, self.policy, inputs, [like])[0]

    def columns(self) -> list[PendingColumn]:
        """This one and the pending columns that its pieces read, each once."""
        found = {id(self): self}
        for piece in self.pieces:
            for read in piece.edge:
                if isinstance(read, PendingColumn):
                    found.update((id(column), column) for column in read.columns())
        return list(found.values())

    def to(self, store: GraphStore) -> PendingColumn:
        """The column for ``store``, a copy of the graph on another device; no communication."""
        device = store.device

        def moved(columns: dict[Key, Tensor]) -> dict[Key, Tensor]:
            return {key: column.to(device) for key, column in columns.items()}

        def moved_piece(piece: Piece) -> Piece:
            edge = [r.to(store) if isinstance(r, PendingColumn) else r for r in piece.edge]
            return replace(piece, eids=piece.eids.to(device), edge=edge)

        return replace(
            self,
            store=store,
            pieces=tuple(moved_piece(piece) for piece in self.pieces),
            src=moved(self.src),
            dst=moved(self.dst),
            edge=moved(self.edge),
        )

    def _find(self, what: str, own: dict[Key, Tensor], keys: list[Key]) -> dict[Key, Tensor]:
        """The columns ``keys``, which pieces of some ranks read, of this rank; collective.

        Raises ``SarError`` on every rank when one has no such piece and no longer has a column.
        """
        source = what == "source"
        frames: Any = self.store.src_frames if source else self.store.edge_frames
        frame, found, error = frames[self.etype[0] if source else self.etype], {}, None
        for name, version in keys:
            if (name, version) in own:
                found[name, version] = own[name, version]
            elif name in frame and frame.version(name) == version:
                found[name, version] = frame[name]
            else:
                error = SarError(
                    f"edge column {self.name!r}: rank {self.store.group.rank} has changed {what} "
                    f"column {name!r} since other ranks called apply_edges with it; expected such "
                    "a change after the edge column is read, or apply_edges on all ranks"
                )
        self.store.group.agree(error, f"{what} columns")
        return found

    def numbers(self) -> Tensor:
        """int32 [num_edges] which piece gives each edge its value."""
        size, device = self.store.relations[self.etype].num_edges, self.store.device
        numbers = torch.full((size,), _NO_PIECE, dtype=torch.int32, device=device)
        for index, piece in enumerate(self.pieces):
            numbers[piece.eids] = index
        return numbers


def _captures(pieces: list[Piece], anywhere: bool) -> tuple[Tensor, ...]:
    """Captured tensors; an empty one where only other ranks have some, to join backward."""
    own = tuple({id(t): t for piece in pieces for t in piece.seen.captures}.values())
    return (*own, torch.zeros(0, requires_grad=True)) if anywhere else own


class _Piecewise:
    """The message function of a pending column: runs each piece on its edges of a block."""

    def __init__(
        self,
        column: PendingColumn,
        src_keys: list[Key],
        edge_keys: list[Key],
        like: Tensor,
        dropouts: dict[int, list[Drawn]],
    ) -> None:
        self.column, self.src_keys, self.edge_keys, self.like = column, src_keys, edge_keys, like
        self.dropouts = dropouts

    def __call__(
        self, src: list[Tensor], dst: list[Tensor], edge: list[Tensor], position: Tensor
    ) -> list[Tensor]:
        column, columns = self.column, self.column.columns()
        block = _Block(
            position,
            self.dropouts,
            dict(zip(self.src_keys, src, strict=True)),
            dict(zip(column.dst, dst, strict=True)),
            dict(zip(self.edge_keys, edge[len(columns) :], strict=True)),
            {id(c): numbers for c, numbers in zip(columns, edge, strict=False)},
        )
        return [block.values(column, self.like)]


@dataclass
class _Block:
    """Rows of a block of edges.

    Attributes:
        position: int32 [e] positions of the edges among the local ones.
        dropouts: of pieces, by their ``id``.
        src, dst, edge: [e, ...] rows of columns.
        numbers: int32 [e] which piece gives each edge its value, by the ``id`` of the column.
        known: [e, ...] values of pending columns, by their ``id``.
    """

    position: Tensor
    dropouts: dict[int, list[Drawn]]
    src: dict[Key, Tensor]
    dst: dict[Key, Tensor]
    edge: dict[Key, Tensor]
    numbers: dict[int, Tensor]
    known: dict[int, Tensor] = field(default_factory=dict)

    def values(self, column: PendingColumn, like: Tensor) -> Tensor:
        """[e, ...] values of a column, computed once."""
        if id(column) not in self.known:
            self.known[id(column)] = self._run(column, like)
        return self.known[id(column)]

    def _run(self, column: PendingColumn, like: Tensor) -> Tensor:
        numbers = self.numbers[id(column)]
        if column.before is None:
            out = like.new_zeros((len(numbers), *like.shape[1:]))
        else:
            out = self.edge[column.before]
        for index, piece in enumerate(column.pieces):
            mine = (numbers == index).nonzero().view(-1)
            if len(mine):
                value = self._results(column, piece, mine)[column.name]
                value = value if piece.with_grad else value.detach()
                out = out.index_copy(0, mine, value.to(out.dtype))
        return out

    def _results(self, column: PendingColumn, piece: Piece, mine: Tensor) -> Mapping[str, Tensor]:
        """What a piece gives on the edges ``mine`` of the block."""
        arguments = (
            [self.src[key].index_select(0, mine) for key in piece.src],
            [self.dst[key].index_select(0, mine) for key in piece.dst],
            [self._edge_rows(read).index_select(0, mine) for read in piece.edge],
            len(mine),
        )
        dropouts = self.dropouts[id(piece)]
        if not dropouts:
            return call_udf(piece.function, piece.seen, *arguments)
        relation = column.store.relations[column.etype]
        keys = relation.keys.index_select(0, self.position.index_select(0, mine))
        with KeyedDropout(keys, dropouts):
            return call_udf(piece.function, piece.seen, *arguments)

    def _edge_rows(self, read: Key | PendingColumn) -> Tensor:
        return self.values(read, read.like) if isinstance(read, PendingColumn) else self.edge[read]


def defer(store: GraphStore, etype: EType, func: Callable, eids: Tensor, policy: Policy) -> None:
    """Note that ``func`` gives the columns it returns on edges ``eids``; no communication."""
    src, dst = store.src_frames[etype[0]], store.dst_frames[etype[2]]
    edge = store.edge_frames[etype]
    seen = probe(func, src, dst, edge)
    piece = Piece(
        frozen(func),
        seen,
        eids.long(),
        torch.is_grad_enabled(),
        store.group.seeds.note(),
        [(name, src.version(name)) for name in seen.src],
        [(name, dst.version(name)) for name in seen.dst],
        [edge.pending.get(name) or (name, edge.version(name)) for name in seen.edge],
    )
    inner = [read for read in piece.edge if isinstance(read, PendingColumn)]
    reads = {read: edge[read[0]] for read in piece.edge if not isinstance(read, PendingColumn)}
    for name in seen.outputs:
        column = edge.pending.get(name)
        if column is None:
            column = PendingColumn(store, etype, name, policy)
            if name in edge:
                before = (name, edge.version(name))
                column = replace(column, before=before, edge={before: edge[name]})
            edge.pop(name, None)
        # A new column: what a scope has saved and copies of the graph keep theirs.
        known = [column, *inner]
        edge.pending[name] = replace(
            column,
            store=store,
            pieces=(*column.pieces, piece),
            src=_joined([c.src for c in known]) | {key: src[key[0]] for key in piece.src},
            dst=_joined([c.dst for c in known]) | {key: dst[key[0]] for key in piece.dst},
            edge=_joined([c.edge for c in known]) | reads,
            problem=_problem(store.relations[etype], known),
        )


def _joined(columns: list[dict[Key, Tensor]]) -> dict[Key, Tensor]:
    return {key: tensor for each in columns for key, tensor in each.items()}


def _problem(relation: AnyRelation, known: list[PendingColumn]) -> str | None:
    """Why pieces on ``relation`` do not go with ``known`` columns; see :class:`PendingColumn`."""
    for column in known:
        if column.problem is not None:
            return column.problem
        if column.store.relations[column.etype] is not relation:
            return "pieces of a graph and of its reverse read each other"
    return None


def reduce(store: GraphStore, etype: EType, name: str, op: str, policy: Policy) -> Tensor:
    """Reduce (sum, max, min) the messages ``copy_e(name)`` without storing them; collective."""
    column = store.edge_frames[etype].pending.get(name)
    return (column or PendingColumn(store, etype, name, policy)).run(op)
