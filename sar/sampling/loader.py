"""Loaders of mini-batches from partitions."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sar.comm import Group, current_group
from sar.kernels.sampling import hashed
from sar.partition.book import EType, PartitionBook
from sar.partition.load import PartitionData
from sar.sampling.batch import MAKERS, Drawn
from sar.sampling.features import FeatureTables, Kind
from sar.sampling.pipeline import Ahead, told
from sar.sampling.sampler import Draws, NeighborSampler, Sample, Seeds, Trees
from sar.sampling.structure import node_ids
from sar.sampling.swap import Swap
from sar.sampling.topology import NEVER, own_times, topology

NumNeighbors = Sequence[int] | Mapping[str | EType, Sequence[int]]
InputNodes = None | str | Tensor | tuple[str, Tensor | None]


class NeighborLoader:
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
            ``data.node_ranges``; ``(ntype, seeds)`` where there are several types; all by default.
        batch_size: seeds of a rank and step.
        shuffle: another order in each epoch.
        drop_last: leave out a rank's last batch where it is not full.
        input_time: int64, of each seed: nothing later is drawn around it; by default when the node
            came, for a ``time_attr`` of nodes.
        replace: draw with replacement.
        disjoint: a tree for each seed, whose nodes no other tree shares; ``batch`` says of which
            seed a node is. Not for DGL's blocks.
        time_attr: the feature of nodes or edges that says when they came; implies ``disjoint``.
        temporal_strategy: ``"uniform"`` among the edges up to the seed's time, or the ``"last"``.
        weight_attr: the edge feature, one number of 0 or more for each edge, that the chances of a
            node's edges are in proportion to.
        as_: ``"dgl"`` gives (input nodes, seeds, blocks) as DGL's loaders do, the default where DGL
            is installed; ``"pyg"`` gives ``Data`` or ``HeteroData`` as PyG's do; ``"tensors"`` a
            :class:`sar.sampling.SampledBatch`.
        fields: names of features per node type and relation, ``{"_N": ["feat"]}``; all by default.
        transform: called with each batch; what it returns is given instead.
        seed: of draws and order, the same on all ranks.
        prefetch: batches that a thread makes ahead; 0: none, and no thread.
        bulk: batches that are drawn in one exchange; their features come batch by batch.

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
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        replace: bool = False,
        disjoint: bool = False,
        time_attr: str | None = None,
        temporal_strategy: str = "uniform",
        weight_attr: str | None = None,
        as_: str | None = None,
        fields: Mapping[Kind, Sequence[str]] | None = None,
        transform: Callable[[Any], Any] | None = None,
        seed: int = 0,
        prefetch: int = 2,
        bulk: int = 1,
        group: Group | None = None,
    ) -> None:
        group, error = group or current_group(), None
        as_ = as_ or ("dgl" if importlib.util.find_spec("dgl") else "tensors")
        last = temporal_strategy == "last"
        try:
            _check(as_, seed, {"batch_size": batch_size, "bulk": bulk}, {"prefetch": prefetch})
            if temporal_strategy not in ("uniform", "last"):
                raise ValueError(
                    f"temporal_strategy: got {temporal_strategy!r}, expected 'uniform' or 'last'"
                )
            if as_ == "dgl" and (disjoint or time_attr is not None):
                raise ValueError(
                    "disjoint, time_attr: got some for DGL's blocks; expected as_='pyg'"
                )
            hops = fanouts(num_neighbors, data.book)
            self.input_type, self._seeds = _seeds(input_nodes, data)
            self._time = _seed_times(data, self.input_type, self._seeds, input_time, time_attr)
        except Exception as caught:  # any, too little memory as well: the others would wait
            error = caught
        alike = [num_neighbors, batch_size, shuffle, drop_last, replace, disjoint, time_attr,
                 temporal_strategy, weight_attr, as_, fields, seed, bulk]  # fmt: skip
        group.agree(error, "NeighborLoader", alike)
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.transform, self.prefetch, self.bulk = transform, prefetch, bulk
        self.disjoint = disjoint or time_attr is not None
        self._book, self._make, self._epoch = data.book, MAKERS[as_], 0
        self._swap = Swap(group.beside(), _width(data.book, bulk))
        followed = [e for e in data.book.canonical_etypes if any(hop.get(e) for hop in hops)]
        edges = topology(data, self._swap, followed, weight_attr, time_attr)
        draws = Draws(hops, replace, last, as_ == "dgl", seed)
        self._sampler = NeighborSampler(data, edges, self._swap, draws)
        self._tables = FeatureTables(data, self._swap, fields)
        first = node_ids(data.book, self.input_type).first(data.part_id)
        self._salt = data.keys.nodes(self.input_type).long()[self._seeds - first]
        own = len(self._seeds)
        self._own_steps = own // batch_size if drop_last else -(-own // batch_size)
        self._steps = int(group.all_reduce(torch.tensor(self._own_steps), "max"))
        self._running: Ahead | None = None

    def __len__(self) -> int:
        """Steps of an epoch, the same on all ranks."""
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        self._end_epoch()
        epoch, self._epoch = self._epoch, self._epoch + 1
        produce = partial(self._epoch_of, epoch)
        if not self.prefetch:
            return told(produce, self._swap)
        depth = self.prefetch if self.bulk == 1 else max(self.prefetch, self.bulk + 1)
        self._running = Ahead(produce, self._swap, depth)
        return iter(self._running)

    def _epoch_of(self, epoch: int) -> Iterator[Any]:
        order = self._order(epoch)
        for first in range(0, self._steps, self.bulk):
            steps = range(first, min(first + self.bulk, self._steps))
            numbers = [epoch * self._steps + step for step in steps]
            self._swap.step = numbers[0]
            chosen = [self._chosen(order, step) for step in steps]
            seeds = [self._grown(one, step) for one, step in zip(chosen, numbers, strict=True)]
            samples = self._sampler.sample(seeds)
            for sample, one, number in zip(samples, chosen, numbers, strict=True):
                self._swap.step = number
                yield self._batch(sample, one, number)

    def _grown(self, chosen: Tensor, step: int) -> Seeds:
        ids = {self.input_type: self._seeds[chosen]}
        if not self.disjoint:
            return Seeds(ids, step)
        of = {self.input_type: torch.arange(len(chosen))}
        return Seeds(ids, step, Trees(of, self._salt[chosen], self._time[chosen]))

    def _order(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(len(self._seeds))
        words = hashed(self.seed, epoch, self._swap.group.rank) >> 1
        return torch.randperm(len(self._seeds), generator=torch.Generator().manual_seed(words))

    def _chosen(self, order: Tensor, step: int) -> Tensor:
        first = step * self.batch_size
        return order[first : first + self.batch_size] if step < self._own_steps else order[:0]

    def _batch(self, sample: Sample, chosen: Tensor, step: int) -> Any:
        ids: dict[Kind, Tensor] = dict(sample.nodes.items())
        for etype in self._book.canonical_etypes:
            drawn = [hop[etype].eid for hop in sample.hops if etype in hop]
            ids[etype] = torch.cat([torch.empty(0, dtype=torch.int64), *drawn])
        rows = self._tables.fetch(ids)
        time = self._time[chosen] if self.disjoint else None
        found = Drawn(self._book, sample, rows, self.input_type, chosen, step, time)
        batch = self._make(found)
        return batch if self.transform is None else self.transform(batch)

    def _end_epoch(self) -> None:
        """Of an iterator that was dropped half-way, too."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def close(self) -> None:
        """End the loader's thread and connections; harmless the second time."""
        self._end_epoch()
        self._swap.group.close()

    def __enter__(self) -> NeighborLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _width(book: PartitionBook, bulk: int) -> int:
    """Sizes in a request: of the frontiers of each type and batch, or of each kind's rows."""
    return max(bulk * len(book.ntypes), len(book.ntypes) + len(book.canonical_etypes))


def _check(as_: str, seed: int, positive: dict[str, int], least_zero: dict[str, int]) -> None:
    for least, numbers in ((1, positive), (0, least_zero)):
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: got {value!r}, expected an int of at least {least}")
    if as_ not in MAKERS:
        raise ValueError(f"as_: got {as_!r}, expected one of {', '.join(MAKERS)}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: got {type(seed).__name__}, expected an int")


def fanouts(num_neighbors: NumNeighbors, book: PartitionBook) -> list[dict[EType, int]]:
    """Per hop, how many edges of each relation."""
    if isinstance(num_neighbors, Mapping):
        lists = {book.canonical(etype): list(one) for etype, one in num_neighbors.items()}
    else:
        lists = {etype: list(num_neighbors) for etype in book.canonical_etypes}
    lengths = {len(one) for one in lists.values()}
    if len(lengths) != 1 or lengths == {0}:
        raise ValueError(
            f"num_neighbors: got {num_neighbors!r}, expected as many hops for each relation, 1 or "
            "more"
        )
    for one in lists.values():
        for fanout in one:
            if isinstance(fanout, bool) or not isinstance(fanout, int) or fanout < -1:
                raise ValueError(f"num_neighbors: got {fanout!r}, expected an int of -1 or more")
    return [{etype: one[hop] for etype, one in lists.items()} for hop in range(lengths.pop())]


def _seed_times(
    data: PartitionData, ntype: str, seeds: Tensor, given: Tensor | None, time_attr: str | None
) -> Tensor:
    """int64 [s] after which nothing is drawn around each seed."""
    if given is not None:
        if time_attr is None:
            raise ValueError("input_time: got one, expected time_attr as well")
        if given.shape != seeds.shape or given.is_floating_point():
            got = f"{given.dtype} {list(given.shape)}"
            raise ValueError(f"input_time: got {got}, expected integers [{len(seeds)}]")
        return given.long().cpu()
    if time_attr is None:
        return torch.full_like(seeds, NEVER)
    own = own_times(data, ntype, time_attr)
    if own is None:
        raise ValueError(
            f"input_time: got none, and nodes of type {ntype!r} have no {time_attr!r}; expected "
            "the time of each seed"
        )
    return own[seeds - node_ids(data.book, ntype).first(data.part_id)]


def _seeds(input_nodes: InputNodes, data: PartitionData) -> tuple[str, Tensor]:
    """The type of the seeds, and their ids inside it, int64."""
    book = data.book
    ntype, seeds = input_nodes if isinstance(input_nodes, tuple) else (None, input_nodes)
    if isinstance(seeds, str):
        ntype, seeds = seeds, None
    if ntype is None and len(book.ntypes) > 1:
        raise ValueError(
            f"input_nodes: got no node type, expected (type, seeds) with one of {book.ntypes}"
        )
    ntype = ntype or book.ntypes[0]
    if ntype not in book.ntypes:
        raise ValueError(f"input_nodes: got {ntype!r}, expected one of {book.ntypes}")
    start, end = book.node_ranges[ntype][data.part_id].tolist()
    rows = _rows(seeds, start, end)
    return ntype, rows + node_ids(book, ntype).first(data.part_id)


def _rows(seeds: Any, start: int, end: int) -> Tensor:
    """int64 rows of the part that are seeds."""
    count = end - start
    if seeds is None:
        return torch.arange(count)
    if not isinstance(seeds, Tensor):
        raise TypeError(f"input_nodes: got {type(seeds).__name__}, expected a tensor")
    if seeds.dtype == torch.bool:
        if tuple(seeds.shape) != (count,):
            raise ValueError(f"input_nodes: got bool {list(seeds.shape)}, expected bool [{count}]")
        return seeds.nonzero().view(-1).cpu()
    if seeds.dim() != 1 or seeds.is_floating_point():
        raise TypeError(
            f"input_nodes: got {seeds.dtype} {list(seeds.shape)}, expected bool [{count}] or "
            "integers [s]"
        )
    rows = seeds.long().cpu() - start
    if len(rows) and (rows.min() < 0 or rows.max() >= count):
        wrong = int(seeds[(rows < 0) | (rows >= count)][0])
        raise ValueError(
            f"input_nodes: node {wrong} is not this rank's, which owns {start} to {end - 1}"
        )
    if len(rows.unique()) != len(rows):
        raise ValueError("input_nodes: a node comes several times, expected distinct ones")
    return rows
