"""Edge columns written piece by piece with user functions, computed when they are read.

A layer may call ``apply_edges(udf, eids)`` only where ``eids`` is not empty, which differs between
ranks, while computing the piece needs every rank. So a piece is only noted; the column is
computed by the call that reads it, which every rank makes. The ranks first agree what the pieces
of all of them read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sar.comm import Group
from sar.config import Policy
from sar.errors import SarError
from sar.graph.store import EType, GraphStore
from sar.graph.udf import Probe, call_udf, frozen, probe
from sar.ops import Messages, run_messages

_STATUS_BYTES = 4096


@dataclass(frozen=True)
class Piece:
    """A user function and the positions of the edges it is for."""

    function: Callable
    seen: Probe
    eids: Tensor


@dataclass
class PendingColumn:
    """A column of pieces; source and destination columns are those of the time it was written."""

    store: GraphStore
    etype: EType
    name: str
    policy: Policy
    pieces: list[Piece]
    columns: dict[str, dict[str, Tensor]]

    def materialize(self) -> Tensor:
        """[num_edges, ...] values on the local edges; collective."""
        return _run(self.store, self.etype, self.name, self, "edges", self.policy)


def defer(store: GraphStore, etype: EType, func: Callable, eids: Tensor, policy: Policy) -> None:
    """Note that ``func`` gives the columns it returns on edges ``eids``; no communication."""
    src, dst, edge = (
        store.src_frames[etype[0]],
        store.dst_frames[etype[2]],
        store.edge_frames[etype],
    )
    seen = probe(func, src, dst, edge)
    piece = Piece(frozen(func), seen, eids.long())
    for name in seen.outputs:
        column = edge.pending.get(name)
        if column is None:
            column = PendingColumn(
                store, etype, name, policy, [], {"src": {}, "dst": {}, "edge": {}}
            )
            if name in edge:
                column.columns["before"] = {name: edge[name]}
                del edge[name]
            edge.pending[name] = column
        column.pieces.append(piece)
        for side, frame, names in (
            ("src", src, seen.src),
            ("dst", dst, seen.dst),
            ("edge", edge, seen.edge),
        ):
            column.columns[side].update({n: frame[n] for n in names})


def reduce(store: GraphStore, etype: EType, name: str, op: str, policy: Policy) -> Tensor:
    """Reduce the messages ``copy_e(name)`` without storing the column; collective."""
    from sar.graph.passing import mean_of_sum

    column = store.edge_frames[etype].pending.get(name)
    out = _run(store, etype, name, column, "sum" if op == "mean" else op, policy)
    return mean_of_sum(out, store.relations[etype]) if op == "mean" else out


def _run(
    store: GraphStore,
    etype: EType,
    name: str,
    column: PendingColumn | None,
    reduce: str,
    policy: Policy,
) -> Tensor:
    relation = store.relations[etype]
    plan = _agree(store.group, name, column)
    src_names = plan["src"]
    pieces = [] if column is None else column.pieces
    columns: dict[str, dict[str, Tensor]] = {"src": {}, "dst": {}, "edge": {}}
    if column is not None:
        columns.update(column.columns)
    src_frame = store.src_frames[etype[0]]
    src = [columns["src"].get(n, src_frame[n]) for n in src_names]
    dst, edge = list(columns["dst"].values()), list(columns["edge"].values())
    dtype = getattr(torch, plan["dtype"])
    like = torch.empty((0, *plan["shape"]), dtype=dtype, device=store.device)
    number = torch.full((relation.num_edges,), -1, dtype=torch.int32, device=store.device)
    for index, piece in enumerate(pieces):
        number[piece.eids] = index
    before = columns.get("before", {}).get(name)
    if before is not None:
        edge.append(before)
    names = (src_names, list(columns["dst"]), list(columns["edge"]))
    function = _piecewise(pieces, name, names, like, before is not None)
    captures = tuple(t for piece in pieces for t in piece.seen.captures)
    if plan["grad"]:  # so that every rank takes part in backward
        captures += (torch.zeros(0, requires_grad=True),)
    hidden = tuple({id(t): t for piece in pieces for t in piece.seen.hidden}.values())
    messages = Messages(function, is_udf=True, captures=captures, hidden=hidden)
    (out,) = run_messages(relation, messages, reduce, policy, src, dst, [number, *edge], [like])
    return out


def _piecewise(
    pieces: list[Piece], name: str, names: tuple[list[str], ...], like: Tensor, has_before: bool
) -> Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Tensor]]:
    """A message function that runs each piece on its edges of a block."""
    src_names, dst_names, edge_names = names

    def function(src: list[Tensor], dst: list[Tensor], edge: list[Tensor]) -> list[Tensor]:
        number, data = edge[0], edge[1:]
        out = data[-1] if has_before else like.new_zeros((len(number), *like.shape[1:]))
        for index, piece in enumerate(pieces):
            mine = (number == index).nonzero().view(-1)
            if len(mine) == 0:
                continue
            rows = [
                _picked(piece_names, known, tensors, mine)
                for piece_names, known, tensors in (
                    (piece.seen.src, src_names, src),
                    (piece.seen.dst, dst_names, dst),
                    (piece.seen.edge, edge_names, data),
                )
            ]
            values = call_udf(piece.function, piece.seen, *rows, len(mine))[name]
            out = out.index_copy(0, mine, values.to(out.dtype))
        return [out]

    return function


def _picked(
    wanted: list[str], known: list[str], tensors: list[Tensor], idx: Tensor
) -> list[Tensor]:
    return [tensors[known.index(name)].index_select(0, idx) for name in wanted]


def _agree(group: Group, name: str, column: PendingColumn | None) -> dict[str, Any]:
    """What the pieces of all ranks read and give: source columns, shape, dtype, gradients."""
    mine: dict[str, Any] = {}
    if column is not None:
        like = column.pieces[0].seen.outputs[name]
        captured = any(p.seen.captures or p.seen.hidden for p in column.pieces)
        mine = {
            "src": sorted(column.columns["src"]),
            "shape": list(like.shape[1:]),
            "dtype": str(like.dtype).removeprefix("torch."),
            "grad": captured and torch.is_grad_enabled(),
        }
    body = json.dumps(mine).encode()
    if len(body) > _STATUS_BYTES:
        raise SarError(f"edge column {name!r}: too many source columns to agree on")
    status = torch.zeros(_STATUS_BYTES, dtype=torch.uint8)
    status[: len(body)] = torch.tensor(list(body), dtype=torch.uint8)
    plans = [json.loads(bytes(t.tolist()).rstrip(b"\0")) for t in group.all_gather(status)]
    known = [plan for plan in plans if plan]
    if not known:
        raise KeyError(f"no edge column {name!r} on any rank")
    agreed = dict(known[0])
    agreed["src"] = sorted({column for plan in known for column in plan["src"]})
    agreed["grad"] = any(plan["grad"] for plan in known)
    return agreed
