"""The edges that batches grow from, and the pairs without an edge beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.partition.book import EType, PartitionBook
from sar.partition.load import PartitionData
from sar.sampling.exchange import Exchange, id_bounds
from sar.sampling.negatives import Negatives, NegativeSampling, pair_keys
from sar.sampling.node_inputs import check_given_time, dealt, located, numbered
from sar.sampling.options import LoaderOptions
from sar.sampling.sample import Sample, Seeds, Trees
from sar.sampling.topology import NEVER, integers, source_ids, target_ids

EXCLUDE = (None, "self", "reverse")


class Links(NamedTuple):
    """What the seed edges of a batch are, in local numbers of their nodes.

    Attributes:
        src, dst: int64 [m]: of the seed edges, those of binary negatives behind them.
        label: [m, ...], 0 for binary negatives; those that were given, plus one if they hold 0 and
            there are binary negatives; else ones.
        negative: int64 [batch_size, amount], other destinations; of triplets.
        time: int64 [m], after which nothing was drawn; of a loader with ``time_attr``.
        has_negatives: whether the loader draws some, also where a batch has none.
    """

    src: Tensor
    dst: Tensor
    label: Tensor
    negative: Tensor | None
    time: Tensor | None
    has_negatives: bool


@dataclass(frozen=True)
class LinkOptions:
    """What a loader of seed edges takes beside the options of all loaders.

    Attributes:
        negatives: how pairs without an edge are drawn, if they are.
        exclude: which edges are not drawn in a step: none, those between the ends of seed edges
            of any rank (``"self"``), or also those of ``reverse_etype`` between the same ends the
            other way round (``"reverse"``).
    """

    negatives: NegativeSampling | None = None
    exclude: str | None = None
    reverse_etype: str | EType | None = None


class LinkInputs:
    """This rank's seed edges; made collectively.

    Args:
        given, label, time: as a :class:`sar.sampling.LinkNeighborLoader` takes them.

    Attributes:
        input_type: the relation of the seed edges.
        input_id: int64 [s], which of the edges that were given each seed is.

    Raises ``ValueError`` and ``TypeError`` on every rank for edges that do not fit.
    """

    def __init__(
        self,
        data: PartitionData,
        given: Any,
        label: Tensor | None,
        time: Tensor | None,
        links: LinkOptions,
        options: LoaderOptions,
        exchange: Exchange,
    ) -> None:
        self._exchange, self._options, self._links = exchange, options, links
        self._totals = {n: int(id_bounds(data.book, n)[-1]) for n in data.book.ntypes}
        alike = dict[str, Any]()
        with exchange.group.agreed("LinkNeighborLoader", alike):
            self.input_type, chosen = _chosen_edges(given, data)
            self._excluded = _excluded(data.book, self.input_type, links)
            time = _times(data, self.input_type, chosen, time, options)
            _check_label(label, chosen.shape[-1], links.negatives)
            kind = self.input_type, "numbers" if chosen.dim() == 1 else "pairs"
            alike |= {"edge_label_index": kind, "edge_label": None if label is None else "some"}
        src, dst, keys = self._located(data, chosen)
        until = torch.full_like(src, NEVER) if time is None else time
        columns = torch.stack([src, dst, keys, until, numbered(src, options, exchange)], dim=1)
        labels = self._raised(torch.ones(len(src)) if label is None else label.cpu().contiguous())
        if options.rebalance:
            columns, labels = dealt([columns, labels], exchange)
        self._src, self._dst, self._keys, self._time, self.input_id = columns.unbind(1)
        self._labels, self._draws = labels, None
        if links.negatives is not None:
            words = options.seed, options.time_attr
            self._draws = Negatives(data, self.input_type, links.negatives, exchange, *words)

    def __len__(self) -> int:
        return len(self._src)

    def _located(self, data: PartitionData, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """int64 [s] ids of both ends of the seed edges, and keys of the edges; collective."""
        etype, original = self.input_type, self._options.original_ids
        if chosen.dim() == 1:
            both = source_ids(data, etype), target_ids(data, etype)
            return both[0][chosen], both[1][chosen], data.keys.edges(etype).long()[chosen]
        ends, keys = [], []
        for ntype, one in zip((etype[0], etype[2]), chosen, strict=True):
            ids = located(data, ntype, one, original, self._exchange, "edge_label_index")
            bounds = id_bounds(data.book, ntype)
            keys.append(self._exchange.look_up(ids, bounds, data.keys.nodes(ntype)))
            ends.append(ids)
        return ends[0], ends[1], pair_keys(*keys)

    def _raised(self, labels: Tensor) -> Tensor:
        """Labels that leave 0 to negatives, as PyG's; collective."""
        negatives = self._links.negatives
        if negatives is None or negatives.is_triplet:
            return labels
        lowest = torch.tensor([float(labels.min()) if labels.numel() else math.inf])
        self._exchange.group.all_reduce(lowest, "min")
        return labels + 1 if lowest.item() == 0 else labels

    def seeds(self, chosen: Tensor, step: int) -> tuple[Seeds, Callable[[Sample], dict[str, Any]]]:
        """What a batch grows from, and what tells of its inputs when it has grown; collective."""
        count, drawn = len(chosen), self._negative_of(chosen, step)
        which = torch.cat([torch.arange(count), drawn.which])
        time = self._time[chosen][which]
        src = torch.cat([self._src[chosen], drawn.src])
        dst = torch.cat([self._dst[chosen], drawn.dst])
        negatives = self._links.negatives
        is_triplet = negatives is not None and negatives.is_triplet
        pairs, by_end = len(src), [(self.input_type[0], src), (self.input_type[2], dst)]
        if is_triplet:
            by_end[0] = self.input_type[0], src[:count]
        seeds = Seeds(_joined(by_end), step, None, self._pairs_not_drawn(chosen))
        if self._options.disjoint:
            tree = which if is_triplet else torch.arange(pairs)
            of = [(n, tree[: len(ids)]) for n, ids in by_end]
            salt, until = drawn.salt, time
            if is_triplet:
                salt, until = salt[:count], time[:count]
            seeds = seeds._replace(trees=Trees(_joined(of), salt, until))

        def told(sample: Sample) -> dict[str, Any]:
            numbers = _parted(sample.seeds, by_end)
            label = self._labels[chosen]
            until = time if self._options.time_attr is not None else None
            if is_triplet:
                dst, negative = numbers[1][:count], numbers[1][count:]
                negative = negative.view(count, -1 if count else 1)
                until = None if until is None else until[:count]
                links = Links(numbers[0], dst, label, negative, until, True)
            else:
                zeros = label.new_zeros((pairs - count, *label.shape[1:]))
                label = torch.cat([label, zeros])
                links = Links(numbers[0], numbers[1], label, None, until, negatives is not None)
            return {"input_id": self.input_id[chosen], "links": links}

        return seeds, told

    def _negative_of(self, chosen: Tensor, step: int) -> _Drawn:
        """Pairs without an edge; collective."""
        keys, count = self._keys[chosen], len(chosen)
        none, negatives = keys[:0], self._links.negatives
        if self._draws is None or negatives is None:
            return _Drawn(none, none, none, pair_keys(keys, torch.zeros_like(keys)))
        pairs = math.ceil(count * negatives.amount)
        which = torch.arange(pairs)
        number = which // max(1, count)
        which = which % max(1, count)
        if negatives.is_triplet:
            number, which = _by_seed(count, int(negatives.amount))
        asked = self._src[chosen][which], keys[which], number, self._time[chosen][which]
        src, dst = self._draws.draw(*asked, step)
        keys = torch.cat([keys, keys[which]])
        numbers = torch.cat([torch.zeros(count, dtype=torch.int64), number + 1])
        return _Drawn(src, dst, which, pair_keys(keys, numbers))

    def _pairs_not_drawn(self, chosen: Tensor) -> dict[EType, Tensor]:
        """Per relation, src x nodes of dst's type + dst of the edges that are left out, ascending;
        collective."""
        if not self._excluded:
            return {}
        pairs = self._exchange.share(torch.stack([self._src[chosen], self._dst[chosen]], dim=1))
        found = dict[EType, list[Tensor]]()
        for etype, is_reverse in self._excluded:
            src, dst = pairs.flip(1).unbind(1) if is_reverse else pairs.unbind(1)
            found.setdefault(etype, []).append(src * self._totals[etype[2]] + dst)
        return {etype: torch.cat(keys).unique() for etype, keys in found.items()}


class _Drawn(NamedTuple):
    """Pairs without an edge: their ends and seed edges; and for all pairs what keys their trees."""

    src: Tensor
    dst: Tensor
    which: Tensor
    salt: Tensor


def _by_seed(count: int, amount: int) -> tuple[Tensor, Tensor]:
    return torch.arange(amount).repeat(count), torch.arange(count).repeat_interleave(amount)


def _joined(by_end: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Per node type, what both ends have, sources first."""
    found = dict[str, Tensor]()
    for ntype, one in by_end:
        found[ntype] = torch.cat([found[ntype], one]) if ntype in found else one
    return found


def _parted(joined: dict[str, Tensor], by_end: list[tuple[str, Tensor]]) -> list[Tensor]:
    """What :func:`_joined` put together."""
    (src_type, src), (dst_type, _) = by_end
    both = joined[dst_type]
    return [joined[src_type][: len(src)], both[len(src) :] if src_type == dst_type else both]


def _chosen_edges(given: Any, data: PartitionData) -> tuple[EType, Tensor]:
    """The relation of some edges, and int64 [s] numbers of this rank's, or [2, s] node ids."""
    book = data.book
    name, edges = given if isinstance(given, tuple) and len(given) == 2 else (None, given)
    if isinstance(edges, (str, tuple)):
        name, edges = edges, None
    if name is None and len(book.canonical_etypes) > 1:
        raise ValueError(
            f"edge_label_index: got no relation, expected (relation, edges) with one of "
            f"{book.canonical_etypes}"
        )
    etype = book.canonical_etypes[0] if name is None else book.canonical(name)
    count = data.num_edges(etype)
    if edges is None:
        return etype, torch.arange(count)
    if not isinstance(edges, Tensor):
        raise TypeError(f"edge_label_index: got {type(edges).__name__}, expected a tensor")
    edges = edges.cpu()
    if edges.dtype == torch.bool and tuple(edges.shape) == (count,):
        return etype, edges.nonzero().view(-1)
    is_pair = edges.dim() == 2 and edges.shape[0] == 2
    if edges.dtype == torch.bool or edges.is_floating_point() or not (edges.dim() == 1 or is_pair):
        raise TypeError(
            f"edge_label_index: got {edges.dtype} {list(edges.shape)}, expected bool [{count}] of "
            "this rank's edges, their integer numbers [s], or pairs of node ids [2, s]"
        )
    wrong = (edges < 0) | (edges >= count)
    if not is_pair and wrong.any():
        got = int(edges[wrong][0])
        raise ValueError(f"edge_label_index: got {got}, this rank has {count} edges of {etype}")
    return etype, edges.long()


def _excluded(book: PartitionBook, etype: EType, links: LinkOptions) -> list[tuple[EType, bool]]:
    """Relations of which edges are left out, and whether their ends are turned round."""
    if links.exclude not in EXCLUDE:
        raise ValueError(f"exclude: got {links.exclude!r}, expected one of {EXCLUDE}")
    if links.reverse_etype is not None and links.exclude != "reverse":
        raise ValueError("reverse_etype: got one, expected exclude='reverse' as well")
    if links.exclude is None:
        return []
    if links.exclude == "self":
        return [(etype, False)]
    reverse = etype if links.reverse_etype is None else book.canonical(links.reverse_etype)
    if (reverse[0], reverse[2]) != (etype[2], etype[0]):
        raise ValueError(
            f"reverse_etype: got {links.reverse_etype!r}, expected a relation from {etype[2]!r} to "
            f"{etype[0]!r}"
        )
    return [(etype, False), (reverse, True)]


def _times(
    data: PartitionData, etype: EType, chosen: Tensor, time: Tensor | None, options: LoaderOptions
) -> Tensor | None:
    """int64 [s] of the seed edges; those of this rank's own may say it themselves."""
    if time is not None:
        check_given_time("edge_label_time", time, chosen.shape[-1], options.time_attr)
        return time.long().cpu()
    if options.time_attr is None:
        return None
    name = f"{':'.join(etype)}/{options.time_attr}"
    if chosen.dim() == 1 and name in data.edge_features:
        return integers(data.edge_features[name], name)[chosen]
    raise ValueError(
        f"edge_label_time: got none, and the seed edges have no {options.time_attr!r}; expected "
        "the time of each"
    )


def _check_label(label: Any, count: int, negatives: NegativeSampling | None) -> None:
    if label is None:
        return
    if not isinstance(label, Tensor) or label.dim() < 1 or len(label) != count:
        got = list(label.shape) if isinstance(label, Tensor) else repr(label)
        raise ValueError(f"edge_label: got {got}, expected a tensor of {count} labels")
    if negatives is not None and negatives.is_triplet:
        raise ValueError("edge_label: got labels, expected none for triplets")
