"""What all ranks agree upon before the pieces of an edge column are computed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from sar.comm import Group
from sar.errors import SarError
from sar.tracing.lazy import EdgeTensor

if TYPE_CHECKING:
    from sar.frontends.dgl.pending import PendingColumn

_STATUS_BYTES = 4096


def agree(column: PendingColumn) -> dict[str, Any]:
    """What the pieces of all ranks read and give: columns, shape, dtype, gradients, dropout.

    Collective. What is wrong shows in the statuses, so that every rank raises it.

    Raises:
        KeyError: no rank has a piece.
        SarError: pieces of a rank read more columns than fit a status, or do not go together.
        ValueError: pieces, or a piece and what the column held before, differ in shape or dtype.
    """
    mine: dict[str, Any] = {}
    if column.pieces:
        rows = [piece.seen.outputs[column.name] for piece in column.pieces]
        rows += [] if column.before is None else [column.edge[column.before]]
        pieces = [piece for each in column.columns() for piece in each.pieces]
        captured = any(p.seen.captures or p.seen.hidden for p in pieces)
        read = [*column.src.values(), *column.dst.values(), *column.edge.values()]
        captured |= any(tensor.requires_grad for tensor in read)
        mine = {
            "src": sorted(column.src),
            "lazy": sorted(k for k, t in column.edge.items() if isinstance(t, EdgeTensor)),
            "rows": sorted({(str(r.dtype).removeprefix("torch."), *r.shape[1:]) for r in rows}),
            "grad": captured and torch.is_grad_enabled(),
            "dropout": any(p > 0 for piece in pieces for p, _ in piece.seen.dropouts),
            "problem": column.problem,
        }
    plans = _gathered(column.store.group, mine)
    too_long = [rank for rank, plan in enumerate(plans) if "too long" in plan]
    if too_long:
        raise SarError(
            f"edge column {column.name!r}: ranks {too_long} read columns whose names take "
            f"too many bytes to agree on, expected at most {_STATUS_BYTES}"
        )
    known = [plan for plan in plans if plan]
    problems = [plan["problem"] for plan in known if plan["problem"] is not None]
    if problems:
        raise SarError(
            f"edge column {column.name!r}: {problems[0]}; expected the first ones to be read on "
            "every rank, as in graph.edata['m'] = graph.edata['m'], before others are noted"
        )
    if not known:
        raise KeyError(f"no edge column {column.name!r} on any rank")
    kinds = sorted({(dtype, *shape) for plan in known for dtype, *shape in plan["rows"]})
    if len(kinds) > 1:
        got = ", ".join(f"{dtype} {shape}" for dtype, *shape in kinds[:16])
        raise ValueError(
            f"edge column {column.name!r}: got rows of {got} for some of the edges, expected one "
            "dtype and shape on all ranks"
        )
    return {
        "src": sorted({(name, version) for plan in known for name, version in plan["src"]}),
        "lazy": sorted({(name, version) for plan in known for name, version in plan["lazy"]}),
        "dtype": kinds[0][0],
        "shape": kinds[0][1:],
        "grad": any(plan["grad"] for plan in known),
        "dropout": any(plan["dropout"] for plan in known),
    }


def _gathered(group: Group, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank says; ``{"too long": True}`` of one that says more than fits. Collective."""
    body = json.dumps(mine).encode()
    if len(body) > _STATUS_BYTES:
        body = json.dumps({"too long": True}).encode()
    status = torch.zeros(_STATUS_BYTES, dtype=torch.uint8)
    status[: len(body)] = torch.tensor(list(body), dtype=torch.uint8)
    return [json.loads(bytes(one.tolist()).rstrip(b"\0")) for one in group.all_gather(status)]
