"""The edges that batches grow from, and the pairs without an edge beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar import expect
from sar.kernels.sampling import split
from sar.partition.book import EType, PartitionBook
from sar.partition.load import PartitionData
from sar.sampling.exchange import Exchange, id_bounds
from sar.sampling.negatives import Negatives, pair_keys
from sar.sampling.node_inputs import check_given_time, dealt, located, named_seeds, numbered
from sar.sampling.options import LinkOptions, LoaderOptions, LoaderRequest, NegativeSampling
from sar.sampling.sample import Sample, Seeds, Trees
from sar.sampling.topology import NEVER, source_ids, target_ids, times_of


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


class LinkInputs:
    """Seed edges of this rank, of one relation; ``input_id``: which input each is; collective."""

    def __init__(
        self,
        data: PartitionData,
        request: LoaderRequest,
        options: LoaderOptions,
        exchange: Exchange,
        links: LinkOptions,
    ) -> None:
        self._exchange, self._options, label = exchange, options, request.labels
        self._negatives: NegativeSampling | None = links.negatives
        self._is_triplet = self._negatives is not None and self._negatives.is_triplet
        self._bounds = {ntype: id_bounds(data.book, ntype) for ntype in data.book.ntypes}
        self._totals = {ntype: int(one[-1]) for ntype, one in self._bounds.items()}
        alike = dict[str, Any]()
        with exchange.group.agreed("LinkNeighborLoader", alike):
            self.input_type, chosen = _chosen_edges(request, data)
            self._excluded = _excluded(data.book, self.input_type, links)
            time = _times(data, self.input_type, chosen, request.time, options)
            if label is not None:
                expect.tensor(label, "edge_label", shape=(chosen.shape[-1], ...))
                if self._is_triplet:
                    raise ValueError("edge_label: got labels, expected none for triplets")
            kind = self.input_type, "numbers" if chosen.dim() == 1 else "pairs"
            alike |= {"edge_label_index": kind, "edge_label": None if label is None else "some"}
        src, dst, keys = self._located(data, chosen)
        until = torch.full_like(src, NEVER) if time is None else time
        columns = torch.stack([src, dst, keys, until, numbered(src, options, exchange)], dim=1)
        labels = torch.ones(len(src)) if label is None else label.cpu().contiguous()
        if self._negatives is not None and not self._is_triplet:
            # 0 is left to negatives, as PyG does.
            lowest = torch.tensor([float(labels.min()) if labels.numel() else math.inf])
            exchange.group.all_reduce(lowest, "min")
            labels = labels + 1 if lowest.item() == 0 else labels
        if options.rebalance:
            columns, labels = dealt([columns, labels], exchange)
        *self._columns, self.input_id = columns.unbind(1)  # src, dst, keys, time
        self._labels, self._draws = labels, None
        if self._negatives is not None:
            words = options.seed, options.time_attr
            self._draws = Negatives(data, self.input_type, self._negatives, exchange, *words)

    def __len__(self) -> int:
        return len(self.input_id)

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

    def seeds(self, chosen: Tensor, step: int) -> tuple[Seeds, Callable[[Sample], dict[str, Any]]]:
        """Seeds of a batch, and a function from its sample to ``Drawn.told``; collective."""
        count, (src, dst, keys, time) = len(chosen), (one[chosen] for one in self._columns)
        number, of = self._negative_pairs(count)
        if self._draws is not None:
            found = self._draws.draw(src[of], keys[of], number, time[of], step)
            src, dst = torch.cat([src, found[0]]), torch.cat([dst, found[1]])
        without = self._pairs_not_drawn(src[:count], dst[:count])
        which = torch.cat([torch.arange(count), of])
        salt = pair_keys(keys[which], torch.cat([torch.zeros(count).long(), number + 1]))
        tree, until = torch.arange(len(which)), time[which]
        if self._is_triplet:
            src, salt, until, tree = src[:count], salt[:count], until[:count], which
        seeds = Seeds(self._by_type(src, dst), step, None, without)
        if self._options.disjoint:
            trees = self._by_type(tree[: len(src)], tree)
            seeds = seeds._replace(trees=Trees(trees, salt, until))

        def told(sample: Sample) -> dict[str, Any]:
            src_type, _, dst_type = self.input_type
            src_numbers = sample.seeds[src_type][: len(src)]
            dst_numbers = sample.seeds[dst_type][-len(dst) :] if len(dst) else src_numbers
            label, negative = self._labels[chosen], None
            if self._is_triplet:
                negative = dst_numbers[count:].view(count, -1 if count else 1)
                dst_numbers = dst_numbers[:count]
            else:
                zeros = label.new_zeros((len(dst) - count, *label.shape[1:]))
                label = torch.cat([label, zeros])
            when = None if self._options.time_attr is None else until
            has_negatives = self._draws is not None
            links = Links(src_numbers, dst_numbers, label, negative, when, has_negatives)
            return {"input_id": self.input_id[chosen], "links": links}

        return seeds, told

    def _negative_pairs(self, count: int) -> tuple[Tensor, Tensor]:
        """Of negatives of ``count`` seed edges: the number among its edge's pairs, and the edge."""
        amount = 0 if self._negatives is None else self._negatives.amount
        if self._is_triplet:
            each = torch.arange(int(amount))
            return each.repeat(count), torch.arange(count).repeat_interleave(len(each))
        pairs, most = torch.arange(math.ceil(count * amount)), max(1, count)
        return pairs // most, pairs % most

    def _by_type(self, src: Tensor, dst: Tensor) -> dict[str, Tensor]:
        """The values of both ends by node type, sources first."""
        src_type, _, dst_type = self.input_type
        if src_type == dst_type:
            return {src_type: torch.cat([src, dst])}
        return {src_type: src, dst_type: dst}

    def _pairs_not_drawn(self, src: Tensor, dst: Tensor) -> dict[EType, Tensor]:
        """Per relation, excluded edges that this rank would draw; collective."""
        found = dict[EType, list[Tensor]]()
        for etype, is_reverse in self._excluded:
            ends = (dst, src) if is_reverse else (src, dst)
            found.setdefault(etype, []).append(torch.stack(ends, dim=1))
        return {etype: self._told(etype, torch.cat(pairs)) for etype, pairs in found.items()}

    def _told(self, etype: EType, pairs: Tensor) -> Tensor:
        """Pairs of all ranks as src x nodes of dst's type + dst, sorted, on the ranks that draw
        them: the owners of the nodes that edges are drawn for, or all; collective."""
        keys = pairs[:, 0] * self._totals[etype[2]] + pairs[:, 1]
        if self._options.topology == "replicated":
            return self._exchange.share(keys).unique()
        near = 0 if self._options.direction == "out" else 1
        order, _, sizes = split(pairs[:, near].contiguous(), self._bounds[etype[2 * near]])
        return self._exchange.deliver(keys[order.long()], sizes)[0].unique()


def _chosen_edges(request: LoaderRequest, data: PartitionData) -> tuple[EType, Tensor]:
    """The relation, and int64 [s] numbers of this rank's edges or int64 [2, s] ids of both ends."""
    book, (name, edges) = data.book, named_seeds(request)
    if name is None and len(book.canonical_etypes) > 1:
        raise ValueError(
            f"edge_label_index: got no relation, expected (relation, edges) with one of "
            f"{book.canonical_etypes}"
        )
    etype = book.canonical_etypes[0] if name is None else book.canonical(name)
    count = data.num_edges(etype)
    if edges is None:
        return etype, torch.arange(count)
    edges = expect.tensor(edges, "edge_label_index").cpu()
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
    """Relations of which edges are left out, and whether source and destination are swapped."""
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
    """int64 [s] times of the seed edges: as given, or those of this rank's edges."""
    if time is not None:
        check_given_time("edge_label_time", time, chosen.shape[-1], options.time_attr)
        return time.long().cpu()
    if options.time_attr is None:
        return None
    time = times_of(data, etype, options.time_attr)
    if chosen.dim() == 1 and time is not None:
        return time[chosen]
    raise ValueError(
        f"edge_label_time: got none, and the seed edges have no {options.time_attr!r}; expected "
        "the time of each"
    )
