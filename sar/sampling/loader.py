"""Loaders of mini-batches, step by step on all ranks: of nodes, of edges, of subgraphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sar import expect
from sar.comm import Group, LocalGroup, current_group
from sar.config import parse_bytes
from sar.errors import CommError
from sar.kernels.sampling import hashed
from sar.partition.book import EType, PartitionBook
from sar.partition.features import ORIGINAL
from sar.partition.load import PartitionData
from sar.sampling.batch import Drawn, Types, maker
from sar.sampling.epochs import Epochs
from sar.sampling.exchange import Exchange, Kind, id_bounds
from sar.sampling.features import CacheStats, FeatureTables
from sar.sampling.link_inputs import LinkInputs
from sar.sampling.node_inputs import InputNodes, NodeInputs
from sar.sampling.options import LoaderOptions, LoaderRequest, NumNeighbors, fanouts
from sar.sampling.sample import Sample, bidirectional, check_range, filtered
from sar.sampling.sampler import Draws, NeighborSampler
from sar.sampling.topology import replicated, topology

_PRESAMPLING = -1  # an epoch before all others
_MOST_AT_ONCE = 64  # batches of a bulk: more spare no time, and are all in memory


class Loader(Epochs):
    """Goes through what a request names in batches; made collectively.

    ``number``, the rank by default, keys the order of inputs. ``is_own``: seeds have to be nodes of
    this rank.
    """

    def __init__(
        self,
        data: PartitionData,
        request: LoaderRequest,
        group: Group | None,
        number: int | None = None,
        is_own: bool = True,
    ) -> None:
        name, given = type(self).__name__, group
        group = given if isinstance(given, Group) else current_group()
        try:
            alike = dict[str, Any]()
            with group.agreed(name, alike):
                if not isinstance(data, PartitionData):
                    raise expect.wrong_type(data, "data", "what sar.load_partition_data gives")
                if given is not None and not isinstance(given, Group):
                    raise expect.wrong_type(given, "group", "a sar.comm.Group")
                self.options, links = request.checked(alike)
                hops = fanouts(request.num_neighbors, data.book)
        except CommError as lost:
            raise CommError(f"{lost}; expected all ranks to make a {name} together") from lost
        _tell_without_ids(data, group)
        super().__init__(Exchange(group.beside(), _width(data.book, 1)), self.options)
        self._types = Types(data.book.ntypes, data.book.canonical_etypes)
        self._book, self._number = data.book, group.rank if number is None else number
        self._sampler = _sampler(data, hops, self.options, self._exchange)
        self._tables = FeatureTables(data, self._exchange, self.options.fields)
        words = data, request, self.options, self._exchange
        self._inputs = NodeInputs(*words, is_own) if links is None else LinkInputs(*words, links)
        size, own = self.options.batch_size, len(self._inputs)
        self._own_steps = own // size if self.options.drop_last else -(-own // size)
        self.input_type: Any = self._inputs.input_type

    def _begin(self, make: Callable[[Drawn], Any] | None = None, least_steps: int = 0) -> None:
        """Agree on steps, fill the cache; ``make`` makes batches in place of the options' maker."""
        options, self._make = self.options, make or maker(self.options)
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

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        self._exchange.step = epoch * self._steps + first
        for sample, tell, step in self._samples(epoch, first):
            self._exchange.step = step
            yield self._batch(sample, tell, step)

    def _samples(self, epoch: int, begin: int = 0) -> Iterator[tuple[Sample, Any, int]]:
        order, bulk = self._order(epoch), self._bulk
        for first in range(begin, self._steps, bulk):
            numbers = [epoch * self._steps + s for s in range(first, self._steps)[:bulk]]
            self._exchange.step = numbers[0]
            grown = [self._inputs.seeds(self._chosen(order, n), n) for n in numbers]
            samples = self._sampler.sample([seeds for seeds, _ in grown])
            yield from zip(samples, (tell for _, tell in grown), numbers, strict=True)

    def _presampled(self) -> Iterator[dict[str, Tensor]]:
        """The nodes that two epochs of draws need, which are none of the epochs to come."""
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

    def _batch(self, sample: Sample, tell: Any, step: int) -> Any:
        form, change = self.options.subgraph_type, self.options.filter
        sample = bidirectional(sample) if form == "bidirectional" else sample
        sample = sample if change is None else filtered(change, sample)
        ids: dict[Kind, Tensor] = {}
        for kind in self._tables.kinds:
            if isinstance(kind, str):
                ids[kind] = sample.nodes[kind]
            else:
                drawn = [hop[kind].eid for hop in sample.hops if kind in hop]
                ids[kind] = torch.cat([torch.empty(0, dtype=torch.int64), *drawn])
        if change is not None:
            for kind, one in (ids | dict[Kind, Tensor](sample.nodes)).items():
                check_range("id", kind, one, int(id_bounds(self._book, kind)[-1]))
        rows = self._tables.fetch(ids)
        given = self._types, sample, rows, self.input_type, step, tell(sample)
        return self._make(Drawn(*given, is_by_hop=form == "directional"))


def _sampler(
    data: PartitionData, hops: list[dict[EType, int]], options: LoaderOptions, exchange: Exchange
) -> NeighborSampler:
    etypes, induced = data.book.canonical_etypes, options.subgraph_type == "induced"
    followed = [e for e in etypes if induced or any(hop.get(e) for hop in hops)]
    again = options.blocks is not None and options.subgraph_type == "directional"
    last = options.temporal_strategy == "last"
    draws = Draws(hops, options.replace, last, again, induced, options.seed)
    attributes = options.weight_attr, options.time_attr, options.direction
    edges = topology(data, exchange, followed, *attributes)
    if options.topology == "replicated":
        edges = replicated(edges, exchange.group)
        exchange = Exchange(LocalGroup(), exchange.width)
    return NeighborSampler(edges, exchange, draws)


def _width(book: PartitionBook, bulk: int) -> int:
    """Sizes in a request at most: frontiers of each type and batch, or rows of each kind."""
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

    _defaults: Mapping[str, Any] = {}

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
        options = {**self._defaults, **options}
        seeds = None, input_nodes, None, input_time
        super().__init__(data, LoaderRequest(num_neighbors, *seeds, None, options), group)
        self._begin()


class SubgraphLoader(NeighborLoader):
    """As :class:`NeighborLoader`; a batch has all edges between the nodes that were drawn.

    With -1 these are the k-hop neighborhoods of the seeds.
    """

    _defaults = {"subgraph_type": "induced"}


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
        links = {
            "negatives": neg_sampling, "ratio": neg_sampling_ratio, "exclude": exclude,
            "reverse_etype": reverse_etype,
        }  # fmt: skip
        seeds = None, edge_label_index, edge_label, edge_label_time
        super().__init__(data, LoaderRequest(num_neighbors, *seeds, links, options), group)
        self._begin()
