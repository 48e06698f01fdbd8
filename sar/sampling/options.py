"""What loaders are asked for: options, those of edges, and how many edges a node draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, fields
from typing import Any, TypeVar

from torch import Tensor

from sar import expect, registry
from sar.config import parse_bytes
from sar.options import closest
from sar.partition.book import EType, PartitionBook

NumNeighbors = Sequence[int] | Mapping[str | EType, Sequence[int]]
T = TypeVar("T")
TENSORS = "tensors"
_SWITCHES = ("shuffle", "drop_last", "rebalance", "original_ids", "replace", "disjoint")
_NAME, _FUNCTION = (str, "a feature's name"), (Callable, "a function")
_OPTIONAL: dict[str, tuple[Any, str]] = {
    "time_attr": _NAME, "weight_attr": _NAME, "transform": _FUNCTION, "filter": _FUNCTION,
}  # fmt: skip
_CHOICES = {
    "temporal_strategy": ("uniform", "last"),
    "direction": ("in", "out"),
    "subgraph_type": ("directional", "bidirectional", "induced"),
    "topology": ("partitioned", "replicated"),
}
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
        prefetch: batches that a thread makes ahead; 0: none, and no thread, as in ``run_parts``.
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
        for name in _SWITCHES:
            expect.boolean(getattr(self, name), name)
        for name, (kind, expected) in _OPTIONAL.items():
            if getattr(self, name) is not None:
                expect.instance(getattr(self, name), name, kind, expected)
        object.__setattr__(self, "disjoint", self.disjoint or self.time_attr is not None)
        for name, least in (("batch_size", 1), ("bulk", 1), ("prefetch", 0), ("seed", None)):
            expect.integer(getattr(self, name), name, at_least=least)
        for name, known in {"as_": (*registry.front_ends(), TENSORS), **_CHOICES}.items():
            expect.one_of(getattr(self, name), name, known)
        if self.cache != 0:
            parse_bytes(self.cache, "cache")
        self._check_together()

    def _check_together(self) -> None:
        blocks = self.blocks
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
    def blocks(self) -> str | None:
        """What blocks are called, for which all nodes draw again at each hop; or ``None``."""
        return None if self.as_ == TENSORS else registry.front_end(self.as_).BLOCKS

    def alike(self) -> dict[str, Any]:
        """The options that have to be the same on all ranks."""
        own = ("transform", "filter", "prefetch")
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in own}


@dataclass(frozen=True)
class NegativeSampling:
    """How pairs without an edge are drawn.

    Attributes:
        mode: ``"binary"``: pairs beside the seed edges, labelled 0; ``"triplet"``: other
            destinations for the source of each seed edge.
        amount: pairs for each seed edge; a whole number for triplets.
        src_weight, dst_weight: names of node features that chances are in proportion to; all
            nodes alike by default.
        keep_src: binary pairs keep the source of their seed edge (per source); else both ends
            are drawn (global).
        strict: no pair that the relation has.
    """

    mode: str = "binary"
    amount: float = 1
    src_weight: str | None = None
    dst_weight: str | None = None
    keep_src: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("binary", "triplet"):
            raise ValueError(f"neg_sampling: got {self.mode!r}, expected 'binary' or 'triplet'")
        if not 0 < expect.number(self.amount, "amount") < 1e6:
            raise ValueError(f"amount: got {self.amount}, expected more than 0, less than 1e6")
        if self.is_triplet and self.amount != int(self.amount):
            raise ValueError(f"amount: got {self.amount}, expected a whole number for triplets")

    @property
    def is_triplet(self) -> bool:
        """Whether destinations alone are drawn, for the source of each seed edge."""
        return self.mode == "triplet"


@dataclass(frozen=True)
class LinkOptions:
    """What a loader of seed edges takes beside the options of all loaders.

    Attributes:
        negatives: how pairs without an edge are drawn; made of what a loader takes.
        exclude: which edges are not drawn in a step: none, those between the ends of seed edges
            of any rank (``"self"``), or also those of ``reverse_etype`` between the same ends the
            other way round (``"reverse"``).
    """

    negatives: Any = None
    exclude: str | None = None
    reverse_etype: str | EType | None = None
    ratio: InitVar[float | None] = None

    def __post_init__(self, ratio: float | None) -> None:
        negatives = self.negatives
        if negatives is not None and ratio is not None:
            raise ValueError("neg_sampling_ratio: got one beside neg_sampling, expected either")
        negatives = {"mode": "binary", "amount": ratio} if ratio else negatives
        object.__setattr__(self, "negatives", _negative_sampling(negatives))
        expect.one_of(self.exclude, "exclude", (None, "self", "reverse"))
        if self.reverse_etype is not None and self.exclude != "reverse":
            raise ValueError("reverse_etype: got one, expected exclude='reverse' as well")


@dataclass(frozen=True)
class LoaderRequest:
    """What a loader is made of, on its rank or by servers; read by :meth:`checked`.

    Seeds, labels and time are as loaders take them, for servers tensors of ids. ``input_type`` is
    for seeds that do not say it. ``links``, of a loader of edges, may be keywords of its options.
    """

    num_neighbors: NumNeighbors
    input_type: Any
    seeds: Any
    labels: Tensor | None
    time: Tensor | None
    links: LinkOptions | Mapping[str, Any] | None
    options: Mapping[str, Any]

    def checked(self, alike: dict[str, Any]) -> tuple[LoaderOptions, LinkOptions | None]:
        """The options, checked; adds to ``alike`` what has to be the same on all ranks."""
        links = LinkOptions(**self.links) if isinstance(self.links, Mapping) else self.links
        options = from_keywords(LoaderOptions, self.options)
        alike |= {"num_neighbors": self.num_neighbors, **options.alike()}
        alike |= {} if links is None else vars(links)
        return options, links


def _negative_sampling(given: Any) -> NegativeSampling | None:
    """From a mode's name, a dictionary, or an object with these attributes, such as PyG's."""
    if given is None or isinstance(given, NegativeSampling):
        return given
    if isinstance(given, str):
        return NegativeSampling(given)
    if isinstance(given, Mapping):
        return from_keywords(NegativeSampling, given, "neg_sampling: ")
    if not hasattr(given, "mode"):
        expected = "'binary', 'triplet' or a NegativeSampling"
        raise expect.wrong_type(given, "neg_sampling", expected)
    mode = getattr(given.mode, "value", given.mode)
    for name in ("src_weight", "dst_weight"):
        if not isinstance(getattr(given, name, None), str | None):
            raise TypeError(f"neg_sampling: got {name} as a tensor, expected a feature's name")
    return NegativeSampling(mode, given.amount, given.src_weight, given.dst_weight)


def from_keywords(kind: type[T], given: Mapping[str, Any], what: str = "") -> T:
    """A dataclass; raises ``TypeError`` for a name that is none of its fields, with the nearest."""
    known = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            hint = closest(str(name), known, quoted=True) or f", expected one of {known}"
            raise TypeError(f"{what}got an unknown option {name!r}{hint}")
    return kind(**given)


def fanouts(num_neighbors: NumNeighbors, book: PartitionBook) -> list[dict[EType, int]]:
    """Per hop, the fanout of each relation, checked."""
    given: Mapping[Any, Any] = dict.fromkeys(book.canonical_etypes, num_neighbors)
    if isinstance(num_neighbors, Mapping):
        given = num_neighbors
    for one in given.values():
        if not isinstance(one, Sequence):
            raise TypeError(f"num_neighbors: got {one!r}, expected a list, an int for each hop")
    lists = {book.canonical(etype): list(one) for etype, one in given.items()}
    if len(lists) < len(given):
        raise ValueError(f"num_neighbors: got {num_neighbors!r}, expected each relation once")
    lengths = {len(one) for one in lists.values()}
    if len(lengths) != 1 or lengths == {0}:
        raise ValueError(
            f"num_neighbors: got {num_neighbors!r}, expected as many hops for each relation, 1 or "
            "more"
        )
    for one in lists.values():
        for fanout in one:
            expect.integer(fanout, "num_neighbors", at_least=-1, at_most=_MOST)
    return [{etype: one[hop] for etype, one in lists.items()} for hop in range(lengths.pop())]
