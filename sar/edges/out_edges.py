"""The edges out of this rank's rows into those of other ranks, as these have told them.

Edges are stored where they end. Where backward computes at their sources instead (Note [At the
sources] in :mod:`sar.ops.attention`), rows of the destinations travel there.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from sar.comm import exchange_counts
from sar.edges.relation import EdgeArrays, Relation, ShardStore
from sar.kernels import Csc
from sar.stream import HaloPlan


class OutEdges:
    """Edges that start in owned rows and end in rows of others, 4 bytes each once they are told.

    Collective. Each method gets ``relation``, the edges that end in owned rows: it is not kept.

    Attributes:
        plan: of the rows in which these edges end; each travels to the owners of its sources.
        num_starts, num_ends: rows in which edges between ranks start, and end, once for each rank
            that would need them; of all ranks.
    """

    def __init__(self, relation: Relation) -> None:
        group, spans = relation.group, _remote_spans(relation)
        dst = relation.arrays().dst
        ends = [dst[span].unique() for span in spans]
        recv_counts = exchange_counts(group, [len(idx) for idx in ends])
        plan = HaloPlan(group, relation.num_dst, [*ends], recv_counts)
        self.plan = plan.to(relation.plan.device)
        rows = torch.tensor([sum(relation.plan.send_counts), sum(plan.send_counts)])
        self.num_starts, self.num_ends = group.all_reduce(rows).tolist()
        self._told = [span.stop - span.start for span in spans]  # edges, to each rank
        self._heard = exchange_counts(group, self._told)
        self._shards: dict[int, list[Csc]] = {}
        self._keys: Tensor | None = None

    def shards(self, relation: Relation, num_rounds: int, *, order: bool) -> list[Csc]:
        """One a round, by owned row; the other ends index the rows that come in it.

        Collective when a number of rounds, or ``order``, is asked for the first time.

        Args:
            order: with the position of each edge in :meth:`keys`.
        """
        known = self._shards.get(num_rounds)
        if known is None or (order and any(csc.order is None for csc in known)):
            relation.store.forget_by_source()  # these take their place
            made = self._hear(relation).shards(num_rounds)
            known = made if order else [replace(csc, order=None) for csc in made]
            self._shards[num_rounds] = known
        return known

    def keys(self, relation: Relation) -> Tensor:
        """:attr:`Relation.keys` of these edges, by position; collective the first time."""
        if self._keys is None:
            eid = relation.arrays().eid
            eids = torch.cat([eid[span] for span in _remote_spans(relation)])
            self._keys = self._tell(relation.keys.index_select(0, eids).long())
        return self._keys

    def _hear(self, relation: Relation) -> ShardStore:
        """Their ends from where they end, in no order that matters."""
        edges, spans = relation.arrays(), _remote_spans(relation)
        ends = [
            torch.searchsorted(self.plan.rows_for(peer), edges.dst[span], out_int32=True)
            for peer, span in enumerate(spans)
        ]
        starts = [edges.src[span] for span in spans]
        dst, src = self._tell(torch.cat(ends)), self._tell(torch.cat(starts)).split(self._heard)
        own = [relation.plan.rows_for(peer).index_select(0, part) for peer, part in enumerate(src)]
        eid = torch.arange(len(dst), dtype=torch.int32, device=dst.device)
        offsets = [*accumulate(self._heard, initial=0)]
        arrays = EdgeArrays(dst, torch.cat(own), eid, offsets)
        return ShardStore(self.plan, 0, relation.num_src, arrays)

    def _tell(self, numbers: Tensor) -> Tensor:
        """A number of each edge, to the owner of its source."""
        return self.plan.group.all_to_all(numbers, self._told, self._heard)


def out_edges_if_cheaper(
    relation: Relation, bytes_of_start: int, bytes_of_end: int
) -> OutEdges | None:
    """Those of ``relation`` if fewer bytes travel over them; the same on all ranks.

    Collective when a relation comes for the first time.

    Args:
        bytes_of_start: that would travel for each remote row in which edges start.
        bytes_of_end: that travel for each in which edges end, if backward computes at the sources.
    """
    edges = relation.derived(OutEdges, lambda: OutEdges(relation))
    cheaper = edges.num_ends * bytes_of_end < edges.num_starts * bytes_of_start
    return edges if cheaper else None


def _remote_spans(relation: Relation) -> list[slice]:
    """Where in a relation's arrays the edges are that start on each rank; none of the own."""
    bounds, rank = pairwise(relation.offsets), relation.group.rank
    return [slice(low, low if peer == rank else high) for peer, (low, high) in enumerate(bounds)]
