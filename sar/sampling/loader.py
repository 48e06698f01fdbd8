"""Mini-batches, step by step, on all ranks: what every loader does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from sar.comm import Group, LocalGroup, current_group
from sar.errors import CommError
from sar.kernels.sampling import hashed
from sar.partition.book import EType, PartitionBook
from sar.partition.keys import ORIGINAL
from sar.partition.load import PartitionData
from sar.sampling.batch import Drawn, Types, maker
from sar.sampling.cache import CacheStats, cached
from sar.sampling.calls import check_ids, filtered, transformed
from sar.sampling.features import FeatureTables, Kind
from sar.sampling.options import LoaderOptions, NumNeighbors, fanouts, loader_options
from sar.sampling.pipeline import Epochs
from sar.sampling.sampler import Draws, NeighborSampler, Sample, Seeds
from sar.sampling.subgraphs import bidirectional
from sar.sampling.swap import Swap
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
        own: a subclass' own arguments that have to be the same on all ranks.
        error: what was wrong with them.
        number: of whom the inputs are, for their order; this rank by default.
    """

    def __init__(
        self,
        data: PartitionData,
        num_neighbors: NumNeighbors,
        options: Mapping[str, Any],
        group: Group | None,
        own: Mapping[str, Any] = MappingProxyType({}),
        error: Exception | None = None,
        number: int | None = None,
    ) -> None:
        name, alike, given = type(self).__name__, None, group
        group = given if isinstance(given, Group) else current_group()
        try:
            _check_types(data, given)
            self.options = loader_options(options)
            hops = fanouts(num_neighbors, data.book)
            alike = {"num_neighbors": num_neighbors, **self.options.alike(), **own}
        except Exception as caught:  # any, too little memory as well: the others would wait
            error = error or caught
        try:
            group.agree(error, name, alike)
        except CommError as lost:
            raise CommError(f"{lost}; expected all ranks to make a {name} together") from lost
        _tell_without_ids(data, group)
        swap = Swap(group.beside(), _width(data.book, 1))
        super().__init__(swap, self.options.prefetch, self.options.prefetch)
        self._types = Types(data.book.ntypes, data.book.canonical_etypes)
        self._book, self._number = data.book, group.rank if number is None else number
        self._sampler = _sampler(data, hops, self.options, self._swap)
        self._tables = FeatureTables(data, self._swap, self.options.fields)

    def _begin(self, inputs: Inputs, least_steps: int = 0) -> None:
        """Take the inputs; collective."""
        self._inputs, size, options = inputs, self.options.batch_size, self.options
        own, self._make = len(inputs), maker(options)
        self._own_steps = own // size if options.drop_last else -(-own // size)
        steps, is_ahead = max(self._own_steps, least_steps), options.prefetch > 0
        most = torch.tensor([steps, options.transform is not None, is_ahead])
        self._steps, self._meets, is_ahead = self._swap.group.all_reduce(most, "max").tolist()
        self._are_in_turn = not is_ahead
        self._bulk = bulk = min(options.bulk, max(1, self._steps), _MOST_AT_ONCE)
        self._depth = options.prefetch if bulk == 1 else max(options.prefetch, bulk + 1)
        self._swap.width = self._sampler.swap.width = _width(self._book, bulk)
        self._cache = cached(self._tables, self._book, options, self._presampled)

    @property
    def cache(self) -> CacheStats:
        """How many rows of other ranks were needed, and how many of them the cache had."""
        return self._cache.stats

    @property
    def input_type(self) -> Any:
        """The node type, or the relation, of the seeds."""
        return self._inputs.input_type

    def __len__(self) -> int:
        return self._steps

    def _epoch_of(self, epoch: int, first: int) -> Iterator[Any]:
        self._swap.step = epoch * self._steps + first
        for sample, tell, step in self._samples(epoch, first):
            self._swap.step = step
            batch = self._batch(sample, tell, step)
            if self._meets:  # a transform may have raised: the others do, at the same batch
                self._swap.meet()
            yield batch

    def _samples(self, epoch: int, begin: int = 0) -> Iterator[tuple[Sample, Tell, int]]:
        order, bulk = self._order(epoch), self._bulk
        for first in range(begin, self._steps, bulk):
            numbers = [epoch * self._steps + s for s in range(first, self._steps)[:bulk]]
            self._swap.step = numbers[0]
            grown = [self._inputs.seeds(self._chosen(order, n), n) for n in numbers]
            samples = self._sampler.sample([seeds for seeds, _ in grown])
            yield from zip(samples, (tell for _, tell in grown), numbers, strict=True)

    def _presampled(self) -> Iterator[Sample]:
        """What two epochs draw that are none of those to come."""
        for epoch in (_PRESAMPLING, 2 * _PRESAMPLING):
            for sample, _, _ in self._samples(epoch):
                yield sample

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
        if self.options.subgraph_type == "bidirectional":
            sample = bidirectional(sample)
        if self.options.filter is not None:
            sample = filtered(self.options.filter, sample)
        ids = needed_rows(sample, self._tables.kinds)
        if self.options.filter is not None:
            check_ids(self._book, ids | dict[Any, Tensor](sample.nodes))
        rows = self._cache.fetch(ids)
        is_by_hop, told = self.options.subgraph_type == "directional", tell(sample)
        drawn = Drawn(self._types, sample, rows, self.input_type, step, told, is_by_hop)
        return transformed(self.options.transform, self._make(drawn))


def needed_rows(sample: Sample, kinds: Iterable[Kind]) -> dict[Kind, Tensor]:
    """Ids of the nodes and edges of a sample, of some node types and relations."""
    ids: dict[Kind, Tensor] = {}
    for kind in kinds:
        if isinstance(kind, str):
            ids[kind] = sample.nodes[kind]
            continue
        drawn = [hop[kind].eid for hop in sample.hops if kind in hop]
        ids[kind] = torch.cat([torch.empty(0, dtype=torch.int64), *drawn])
    return ids


def _check_types(data: Any, group: Any) -> None:
    """Raise ``TypeError`` for what is no part of a graph, or no group."""
    if not isinstance(data, PartitionData):
        got = type(data).__name__
        raise TypeError(f"data: got {got}, expected what sar.load_partition_data gives")
    if group is not None and not isinstance(group, Group):
        raise TypeError(f"group: got {type(group).__name__}, expected a sar.comm.Group")


def _sampler(
    data: PartitionData, hops: list[dict[EType, int]], options: LoaderOptions, swap: Swap
) -> NeighborSampler:
    followed = [e for e in data.book.canonical_etypes if any(hop.get(e) for hop in hops)]
    if options.subgraph_type == "induced":
        followed = data.book.canonical_etypes
    last = options.temporal_strategy == "last"
    induced = options.subgraph_type == "induced"
    draws = Draws(hops, options.replace, last, options.has_blocks, induced, options.seed)
    attributes = options.weight_attr, options.time_attr, options.direction
    edges = topology(data, swap, followed, *attributes)
    if options.topology == "replicated":
        edges, swap = replicated(edges, swap.group), Swap(LocalGroup(), swap.width)
    return NeighborSampler(edges, swap, draws)


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
