"""Reductions of one source tensor over several relations; its rows travel once for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sar.config import Policy
from sar.frontends.dgl.store import GraphStore
from sar.graph.view import Scope
from sar.partition.book import EType
from sar.tracing.reducing import mean_of_sum, reduce_rows, rows_of


def stream_of(op: str) -> str:
    """Reductions of one stream can be carried out together: sums and means, maxima, minima."""
    return "sum" if op == "mean" else op


def reduce_jointly(
    store: GraphStore, ops: Mapping[EType, str], x: Tensor, policy: Policy
) -> dict[EType, Tensor]:
    """[num_dst, ...] of each relation, which may be written into; collective.

    Args:
        ops: reduction of each relation, of one stream; the same relations in the same order on all
            ranks, none reversed.
        x: [num_src, ...] floating point rows of the one source type.
    """
    joint = store.join(tuple(ops))
    op = stream_of(next(iter(ops.values()))) if len(set(ops.values())) > 1 else [*ops.values()][0]
    rows = reduce_rows(rows_of(Scope(joint, policy, store.device), "u", x, "x"), op)
    sizes = [store.relations[etype].num_dst for etype in ops]
    pieces = dict(zip(ops, _split(rows, sizes), strict=True))
    for etype, piece in pieces.items():
        if ops[etype] != op:
            pieces[etype] = mean_of_sum(piece, store.relations[etype])
    return pieces


def _split(rows: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Consecutive pieces that may be written into."""
    if rows.requires_grad:  # no views to autograd: backward concatenates their gradients once
        return torch.unsafe_split_with_sizes(rows, sizes)
    # Writes count as writes into the rows, which somebody may keep, but not into other pieces.
    ends = accumulate(sizes)
    return [rows.detach()[end - size : end] for size, end in zip(sizes, ends, strict=True)]
