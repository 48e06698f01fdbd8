"""Options that all loaders share, and how many edges a node draws."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sar import registry
from sar.config import parse_bytes
from sar.partition.book import EType, PartitionBook

NumNeighbors = Sequence[int] | Mapping[str | EType, Sequence[int]]
STRATEGIES = ("uniform", "last")
TENSORS = "tensors"
SUBGRAPHS = ("directional", "bidirectional", "induced")
DIRECTIONS = ("in", "out")
TOPOLOGIES = ("partitioned", "replicated")
_MOST = 2**31 - 1  # edges that a node draws


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """What every loader takes beside its data, its fanouts and its seeds; keywords only.

    All but ``transform``, ``filter`` and ``prefetch`` have to be the same on all ranks.

    Attributes:
        batch_size: seeds of a rank and step.
        shuffle: another order in each epoch.
        drop_last: leave out a rank's last batch where it is not full.
        rebalance: deal seeds out so that each rank has as many; they may then be anybody's nodes.
        original_ids: seeds are given by original ids, instead of the partitioning's.
        replace: draw with replacement.
        disjoint: a tree for each seed, whose nodes no other tree shares; ``batch`` says of which
            seed a node is. Not for blocks.
        direction: ``"in"``: of a node its in-edges are drawn; ``"out"``: its out-edges, not for
            blocks. Edges keep their direction.
        subgraph_type: ``"directional"``: the edges that were drawn; ``"induced"``: all edges
            between the nodes that were drawn; ``"bidirectional"``: those that were drawn and
            their reverses, each pair of nodes once.
        time_attr: the feature of nodes or edges that says when they came; implies ``disjoint``.
        temporal_strategy: ``"uniform"`` among the edges up to the seed's time, or the ``"last"``.
        weight_attr: the edge feature, one number of 0 or more for each edge, that the chances of a
            node's edges are in proportion to. An edge of weight 0 is never drawn, whatever the
            fanout, as by ``dgl.sampling``; a node all of whose edges have it draws none. Not for
            the last edges in time.
        as_: ``"dgl"`` gives what DGL's loaders do, the default where DGL is installed; ``"pyg"``
            ``Data`` or ``HeteroData`` as PyG's do; ``"sar"`` blocks that need neither, see
            :class:`sar.models.SampledBlock`; ``"tensors"`` a :class:`sar.sampling.SampledBatch`,
            the default where DGL is not installed.
        fields: names of features per node type and relation, ``{"_N": ["feat"]}``; all by default.
            Relations are named as in ``num_neighbors``. Ids are original ones where ``orig_id``, of
            edges ``orig_eid``, is among them.
        filter: called with the :class:`sar.sampling.Sample` that was drawn, before features are
            fetched; what it returns is taken instead.
        transform: called with each batch; what it returns is given instead.
        seed: of draws and order.
        prefetch: batches that a thread makes ahead; 0: none, and no thread.
        bulk: batches that are drawn in one exchange, at most 64 and the steps of an epoch; their
            features come batch by batch.
        cache: rows of other ranks' features that this one keeps, as bytes or ``"256MiB"``; those
            that two epochs of draws need most often. 0: none.
        topology: ``"replicated"`` keeps the edges of the whole graph on every rank, so that draws
            need no exchange.
    """

    batch_size: int = 1
    shuffle: bool = False
    drop_last: bool = False
    rebalance: bool = False
    original_ids: bool = False
    replace: bool = False
    disjoint: bool = False
    direction: str = "in"
    subgraph_type: str = "directional"
    time_attr: str | None = None
    temporal_strategy: str = "uniform"
    weight_attr: str | None = None
    as_: str = ""
    fields: Mapping[str | EType, Sequence[str]] | None = None
    filter: Callable[[Any], Any] | None = None
    transform: Callable[[Any], Any] | None = None
    seed: int = 0
    prefetch: int = 2
    bulk: int = 4
    cache: int | str = 0
    topology: str = "partitioned"

    def __post_init__(self) -> None:
        if not self.as_:
            form = "dgl" if registry.is_installed("dgl") else TENSORS
            object.__setattr__(self, "as_", form)
        self._check_kinds()
        object.__setattr__(self, "disjoint", self.disjoint or self.time_attr is not None)
        for name, least in (("batch_size", 1), ("bulk", 1), ("prefetch", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: got {value!r}, expected an int of at least {least}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed: got {type(self.seed).__name__}, expected an int")
        for name, known in {"as_": (*registry.front_ends(), TENSORS), **_CHOICES}.items():
            if getattr(self, name) not in known:
                got, among = getattr(self, name), ", ".join(known)
                raise ValueError(f"{name}: got {got!r}, expected one of {among}")
        if self.cache != 0:
            parse_bytes(self.cache, "cache")
        self._check_together()

    def _check_kinds(self) -> None:
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: got {getattr(self, name)!r}, expected a bool")
        for name in ("time_attr", "weight_attr"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"{name}: got {getattr(self, name)!r}, expected a feature's name")
        for name in ("transform", "filter"):
            call = getattr(self, name)
            if call is not None and not callable(call):
                raise TypeError(f"{name}: got {call!r}, expected a function")

    def _check_together(self) -> None:
        blocks = self._blocks
        if blocks and self.disjoint:
            raise ValueError(f"disjoint, time_attr: got some for {blocks}; expected as_='pyg'")
        if blocks and self.direction == "out":
            raise ValueError(f"direction: got 'out' for {blocks}; expected as_='pyg'")
        if self.weight_attr is not None and self.temporal_strategy == "last":
            got = f"got {self.weight_attr!r}, expected none for temporal_strategy='last'"
            raise ValueError(f"weight_attr: {got}")
        if self.subgraph_type == "induced" and self.direction == "out":
            raise ValueError("direction: got 'out', expected 'in' for induced subgraphs")

    @property
    def has_blocks(self) -> bool:
        """Whether batches are blocks, for which all nodes draw again at each hop."""
        return self._blocks is not None and self.subgraph_type == "directional"

    @property
    def _blocks(self) -> str | None:
        """What blocks are called, where batches are made of them."""
        return None if self.as_ == TENSORS else registry.front_end(self.as_).BLOCKS

    def alike(self) -> dict[str, Any]:
        """What has to be the same on all ranks."""
        own = ("transform", "filter", "prefetch")
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in own}


_SWITCHES = ("shuffle", "drop_last", "rebalance", "original_ids", "replace", "disjoint")
_CHOICES = {
    "temporal_strategy": STRATEGIES, "direction": DIRECTIONS, "subgraph_type": SUBGRAPHS,
    "topology": TOPOLOGIES,
}  # fmt: skip


def loader_options(given: Mapping[str, Any]) -> LoaderOptions:
    """From keywords; raises ``TypeError`` for a name that there is not, and says what is near."""
    check_names(given, LoaderOptions)
    return LoaderOptions(**given)


def check_names(given: Mapping[str, Any], of: type, what: str = "") -> None:
    """Raise ``TypeError`` for a name that a dataclass has no field of, and say what is near."""
    known = [one.name for one in fields(of)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f", expected one of {known}"
            raise TypeError(f"{what}got an unknown option {name!r}{hint}")


def fanouts(num_neighbors: NumNeighbors, book: PartitionBook) -> list[dict[EType, int]]:
    """Per hop, how many edges of each relation."""
    given = num_neighbors.values() if isinstance(num_neighbors, Mapping) else [num_neighbors]
    for one in given:
        if not isinstance(one, Sequence):
            raise TypeError(f"num_neighbors: got {one!r}, expected a list, an int for each hop")
    if isinstance(num_neighbors, Mapping):
        lists = {book.canonical(etype): list(one) for etype, one in num_neighbors.items()}
        if len(lists) < len(num_neighbors):
            raise ValueError(f"num_neighbors: got {num_neighbors!r}, expected each relation once")
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
            if isinstance(fanout, bool) or not isinstance(fanout, int):
                raise ValueError(f"num_neighbors: got {fanout!r}, expected an int")
            if not -1 <= fanout <= _MOST:
                raise ValueError(f"num_neighbors: got {fanout}, expected an int of -1 to {_MOST}")
    return [{etype: one[hop] for etype, one in lists.items()} for hop in range(lengths.pop())]
