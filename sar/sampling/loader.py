"""Loaders of mini-batches, step by step on all ranks: of nodes, of edges, of subgraphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from sar.comm import Group, LocalGroup, current_group
from sar.config import parse_bytes
from sar.errors import CommError
from sar.kernels.sampling import hashed
from sar.partition.book import EType, PartitionBook
from sar.partition.features import ORIGINAL
from sar.partition.load import PartitionData
from sar.sampling.batch import Drawn, Types, maker
from sar.sampling.epochs import Epochs
from sar.sampling.exchange import Exchange
from sar.sampling.features import CacheStats, FeatureTables
from sar.sampling.link_inputs import LinkInputs, LinkOptions
from sar.sampling.negatives import negative_sampling
from sar.sampling.node_inputs import InputNodes, NodeInputs
from sar.sampling.options import LoaderOptions, NumNeighbors, fanouts, loader_options
from sar.sampling.sample import Sample, Seeds, bidirectional, check_ids, filtered, needed_rows
from sar.sampling.sampler import Draws, NeighborSampler
from sar.sampling.topology import replicated, topology

Tell = Callable[[Sample], dict[str, Any]]
_PRESAMPLING = -1  # an epoch before all others
_MOST_AT_ONCE = 64  # batches of a bulk: more spare no time, and are all in memory


class Inputs(Protocol):
    """What batches grow from."""

    input_type: Any

    def __len__(self) -> int: ...

    def seeds(self, chosen: Tensor, step: int) -> tuple[Seeds, Tell]: ...


class Loader(Epochs):
    """Goes through inputs in batches; made collectively. Subclasses say what the inputs are.

    Args:
        num_neighbors: how many edges a node draws at each hop, the seeds first; -1 takes all.
            One list, or one for each relation: ``{etype: [15, 10]}``.
        options: as :class:`sar.sampling.LoaderOptions` names them.
        own: makes a subclass' own options, a dataclass; they have to be the same on all ranks.
        number: of whom the inputs are, for their order; this rank by default.
    """

    def __init__(
        self,
        data: PartitionData,
        num_neighbors: NumNeighbors,
        options: Mapping[str, Any],
        group: Group | None,
        own: Callable[[], Any] | None = None,
        number: int | None = None,
    ) -> None:
        name, given = type(self).__name__, group
        group = given if isinstance(given, Group) else current_group()
        try:
            alike = dict[str, Any]()
            with group.agreed(name, alike):
                self._own: Any = None if own is None else own()
                _check_types(data, given)
                self.options = loader_options(options)
                hops = fanouts(num_neighbors, data.book)
                alike |= {"num_neighbors": num_neighbors, **self.options.alike()}
                alike |= {} if own is None else vars(self._own)
        except CommError as lost:
            raise CommError(f"{lost}; expected all ranks to make a {name} together") from lost
        _tell_without_ids(data, group)
        super().__init__(Exchange(group.beside(), _width(data.book, 1)), self.options)
        self._types = Types(data.book.ntypes, data.book.canonical_etypes)
        self._book, self._number = data.book, group.rank if number is None else number
        self._sampler = _sampler(data, hops, self.options, self._exchange)
        self._tables = FeatureTables(data, self._exchange, self.options.fields)

    def _begin(self, inputs: Inputs, least_steps: int = 0) -> None:
        """Take the inputs; collective."""
        self._inputs, size, options = inputs, self.options.batch_size, self.options
        own, self._make = len(inputs), maker(options)
        self._own_steps = own // size if options.drop_last else -(-own // size)
        self._agree(self._exchange.group, max(self._own_steps, least_steps))
        self._bulk = bulk = min(options.bulk, max(1, self._steps), _MOST_AT_ONCE)
        self._depth = options.prefetch if bulk == 1 else max(options.prefetch, bulk + 1)
        self._exchange.width = self._sampler.exchange.width = _width(self._book, bulk)
        if options.cache:
            self._tables.keep(self._presampled(), parse_bytes(options.cache, "cache"))

    @property
    def cache(self) -> CacheStats:
        """How many rows of other ranks were needed, and how many of them the cache had."""
        return self._tables.stats

    @property
    def input_type(self) -> Any:
        """The node type, or the relation, of the seeds."""
        return self._inputs.input_type

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        self._exchange.step = epoch * self._steps + first
        for sample, tell, step in self._samples(epoch, first):
            self._exchange.step = step
            yield self._batch(sample, tell, step)

    def _samples(self, epoch: int, begin: int = 0) -> Iterator[tuple[Sample, Tell, int]]:
        order, bulk = self._order(epoch), self._bulk
        for first in range(begin, self._steps, bulk):
            numbers = [epoch * self._steps + s for s in range(first, self._steps)[:bulk]]
            self._exchange.step = numbers[0]
            grown = [self._inputs.seeds(self._chosen(order, n), n) for n in numbers]
            samples = self._sampler.sample([seeds for seeds, _ in grown])
            yield from zip(samples, (tell for _, tell in grown), numbers, strict=True)

    def _presampled(self) -> Iterator[dict[str, Tensor]]:
        """The nodes that two epochs draw that are none of those to come."""
        for epoch in (_PRESAMPLING, 2 * _PRESAMPLING):
            for sample, _, _ in self._samples(epoch):
                yield sample.nodes

    def _order(self, epoch: int) -> Tensor:
        count = len(self._inputs)
        if not self.options.shuffle:
            return torch.arange(count)
        words = hashed(self.options.seed, epoch, self._number) >> 1
        return torch.randperm(count, generator=torch.Generator().manual_seed(words))

    def _chosen(self, order: Tensor, number: int) -> Tensor:
        step, size = number % self._steps, self.options.batch_size
        return order[step * size :][:size] if step < self._own_steps else order[:0]

    def _batch(self, sample: Sample, tell: Tell, step: int) -> Any:
        kind, change = self.options.subgraph_type, self.options.filter
        sample = bidirectional(sample) if kind == "bidirectional" else sample
        sample = sample if change is None else filtered(change, sample)
        ids = needed_rows(sample, self._tables.kinds)
        if change is not None:
            check_ids(self._book, ids | dict[Any, Tensor](sample.nodes))
        rows = self._tables.fetch(ids)
        given = self._types, sample, rows, self.input_type, step, tell(sample)
        return self._make(Drawn(*given, is_by_hop=kind == "directional"))


def _check_types(data: Any, group: Any) -> None:
    """Raise ``TypeError`` for what is no part of a graph, or no group."""
    if not isinstance(data, PartitionData):
        got = type(data).__name__
        raise TypeError(f"data: got {got}, expected what sar.load_partition_data gives")
    if group is not None and not isinstance(group, Group):
        raise TypeError(f"group: got {type(group).__name__}, expected a sar.comm.Group")


def _sampler(
    data: PartitionData, hops: list[dict[EType, int]], options: LoaderOptions, exchange: Exchange
) -> NeighborSampler:
    followed = [e for e in data.book.canonical_etypes if any(hop.get(e) for hop in hops)]
    if options.subgraph_type == "induced":
        followed = data.book.canonical_etypes
    last = options.temporal_strategy == "last"
    induced = options.subgraph_type == "induced"
    draws = Draws(hops, options.replace, last, options.has_blocks, induced, options.seed)
    attributes = options.weight_attr, options.time_attr, options.direction
    edges = topology(data, exchange, followed, *attributes)
    if options.topology == "replicated":
        edges = replicated(edges, exchange.group)
        exchange = Exchange(LocalGroup(), exchange.width)
    return NeighborSampler(edges, exchange, draws)


def _width(book: PartitionBook, bulk: int) -> int:
    """Sizes in a request: of the frontiers of each type and batch, or of each kind's rows."""
    return max(bulk * len(book.ntypes), len(book.ntypes) + len(book.canonical_etypes))


def _tell_without_ids(data: PartitionData, group: Group) -> None:
    missing = [n for n in data.book.ntypes if data.keys.node_names(n)[1] != ORIGINAL]
    if missing and group.rank == 0 and group.size > 1:
        warnings.warn(
            f"the partitions hold no original ids of {', '.join(missing)}: what is drawn follows "
            "the cut of the graph",
            stacklevel=4,
        )


class NeighborLoader(Loader):
    """Mini-batches of this rank's nodes and what is drawn around them; made collectively.

    Every rank makes one with the same options and goes through it at the same time: the owner of a
    node draws its in-edges (Hamilton et al. 2017) and sends features. Iterating is one epoch,
    which has as many steps on every rank; a rank that has no seeds left serves the others and gets
    batches without seeds. The draw for a node is a function of (seed, step, hop, relation, its
    original id): the cut and the number of ranks play no part.

    Args:
        data: this rank's part.
        num_neighbors: how many in-edges a node draws at each hop, the seeds first; -1 takes all.
            One list, or one for each relation: ``{etype: [15, 10]}``.
        input_nodes: the seeds: bool [n] of this rank's nodes, or int64 [s] global ids as in
            ``data.node_ranges``, original ids with ``original_ids=True``; ``(ntype, seeds)`` where
            there are several types; all of this rank's by default.
        input_time: int64, of each seed: nothing later is drawn around it; by default when the node
            came, for a ``time_attr`` of nodes.
        options: see :class:`sar.sampling.LoaderOptions`.

    Going through it may be left half-way, by all ranks after the same batch. What raises on one
    rank, such as a transform, is raised on all.

    Raises, on every rank, ``ValueError`` and ``TypeError`` for arguments that do not fit, and for
    options that differ between ranks.
    """

    def __init__(
        self,
        data: PartitionData,
        num_neighbors: NumNeighbors,
        input_nodes: InputNodes = None,
        input_time: Tensor | None = None,
        *,
        group: Group | None = None,
        **options: Any,
    ) -> None:
        super().__init__(data, num_neighbors, options, group)
        self._begin(NodeInputs(data, input_nodes, input_time, self.options, self._exchange))


class SubgraphLoader(NeighborLoader):
    """As :class:`NeighborLoader`; a batch has all edges between the nodes that were drawn.

    With -1 these are the k-hop neighborhoods of the seeds.
    """

    def __init__(
        self,
        data: PartitionData,
        num_neighbors: NumNeighbors,
        input_nodes: InputNodes = None,
        input_time: Tensor | None = None,
        *,
        group: Group | None = None,
        **options: Any,
    ) -> None:
        options = {"subgraph_type": "induced"} | options
        super().__init__(data, num_neighbors, input_nodes, input_time, group=group, **options)


class LinkNeighborLoader(Loader):
    """Mini-batches of edges, and of pairs that are none, and what is drawn around their ends.

    Made collectively, and gone through by all ranks at the same time, as :class:`NeighborLoader`.

    Args:
        data: this rank's part.
        num_neighbors: as for :class:`NeighborLoader`.
        edge_label_index: the seed edges: bool [E] of this rank's edges, int64 [s] numbers of them,
            or int64 [2, s] pairs of node ids of any rank, global ones as in ``data.node_ranges``
            or, with ``original_ids=True``, original ones; ``(etype, edges)`` where there are
            several relations; all of this rank's by default.
        edge_label: [s, ...] labels of the seed edges.
        edge_label_time: int64 [s]: nothing later is drawn around each; by default the edge's
            ``time_attr``, for this rank's own edges.
        neg_sampling: ``"binary"``, ``"triplet"``, a dictionary of
            :class:`sar.sampling.NegativeSampling`'s attributes, or one of these; none by default.
        neg_sampling_ratio: binary ones, as many for each seed edge.
        exclude: ``"self"`` draws no edge between the ends of a seed edge of the step, of any rank;
            ``"reverse"`` nor one of ``reverse_etype`` the other way round, by default of the same
            relation.
        options: see :class:`sar.sampling.LoaderOptions`.

    Raises, on every rank, ``ValueError`` and ``TypeError`` for arguments that do not fit, and for
    options that differ between ranks.
    """

    def __init__(
        self,
        data: PartitionData,
        num_neighbors: NumNeighbors,
        edge_label_index: Any = None,
        edge_label: Tensor | None = None,
        edge_label_time: Tensor | None = None,
        *,
        neg_sampling: Any = None,
        neg_sampling_ratio: float | None = None,
        exclude: str | None = None,
        reverse_etype: str | EType | None = None,
        group: Group | None = None,
        **options: Any,
    ) -> None:
        def links() -> LinkOptions:
            wanted, ratio = neg_sampling, neg_sampling_ratio
            if wanted is not None and ratio is not None:
                raise ValueError("neg_sampling_ratio: got one beside neg_sampling, expected either")
            wanted = {"mode": "binary", "amount": ratio} if ratio else wanted
            return LinkOptions(negative_sampling(wanted), exclude, reverse_etype)

        super().__init__(data, num_neighbors, options, group, links)
        given = edge_label_index, edge_label, edge_label_time
        self._begin(LinkInputs(data, *given, self._own, self.options, self._exchange))
