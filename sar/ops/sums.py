"""S A x over the edges of a relation: how it is streamed is chosen once for rows of one kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from sar.comm.group import Table
from sar.config import CONSTANT_INPUTS, Policy
from sar.edges.constant import Constants, constants_of, held
from sar.edges.push_pull import LinearRelation, linear_relation
from sar.edges.relation import LOCAL, Relation, ShardStore
from sar.edges.whole import TableEdges, edges_of_table
from sar.errors import NotSupportedError
from sar.kernels import Factors, add_rows, spmm, spmm_add, spmm_into, wide_dtype
from sar.kernels.nonzero import can_pack
from sar.ops.saving import spares_memory
from sar.stream import (
    WINDOW,
    GradientMessages,
    GradientReturn,
    RowMessages,
    Stream,
    Whole,
    agree_on_gradients,
)
from sar.stream.zeros import NonZeros, PackedGradients, PackedRows, drops_zeros, is_read

Place = Callable[[], Tensor | None]  # memory of owned rows that nobody reads any more, if any


class Sums:
    """S A over the edges of a relation, as the two passes of a layer stream it.

    Args:
        edges: what this rank has left to sum, see :func:`sar.edges.push_pull.linear_relation`;
            not the relation, which keeps this object.
        scale: S, [num_dst] in the wide dtype; ``None`` is 1.
        row_bytes: of a row on the wire, by which rounds are chosen.
        weighted: edges have weights.
    """

    num_dst_in_turns: int | None = None  # rows of a sum which other ranks compute before

    def __init__(
        self, edges: ShardStore | LinearRelation, policy: Policy, scale: Tensor | None,
        row_bytes: int, weighted: bool = False,
    ) -> None:  # fmt: skip
        self.edges, self.policy, self.scale, self.plan = edges, policy, scale, edges.plan
        self.order = weighted
        self.num_rounds = edges.plan.num_rounds(policy, row_bytes)
        self.rounds = edges.plan.rounds(self.num_rounds)
        self._fits_window = 0 < len(self.rounds) <= WINDOW
        self._own = edges.local(order=weighted)
        self._remote = edges.shards(self.num_rounds, order=weighted) if self.rounds else []

    def of(self, rows: Tensor | None) -> Sums:
        """The sums of one call; ``rows``, if any, are those that the caller holds."""
        return self

    def begin(
        self, x: Tensor, weight: Tensor | None = None, keep: list[Tensor] | None = None
    ) -> tuple[Tensor, Callable[[], None]]:
        """S A x, [num_dst, width], whole when the function that comes with it has been called.

        What is there at once are sums over a rank's own edges, computed while the first rounds
        travel; where memory counts, after one has landed, whose send buffer makes room for them.

        Args:
            x: [num_src, width] contiguous.
            weight: [num_edges] per local edge.
            keep: a list that gets the halo of each round.
        """
        factors = Factors(edge=weight, row=self.scale)
        stream = Stream(self.messages(x, keep is not None), self.rounds, WINDOW)
        landed: list[Tensor] = []
        if self._fits_window and spares_memory():
            landed.append(next(stream)[1])
            self.plan.group.pool.clear()
        out = spmm(self._own, x, factors)

        def finish() -> None:
            for shard in self._remote:
                halo = landed.pop() if landed else next(stream)[1]
                spmm_add(out, shard, halo, factors)
                if keep is not None:
                    keep.append(halo)
            stream.free()

        return out, finish

    def reduced(self, rows: Callable[[], Tensor], then: Callable[[Tensor], Tensor]) -> Tensor:
        """``then(S A rows())`` of rows without a gradient; not to be written into."""
        out, finish = self.begin(rows())
        finish()
        if spares_memory():
            self.plan.group.pool.clear()
        return then(out)

    def home(
        self, dout: Tensor, place: Place | None = None, *, weight: Tensor | None = None,
        settled: bool = False,
    ) -> GradientReturn | Whole:  # fmt: skip
        """A^T S dout, [num_src, width] in the wide dtype, the last rounds of it on their way home.

        No row is fetched; each round is sent as soon as it is computed.

        Args:
            place: called for memory of the result once rounds are on their way.
            settled: all of them are home, because memory counts.
        """
        scale, edges, rounds = self.scale, self.edges, self.rounds
        if scale is not None and dout.dtype != scale.dtype:  # a narrow factor would lose digits
            dout, scale = (dout * scale.unsqueeze(1)).to(dout.dtype), None
        factors = Factors(edge=weight, gathered=scale)

        def local() -> Tensor:
            own = next(edges.transposed(LOCAL, self.policy, order=self.order))
            return spmm(own, dout, factors, None if place is None else place())

        messages = self.gradients(dout.shape[1], dout.dtype)
        home = GradientReturn(messages, local, local_last=settled and self._fits_window)
        shards = edges.transposed(self.num_rounds, self.policy, order=self.order)
        for (_, grads), shard in zip(home.each(rounds), shards, strict=True):
            spmm_into(grads, shard, dout, factors)
            del grads  # no buffer is held when this returns
        if settled:
            home.settle()
        home.own()
        return home

    def here(self, rows: Tensor) -> Tensor:
        """``rows`` that :meth:`begin` or :meth:`home` got last, until the next collective."""
        return rows

    def held_tensors(self) -> list[Any]:
        """Tensors held until backward, beside the edges."""
        return [self.scale]

    def messages(self, x: Tensor, keep: bool) -> RowMessages:
        return RowMessages(self.plan, [x], keep)

    def gradients(self, width: int, dtype: torch.dtype) -> GradientMessages:
        return GradientMessages(self.plan, width, dtype, add_rows)


class SumsWithoutZeros(Sums):
    """Sums whose rows leave their zeros at home: 284 MB an epoch of SAGE on 8 ranks, not 393.

    It takes .6 s of a processor, so it pays on links below about 1 Gbit/s. See Note [Zeros].
    """

    _rows: ReferenceType[Tensor] | None
    _bits: NonZeros

    def of(self, rows: Tensor | None) -> Sums:
        call = copy(self)
        drops = rows is not None and drops_zeros(rows)
        call._rows = ref(rows) if drops and rows is not None else None
        return call

    def held_tensors(self) -> list[Any]:
        return [self.scale, self._bits]

    def messages(self, x: Tensor, keep: bool) -> RowMessages:
        self._bits = NonZeros(self.plan, x, self._rows is not None)
        return PackedRows(self._bits, x, keep)

    def gradients(self, width: int, dtype: torch.dtype) -> GradientMessages:
        rows = None if self._rows is None else self._rows()
        if rows is not None and is_read(rows):
            raise NotSupportedError(
                f"zeros: got 'skip' and a hook, or retain_grad, on rows {tuple(rows.shape)} after "
                "they were summed; expected it before, or zeros='send'"
            )
        return PackedGradients(self._bits)


class TableSums(Sums):
    """Sums out of one table of all ranks' rows, which take turns in one process: no row travels.

    Each rank publishes its rows; when all have, each sums over all of its edges at once, some
    columns at a time where the table is too small for whole rows. Backward does the same over the
    edges out of its rows. Results are those of rounds to rounding, as a row's edges are summed in
    one pass, and the same bits for any number of columns at a time.
    """

    def __init__(
        self, relation: Relation, table: Table, policy: Policy, scale: Tensor | None, what: str,
        like: Tensor, weighted: bool,
    ) -> None:  # fmt: skip
        self.plan, self.policy, self.scale = relation.plan, policy, scale
        self._table, self._what, self._edges = table, what, edges_of_table(relation, weighted)
        self._scales: Tensor | None = None  # of all ranks' rows, for backward
        if scale is not None and like.requires_grad and like.dtype == scale.dtype:
            self._scales = _scale_of_all(relation, table, scale, self._edges.out_of)
        self._lies: tuple[int, int] | None = None  # where own rows begin in the table, of how many
        self.num_dst_in_turns = relation.num_dst

    def of(self, rows: Tensor | None) -> Sums:
        self._table.wait()  # before rows are made that would have to survive the turn
        return self

    def begin(
        self, x: Tensor, weight: Tensor | None = None, keep: list[Tensor] | None = None
    ) -> tuple[Tensor, Callable[[], None]]:
        if self.plan.group.meter.notes is not None:
            self.plan.group.meter.tell("table")
        rows = [x]
        del x
        factors = Factors(edge=weight, row=self.scale)
        return self._summed(self._edges.into, rows, factors, None), lambda: None

    def home(
        self, dout: Tensor, place: Place | None = None, *, weight: Tensor | None = None,
        settled: bool = False,
    ) -> Whole:  # fmt: skip
        self._table.wait()
        weight = None if weight is None else self._edges.at_sources(self.plan.group, weight)
        out, scale, ends = None if place is None else place(), self.scale, self._edges.out_of
        scales = self._scales
        if scale is not None and (scales is None or dout.dtype != scale.dtype):
            dout, scales = (dout * scale.unsqueeze(1)).to(dout.dtype), None  # loses no digits
        rows = [dout]
        del dout
        return Whole(self._summed(ends, rows, Factors(edge=weight, gathered=scales), out))

    def here(self, rows: Tensor) -> Tensor:
        return rows if self._lies is None else self._table.own(rows, *self._lies)

    def _summed(
        self, ends: TableEdges, rows: list[Tensor], factors: Factors, out: Tensor | None
    ) -> Tensor:
        """Sums of ``rows``, the only ones of a list, which is emptied when they are published."""
        width, dtype = rows[0].shape[1], rows[0].dtype
        if not width:
            self._lies = None
            return rows[0].new_empty((ends.edges.num_rows, 0), dtype=wide_dtype(dtype))
        at_once = self._table.columns(ends.num_rows, width, dtype)
        self._lies = (ends.first, ends.num_rows) if at_once == width else None
        sums = list[Tensor]()
        for low in range(0, width, at_once):
            some = [(rows[0] if low + at_once < width else rows.pop())[:, low : low + at_once]]
            (table,) = self._table.publish(some, self._what, ends.first, ends.num_rows)
            sums.append(spmm(ends.edges, table, factors, out if at_once == width else None))
        return sums[0] if len(sums) == 1 else torch.cat(sums, 1, out=out)


def _scale_of_all(relation: Relation, table: Table, scale: Tensor, ends: TableEdges) -> Tensor:
    """The scale of all ranks' rows, once for all layers that have the same; collective."""
    _, whole = relation.derived(  # who has the scale as well: no other gets its id
        ("scale of all ranks", id(scale)),
        lambda: (scale, table.keep(scale, ends.first, ends.num_rows)),
    )
    return whole


class KeptSums(Sums):
    """Sums of rows without a gradient, kept once the same rows come again.

    An epoch of SAGE on 4 ranks sends 210 MB, not 260, and takes 2.07 seconds of a processor, not
    2.41. See Note [Constant rows].

    Args:
        what: names what is computed of the rows.
        learns: the rows are those of a model's input, not hidden ones in an evaluation.
    """

    def __init__(self, sums: Sums, constants: Constants, what: str, learns: bool) -> None:
        self.plan, self.policy, self.scale = sums.plan, sums.policy, sums.scale
        self._sums, self._constants, self._what, self._learns = sums, constants, what, learns
        self._rows: Tensor | None = None

    def of(self, rows: Tensor | None) -> Sums:
        call = copy(self)
        call._rows = rows
        return call

    def begin(
        self, x: Tensor, weight: Tensor | None = None, keep: list[Tensor] | None = None
    ) -> tuple[Tensor, Callable[[], None]]:
        tensors = [x if self._rows is None else self._rows, *([] if weight is None else [weight])]
        use = self._constants.use(tensors, self._what, self.policy, self._learns)
        if use.kept is not None:
            (kept,) = use.kept
            out = kept.to(x.device, wide_dtype(x.dtype))
            return out.clone() if out is kept else out, lambda: None
        before = self.plan.group.counters.sent_bytes
        out, finish = self._sums.of(None).begin(x, weight, keep)

        def finish_and_keep() -> None:
            finish()
            if use.again and not out.is_inference():
                use.keep([held(out.to(x.dtype), self.policy)], before)

        return out, finish_and_keep

    def reduced(self, rows: Callable[[], Tensor], then: Callable[[Tensor], Tensor]) -> Tensor:
        """As :meth:`Sums.reduced`; the rows given to :meth:`of` stand for ``rows()``."""
        given = rows() if self._rows is None else self._rows
        use = self._constants.use([given], self._what, self.policy, self._learns)
        if use.kept is not None:
            return use.kept[0].to(given.device)
        before = self.plan.group.counters.sent_bytes
        out = self._sums.of(None).reduced(rows, then)
        if use.again and not out.is_inference():
            use.keep([held(out, self.policy)], before)
        return out

    def held_tensors(self) -> list[Any]:
        return []


def sums_over(
    relation: Relation,
    rows: Tensor,
    policy: Policy,
    what: str,
    scale: Callable[[], Tensor | None],
    *,
    width: int | None = None,
    weight: Tensor | None = None,
    trained: bool = True,
    agreed: bool = False,
) -> Sums:
    """Sums of rows of this kind; made when they come for the first time, which is collective.

    Args:
        rows: [*, ...] floating point, which are summed, or that they are made from.
        what: names what is computed of them, with the scale, among all of the relation.
        width: of the rows that are summed, if they are made from ``rows``.
        weight: per edge, if there is any.
        trained: they, or weights, ask for a gradient. Others are kept once they came again.
        agreed: no rank differs in that; else it is an error on all.
    """
    given = rows if width is None else None
    width = math.prod(rows.shape[1:]) if width is None else width
    learns = torch.is_grad_enabled()
    key = what, width, rows.dtype, policy, weight is None, trained, agreed, learns
    sums: Sums | None = relation.known.get(key)
    if sums is None:
        like = rows.new_empty((0, width)).requires_grad_(trained)
        if not agreed:
            agree_on_gradients(relation.plan, [("rows of a sum", like)], 1)
        made = f"{what} of {'rows' if given is not None else 'what is made of rows'}"
        sums = _chosen(relation, like, policy, scale(), weight, made)
        if not trained and policy.constant_inputs != "off":
            sums = KeptSums(sums, constants_of(relation), what, learns)
        relation.known[key] = sums
    return sums.of(given)


def _chosen(
    relation: Relation, like: Tensor, policy: Policy, scale: Tensor | None, weight: Tensor | None,
    what: str,
) -> Sums:  # fmt: skip
    """Choose how rows like these are summed, alike on all ranks; collective."""
    without_zeros = _agree_way(relation, like.dtype, policy)
    table = relation.group.table
    if table is not None:
        return TableSums(relation, table, policy, scale, what, like, weight is not None)
    edges = linear_relation(relation, like, weight, policy)
    kind = SumsWithoutZeros if without_zeros else Sums
    row_bytes = like.shape[1] * like.element_size()
    return kind(edges, policy, scale, row_bytes, weight is not None)


def _agree_way(relation: Relation, dtype: torch.dtype, policy: Policy) -> bool:
    """Whether rows of a sum travel without their zeros.

    ``ValueError`` on all ranks where they differ in that, or in whether constant rows are kept,
    which takes an all-reduce of all ranks in each call.
    """
    skips = policy.zeros == "skip" and relation.group.size > 1 and can_pack(dtype)
    what = "(number of the mode of constant_inputs, what goes without zeros)"
    mode = CONSTANT_INPUTS.index(policy.constant_inputs)
    relation.plan.agree_once(what, mode, int(skips))
    return skips


def mean_scale(relation: Relation, dtype: torch.dtype) -> Tensor:
    """1 / in-degree [num_dst], and 1 where there is no edge, in the wide dtype of ``dtype``; kept,
    not to be written into."""
    wide = wide_dtype(dtype)

    def make() -> Tensor:
        return relation.in_degrees.clamp(min=1).to(wide).reciprocal_()

    return relation.derived(("1 / in-degree", wide), make)
