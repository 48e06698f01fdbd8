"""Attention out of one table of all ranks' rows, which take turns in one process: no row travels.

A rank sees all edges into a row at once, so nothing is rescaled, and results are those of rounds to
rounding. Backward goes over two tables, one after the other: values and keys, from which the
destinations' gradients of queries are summed, then what is known of the destinations, from which
the sources' gradients of values and keys are. So each rank writes its own rows alone, and no bit
depends on whose turn comes first. Where whole rows do not fit into the table, some heads come at a
time, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sar.comm.group import Table
from sar.edges.relation import Relation
from sar.edges.whole import TableEdges, edges_of_table
from sar.kernels import wide_dtype
from sar.kernels.attention import (
    Columns,
    Incoming,
    Mask,
    Normalizer,
    Running,
    Scores,
    attend,
    attend_grad_additive,
    attend_grad_of_additive_queries,
    attend_grad_of_queries,
    attend_grad_of_sources,
)
from sar.kernels.attention_loops import ADDITIVE
from sar.ops.attention_passes import Sources, widened
from sar.partition.features import narrow

Heads = tuple[int, int]  # the first, and the one behind the last


class TableAttention:
    """The two passes of one attention over the table of its group; collective.

    Args:
        sources: values and keys of the owned rows, which need not survive a turn where they can be
            made again.
        query, weight: as for :func:`sar.ops.attention.attention`; no weight is [0].
    """

    def __init__(self, table: Table, sources: Sources, query: Tensor, weight: Tensor) -> None:
        self.spec, self.sources, self.table = sources.spec, sources, table
        self.scores, self.additive = self.spec.scores, self.spec.scores.kind == ADDITIVE
        self.query, self.weight = widened(query), widened(weight)
        edges = edges_of_table(self.spec.relation, self.spec.dropout is not None)
        self.edges, self.into, self.out_of = edges, edges.into, edges.out_of

    def forward(self) -> tuple[Tensor, Normalizer]:
        """out [num_dst, H * D], and m and 1 / s, which normalize the weights."""
        meter = self.spec.relation.group.meter
        if meter.notes is not None:
            meter.tell("table")
        done = [self._attended(*some) for some in self._values_and_keys("forward")]
        normalizers = [normalizer for _, normalizer in done]
        return _joined([out for out, _ in done]), Normalizer(*map(_joined, zip(*normalizers)))

    def backward(self, incoming: Incoming, wanted: bool) -> tuple[list[Tensor], Tensor, Tensor]:
        """Gradients of the sources, which are ``wanted`` or 0, of the queries and of
        the weight, in the wide dtype; ``incoming`` includes the queries for additive scores."""
        found = [self._of_queries(incoming, *some) for some in self._values_and_keys("backward")]
        dquery, dweight = map(_joined, zip(*found))
        if wanted:
            return self._of_sources(incoming), dquery, dweight.view(-1)
        homes = [torch.zeros_like(widened(part)) for part in self.sources.rows()]
        return homes, dquery, dweight.view(-1)

    def _values_and_keys(self, what: str) -> Iterator[tuple[Heads, Tensor, Tensor]]:
        """Some heads at a time, with the tables of their values and keys."""
        parts = self.sources.rows()
        wide, width = wide_dtype(parts[0].dtype), sum(part.shape[1] for part in parts)
        for heads in self._blocks(self.into, width // self.scores.heads, wide):
            some = [self._some(widened(part), heads) for part in parts]
            if heads[1] == self.scores.heads:
                del parts
                self.sources.let_go()
            tables = self._publish(some, f"values and keys, {what}", self.into)
            yield heads, tables[0], tables[-1]

    def _attended(self, heads: Heads, value: Tensor, key: Tensor) -> tuple[Tensor, Normalizer]:
        scores, query, weight = self._at_ends(heads)
        running = Running.start(len(query), scores.heads, scores.width, query)
        rows, mask = (Columns(key), Columns(value)), self._mask(self.into, heads)
        attend(self.into.edges, scores, *rows, query, weight, running, mask)
        return running.finish()

    def _of_queries(
        self, incoming: Incoming, heads: Heads, value: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of some heads: dq, and the gradient of the weight, [1, width]."""
        scores, query, weight = self._at_ends(heads)
        known, mask = self._known(incoming, heads), self._mask(self.into, heads)
        dquery = torch.zeros_like(query)
        if self.additive:
            end = known, dquery, mask
            attend_grad_of_additive_queries(self.into.edges, scores, key, value, *end)
            return dquery, query.new_empty((1, 0))
        args = scores, Columns(key), Columns(value), query, weight, known, dquery, mask
        return dquery, attend_grad_of_queries(self.into.edges, *args).view(1, -1)

    def _of_sources(self, incoming: Incoming) -> list[Tensor]:
        """dv and, where there are keys, dk, [num_src, ..]."""
        width, found = incoming.dout.shape[1] + incoming.known.shape[1], list[list[Tensor]]()
        width += 0 if self.additive else self.query.shape[1]
        for heads in self._blocks(self.out_of, width // self.scores.heads, incoming.dout.dtype):
            known = self._known(incoming, heads)
            some = [known.dout, known.known, *([] if self.additive else self._at_ends(heads)[1:2])]
            mask = self._mask(self.out_of, heads)  # collective at first, so before rows are there
            del known
            tables = self._publish(some, "what is known where edges end", self.out_of)
            found.append(self._of_some_sources(heads, mask, *tables))
        return list(map(_joined, zip(*found)))

    def _of_some_sources(
        self, heads: Heads, mask: Mask | None, dout: Tensor, known: Tensor, *query: Tensor
    ) -> list[Tensor]:
        rows = [self._some(widened(part), heads) for part in self.sources.rows()]
        grads = list(map(torch.empty_like, rows))
        key, value, dkey, dvalue = map(Columns, (rows[-1], rows[0], grads[-1], grads[0]))
        scores, own, weight = self._at_ends(heads)
        ends = Incoming(dout, known)
        if self.additive:
            dquery = own.new_empty((torch.get_num_threads(), 0, scores.heads))
            end = dkey, dvalue, dquery, mask
            attend_grad_additive(self.out_of.edges, scores, key, value, ends, *end)
        else:
            grad = weight, ends, dkey, dvalue, mask
            attend_grad_of_sources(self.out_of.edges, scores, key, value, query[0], *grad)
        return grads

    def _blocks(self, ends: TableEdges, numbers: int, dtype: torch.dtype) -> Iterator[Heads]:
        """Heads that fit into the table at once, of each so many ``numbers`` a row."""
        heads = self.scores.heads
        at_once = self.table.columns(ends.num_rows, heads, dtype, numbers)
        return ((low, min(low + at_once, heads)) for low in range(0, heads, at_once))

    def _publish(self, rows: list[Tensor], what: str, ends: TableEdges) -> list[Tensor]:
        return self.table.publish(rows, f"attention: {what}", ends.first, ends.num_rows)

    def _at_ends(self, heads: Heads) -> tuple[Scores, Tensor, Tensor]:
        """Scores, queries and weight of some heads."""
        weight = self._some(self.weight.view(1, -1), heads).view(-1)
        scores = replace(self.scores, heads=heads[1] - heads[0])
        return scores, self._some(self.query, heads), weight

    def _known(self, incoming: Incoming, heads: Heads) -> Incoming:
        sets = incoming.known.shape[1] // self.scores.heads
        dout = self._some(incoming.dout, heads)
        return Incoming(dout, self._some(incoming.known, heads, sets))

    def _mask(self, ends: TableEdges, heads: Heads) -> Mask | None:
        relation = self.spec.relation
        if self.spec.dropout is None:
            return None
        keys = relation.keys if ends is self.into else self._keys_at_sources(relation)
        return Mask(keys, *self.spec.dropout, first=heads[0])

    def _keys_at_sources(self, relation: Relation) -> Tensor:
        """Names in random numbers of the edges out of owned rows; collective at first."""
        group, edges = relation.group, self.edges

        def tell() -> Tensor:
            return narrow(edges.at_sources(group, relation.keys.long()))

        return relation.derived("keys of a table", tell)

    def _some(self, rows: Tensor, heads: Heads, sets: int = 1) -> Tensor:
        """Columns of some heads of rows [n, sets * H * ..]."""
        (low, high), count = heads, self.scores.heads
        if high - low == count:
            return rows
        apart = rows.unflatten(1, (sets, count, rows.shape[1] // (sets * count)))
        return apart[:, :, low:high].flatten(1).contiguous()


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """Columns side by side."""
    some = list(parts)
    return some[0] if len(some) == 1 else torch.cat(some, 1)
