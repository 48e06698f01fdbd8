"""What a run's memory and traffic are counted from: rows and edges of each rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sar.edges.push_pull import LEAST_SAVED
from sar.errors import NotSupportedError
from sar.options import closest
from sar.partition.book import EType
from sar.partition.column import MappedColumn
from sar.partition.load import read_book, read_features
from sar.partition.quality import CutQuality
from sar.partition.summary import summarize
from sar.plan.types import RowCounts, Travel, Types


@dataclass(frozen=True)
class Rows:
    """Rows of one rank in one exchange, int64 [P]: received from and sent to each rank."""

    received: np.ndarray
    sent: np.ndarray

    def in_flight(self, rank: int, num_rounds: int) -> int:
        """Most rows sent and received in two successive rounds."""
        size = len(self.received)
        if size == 1:
            return 0
        distance = np.arange(1, size)
        rows = self.received[(rank + distance) % size] + self.sent[(rank - distance) % size]
        cuts = [(size - 1) * i // num_rounds for i in range(num_rounds + 1)]
        sums = np.add.reduceat(rows, cuts[:-1])
        return int((sums[:-1] + sums[1:]).max() if num_rounds > 1 else sums.max())


@dataclass(frozen=True)
class RankStatistics:
    """Sizes of one rank's part.

    Attributes:
        nodes, edges: inner nodes and edges.
        pulled: rows of an exchange of source rows.
        summed: of sums of copied rows, where partial sums may travel instead.
        ended: of rows in which edges end, which owners of their sources need.
    """

    nodes: int
    edges: int
    pulled: Rows
    summed: Rows
    ended: Rows


@dataclass(frozen=True)
class GraphStatistics:
    """Sizes of a graph cut for ``len(ranks)`` ranks.

    Attributes:
        features, classes: columns of the input, number of labels; 0 where unknown.
        estimated: the ranks' rows are estimates, not counts of a real cut.
        columns: of edges, by name: ``dtype`` and ``shape`` of an edge's. With several types by the
            name of the relation and theirs.
        types: where there are several; ``features`` are then those of the one to predict.
        counts: rows that travel for some relations, where there are several types.
    """

    name: str
    features: int
    classes: int
    ranks: list[RankStatistics]
    estimated: bool
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    types: Types | None = None
    counts: RowCounts | None = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def totals(self) -> tuple[int, int]:
        """Nodes and edges of all parts."""
        return sum(rank.nodes for rank in self.ranks), sum(rank.edges for rank in self.ranks)

    def count(self, sets: Sequence[Sequence[EType]]) -> None:
        """Count the rows that travel for some relations together, in one pass over the parts."""
        if self.counts is not None:
            self.counts.count([one for some in sets for one in _travels(some)])

    def rows(self, kind: str, relations: Sequence[EType] = ()) -> list[Rows]:
        """Each rank's rows of a kind, an attribute of :class:`RankStatistics`, of some relations
        together where there are several."""
        if self.counts is None or not relations:
            return [getattr(rank, kind) for rank in self.ranks]
        known, some = self.counts.known, tuple(relations)
        pulled = known[Travel("pulled", some)]
        found = known.get(Travel(kind, some), np.zeros_like(pulled) if kind == "ended" else pulled)
        if kind == "summed" and found.sum() > (1 - LEAST_SAVED) * pulled.sum():
            found = pulled
        return _by_rank(found)

    def rows_sent(self, kind: str = "pulled", relations: Sequence[EType] = ()) -> int:
        """Rows that all ranks send in one exchange of a kind."""
        return sum(int(rows.sent.sum()) for rows in self.rows(kind, relations))


def _travels(relations: Sequence[EType]) -> list[Travel]:
    some = tuple(relations)
    kinds = ["pulled", "summed"] if len({etype[0] for etype in some}) == 1 else ["pulled"]
    return [Travel(kind, some) for kind in (*kinds, *(["ended"] if len(some) == 1 else []))]


def _by_rank(rows: np.ndarray) -> list[Rows]:
    """Of [P, P] rows, at [p, q] what p receives from q."""
    return [Rows(rows[part], rows[:, part]) for part in range(len(rows))]


def from_parts(
    json_path: str | os.PathLike, features: str = "feat", target_type: str | None = None
) -> GraphStatistics:
    """Count the rows of a partitioned graph; parts are read one after another.

    ``target_type`` is the node type to predict; by default the one that has labels.

    Raises ``PartitionError`` for bad files, ``ValueError`` where the type is not clear.
    """
    return from_summary(summarize(json_path), features, json_path, target_type)


def from_book(
    json_path: str | os.PathLike, features: str = "feat", target_type: str | None = None
) -> GraphStatistics:
    """Sizes of a partitioned graph's parts; no edge is read, and no row that travels counted.

    Raises as :func:`from_parts`.
    """
    book = read_book(json_path)
    none = Rows(*[np.zeros(book.num_parts, dtype=np.int64)] * 2)
    sizes = [
        (
            sum(book.part_nodes(ntype, part) for ntype in book.ntypes),
            sum(book.part_edges(etype, part) for etype in book.canonical_etypes),
        )
        for part in range(book.num_parts)
    ]
    stored, columns = (
        {} if book.is_foreign else read_features(book, 0, key)  # of such a folder whole files
        for key in ("node_feats", "edge_feats")
    )
    widths = {
        ntype: int(np.prod(stored[f"{ntype}/{features}"].shape[1:]))
        for ntype in book.ntypes
        if f"{ntype}/{features}" in stored
    }
    about = {
        name.rpartition("/")[2] if book.is_homogeneous else name: {
            "dtype": str(one.dtype).removeprefix("torch."), "shape": [*one.shape[1:]],
        }
        for name, one in columns.items()
    }  # fmt: skip
    ranks = [RankStatistics(*size, none, none, none) for size in sizes]
    width = max(widths.values(), default=0)
    graph = GraphStatistics(book.graph_name, width, 0, ranks, estimated=False, columns=about)
    nodes, relations = {one: book.num_nodes(one) for one in book.ntypes}, book.canonical_etypes
    target = book.ntypes[0]
    if not book.is_homogeneous:
        target = _target({"nodes": nodes, "node_features": stored}, target_type)
        types = Types(nodes, relations, [*map(book.num_edges, relations)], widths, target)
        graph = replace(graph, types=types)
    return replace(graph, classes=_classes(stored.get(f"{target}/label")))


def _classes(labels: MappedColumn | None) -> int:
    """As far as these nodes tell; 0 without labels."""
    if labels is None or not len(labels):
        return 0
    return int(labels.read().max()) + 1 if len(labels.shape) == 1 else labels.shape[1]


def from_summary(
    summary: dict,
    features: str = "feat",
    path: str | os.PathLike = "",
    target_type: str | None = None,
) -> GraphStatistics:
    """Statistics from what :func:`sar.partition.summary.summarize` counted of the partitions
    ``path``, which are read again where there are several types. Raises as :func:`from_parts`."""
    pulled, summed, ended = (
        np.array(summary["rows"][name]) for name in ("halo", "fewest", "ended")
    )
    widths = {
        ntype: int(np.prod(summary["node_features"][f"{ntype}/{features}"]["shape"]))
        for ntype in summary["nodes"]
        if f"{ntype}/{features}" in summary["node_features"]
    }
    sizes = [(part["num_nodes"], part["num_edges"]) for part in summary["parts"]]
    if len(summary["nodes"]) == len(summary["edges"]) == 1:
        columns = {key.rpartition("/")[2]: one for key, one in summary["edge_features"].items()}
        width = next(iter(widths.values()), 0)
        graph = _graph(summary["graph_name"], width, sizes, pulled, summed, ended)
        return replace(graph, columns=columns)
    book, target = read_book(path), _target(summary, target_type)
    nodes = {ntype: book.num_nodes(ntype) for ntype in book.ntypes}
    per_part = {t: [book.part_nodes(t, part) for part in range(len(sizes))] for t in nodes}
    relations = book.canonical_etypes
    types = Types(nodes, relations, [*map(book.num_edges, relations)], widths, target)
    width = max(widths.values(), default=0)
    graph = _graph(summary["graph_name"], width, sizes, pulled, pulled, pulled)
    counts = RowCounts(path, len(sizes), per_part)
    return replace(graph, columns=dict(summary["edge_features"]), types=types, counts=counts)


def _target(summary: dict, target_type: str | None) -> str:
    ntypes = list(summary["nodes"])
    having = [ntype for ntype in ntypes if f"{ntype}/label" in summary["node_features"]]
    if target_type is not None and target_type not in ntypes:
        near = closest(target_type, ntypes, quoted=True)
        raise ValueError(
            f"target_type: got {target_type!r}, expected one of {', '.join(ntypes)}{near}"
        )
    if target_type is None and len(having) != 1:
        why = f"{', '.join(having)} have" if having else "none has"
        raise ValueError(
            f"target_type: got nothing and node types {', '.join(ntypes)}, of which {why} 'label'; "
            "expected sar plan --target-type TYPE"
        )
    return target_type or having[0]


def from_quality(quality: CutQuality, width: int) -> GraphStatistics:
    """Statistics from what was counted of a graph and its assignment; ``width`` columns of input.

    Rows of partial sums are those of ``quality.fewest``, or as many as source rows where these were
    not counted; rows in which edges end are not known and taken to be as many, too. So nothing is
    predicted too low but backward passes of attention over edges that mostly share their ends.

    Raises ``NotSupportedError`` for several node or edge types.
    """
    _expect_one_type(quality.graph_name, len(quality.typed_nodes), quality.num_etypes)
    summed = quality.rows if quality.fewest is None else quality.fewest
    sizes = [*zip(quality.nodes.tolist(), quality.edges.tolist(), strict=True)]
    return _graph(quality.graph_name, width, sizes, quality.rows, summed, quality.rows)


def _expect_one_type(name: str, num_ntypes: int, num_etypes: int) -> None:
    if num_ntypes != 1 or num_etypes != 1:
        raise NotSupportedError(
            f"{name}: got {num_ntypes} node and {num_etypes} edge types, expected one of each"
        )


def _graph(
    name: str,
    width: int,
    sizes: list[tuple[int, int]],
    pulled: np.ndarray,
    summed: np.ndarray,
    ended: np.ndarray,
) -> GraphStatistics:
    """From rows [P, P], at [p, q] what p receives from q, and (nodes, edges) of each part."""
    if summed.sum() > (1 - LEAST_SAVED) * pulled.sum():
        summed = pulled
    kinds = zip(*map(_by_rank, (pulled, summed, ended)), strict=True)
    ranks = [RankStatistics(*size, *rows) for size, rows in zip(sizes, kinds, strict=True)]
    return GraphStatistics(name, width, 0, ranks, estimated=False)


def estimate(
    name: str,
    nodes: int,
    edges: int,
    hosts: int,
    *,
    features: int = 0,
    classes: int = 0,
    halo_share: float | None = None,
) -> GraphStatistics:
    """Even parts of a graph that is known by its sizes only.

    Args:
        edges: directed edges that messages travel over.
        halo_share: rows that a rank receives, over the rows that it owns. By default what a
            random cut of a regular graph gives, see :func:`random_share`.
    """
    if hosts == 1:
        none = Rows(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
        alone = RankStatistics(nodes, edges, none, none, none)
        return GraphStatistics(name, features, classes, [alone], True)
    if halo_share is None:
        halo_share = random_share(nodes, edges, hosts)
    own = -(-nodes // hosts)
    pair = round(own * halo_share / (hosts - 1))
    ranks = []
    for rank in range(hosts):
        counts = np.full(hosts, pair, dtype=np.int64)
        counts[rank] = 0
        rows = Rows(counts, counts)
        ranks.append(RankStatistics(own, -(-edges // hosts), rows, rows, rows))
    return GraphStatistics(name, features, classes, ranks, estimated=True)


def random_share(nodes: int, edges: int, hosts: int) -> float:
    """Rows that a rank receives over rows that it owns, in a random cut of a regular graph.

    That is (P - 1) (1 - (1 - 1/P)^(edges / nodes)): more than any usual cut has, as high degrees
    only lower it.
    """
    return (hosts - 1) * (1 - (1 - 1 / hosts) ** (edges / max(1, nodes)))


def other_number(graph: GraphStatistics, number: int) -> GraphStatistics:
    """Estimate ``graph`` in ``number`` parts, by a cut that is better than a random one, or worse,
    by as much as the cut of ``graph`` is."""
    nodes, edges = (sum(getattr(rank, name) for rank in graph.ranks) for name in ("nodes", "edges"))
    share = random_share(nodes, edges, number)
    if graph.size > 1:
        share *= graph.rows_sent() / max(1, nodes) / random_share(nodes, edges, graph.size)
    found = estimate(
        graph.name, nodes, edges, number, features=graph.features, classes=graph.classes,
        halo_share=min(share, number - 1),
    )  # fmt: skip
    if graph.types is None or graph.counts is None:
        return found
    counts = RowCounts("", number, {})
    for one, rows in graph.counts.known.items():
        counts.known[one] = _other_rows(one, int(rows.sum()), graph.types, graph.size, number)
    return replace(found, types=graph.types, counts=counts)


def _other_rows(one: Travel, rows: int, types: Types, size: int, number: int) -> np.ndarray:
    """Even rows between ``number`` parts, where ``size`` parts exchange so many in all."""
    nodes = sum(types.nodes[n] for n in {e[2 if one.kind == "ended" else 0] for e in one.relations})
    edges = sum(types.edges[types.relations.index(etype)] for etype in one.relations)
    share = random_share(nodes, edges, number)
    if size > 1:
        share *= rows / max(1, nodes) / max(random_share(nodes, edges, size), 1e-9)
    pair = round(nodes / number * min(share, number - 1) / max(1, number - 1))
    return np.full((number, number), pair) * (1 - np.eye(number, dtype=np.int64))


@dataclass(frozen=True)
class Dataset:
    """Sizes of a graph as its authors publish them.

    Attributes:
        nodes, edges: as stored; directed edges count once, undirected ones twice.
        features, classes: columns of the feature matrix, number of labels.
        directed: whether training usually adds the reverse of every edge.
        source: where the numbers are from.
    """

    nodes: int
    edges: int
    features: int
    classes: int
    directed: bool
    source: str


_OGB = "Hu et al. 2020, arXiv 2005.00687"
_IGB = "Khatua et al. 2023, arXiv 2302.13522"
KNOWN = {
    "ogbn-arxiv": Dataset(169_343, 1_166_243, 128, 40, True, _OGB),
    "ogbn-products": Dataset(2_449_029, 123_718_280, 100, 47, False, _OGB),
    "ogbn-papers100M": Dataset(111_059_956, 1_615_685_872, 128, 172, True, _OGB),
    # papers and their citations; authors and institutions are two other node types
    "mag240m-papers": Dataset(
        121_751_666, 1_297_748_926, 768, 153, True, "Hu et al. 2021, arXiv 2103.09430"
    ),
    "igb-tiny": Dataset(100_000, 547_416, 1024, 19, True, _IGB),
    "igb-small": Dataset(1_000_000, 12_070_502, 1024, 19, True, _IGB),
    "igb-medium": Dataset(10_000_000, 120_077_694, 1024, 19, True, _IGB),
    "igb-large": Dataset(100_000_000, 1_223_571_364, 1024, 19, True, _IGB),
    "igb-260m": Dataset(269_364_174, 3_995_777_033, 1024, 19, True, _IGB),
}
