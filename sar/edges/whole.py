"""The edges of a rank between its rows and those of one table of all ranks' rows."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sar.edges.relation import EdgeArrays, Relation
from sar.kernels import Csc, compress


class TableEdges(NamedTuple):
    """Edges whose other ends are rows of a table: those of rank 0 come first, then of rank 1, ..

    Attributes:
        edges: by the owned row; a row's edges are in the order of their ids, and of their ranks.
        first: where the rank's rows begin in a table of the other side's kind.
        num_rows: rows of that table.
        keys: names of the edges in random numbers, by the positions in ``edges.order``; ``None``
            where nothing was to be dropped so far.
    """

    edges: Csc
    first: int
    num_rows: int
    keys: Tensor | None = None


def edges_of_table(relation: Relation, keyed: bool = False) -> tuple[TableEdges, TableEdges]:
    """:func:`table_edges`, made at first need and kept; with keys take the place of those without.
    Collective."""
    keyed = keyed or ("edges of a table", True) in relation.known
    found = relation.derived(("edges of a table", keyed), lambda: table_edges(relation, keyed))
    if keyed:
        relation.known.pop(("edges of a table", False), None)
    return found


def table_edges(relation: Relation, keyed: bool) -> tuple[TableEdges, TableEdges]:
    """The edges into owned rows, out of a table of sources; and those out of owned rows, which end
    in rows of a table of destinations. Collective: the latter come from the ranks they end on."""
    group, arrays = relation.group, relation.arrays()
    sizes = group.all_gather(torch.tensor([relation.num_src, relation.num_dst]))
    src_starts, dst_starts = (
        [*accumulate(side, initial=0)] for side in torch.stack(sizes).t().tolist()
    )
    first_src, first_dst = src_starts[group.rank], dst_starts[group.rank]
    src = _sources_at_home(relation, arrays)
    lengths = [high - low for low, high in pairwise(arrays.offsets)]
    starts = torch.tensor(src_starts[:-1]).repeat_interleave(torch.tensor(lengths)).int()
    order = torch.argsort(arrays.eid)
    into = compress(
        arrays.dst[order], (src + starts)[order], relation.num_dst, compact=False,
        order=arrays.eid[order].int() if keyed else False,
    )  # fmt: skip
    keys = relation.keys[arrays.eid] if keyed else None
    heard = group.all_to_all(torch.tensor(lengths), [1] * group.size, [1] * group.size).tolist()
    ends = torch.stack([src, arrays.dst + first_dst], dim=1)
    del src, starts, order, arrays
    owned, dst = group.all_to_all(ends, lengths, heard).t()
    out_of = compress(owned, dst, relation.num_src, compact=False, order=keyed)
    their_keys = None if keys is None else group.all_to_all(keys.long(), lengths, heard)
    return (
        TableEdges(into, first_src, src_starts[-1], relation.keys if keyed else None),
        TableEdges(out_of, first_dst, dst_starts[-1], their_keys),
    )


def _sources_at_home(relation: Relation, arrays: EdgeArrays) -> Tensor:
    """The source of each edge as its owner numbers it, int32 [num_edges]; collective."""
    plan, peers = relation.plan, range(relation.group.size)
    told = [plan.rows_for(peer) for peer in peers if peer != relation.group.rank]
    sent = torch.cat([arrays.src[:0], *told])
    heard = relation.group.all_to_all(sent, plan.send_counts, plan.recv_counts)
    src = arrays.src.clone()
    for (low, high), rows in zip(pairwise(arrays.offsets), heard.split(plan.recv_counts)):
        if len(rows):
            src[low:high] = rows[src[low:high]]
    return src
