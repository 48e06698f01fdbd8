"""What a run's memory and traffic are counted from: rows and edges of each rank."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sar.edges.push_pull import LEAST_SAVED
from sar.errors import NotSupportedError
from sar.partition.load import read_book
from sar.partition.quality import CutQuality
from sar.partition.summary import summarize


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
        columns: of edges, by name: ``dtype`` and ``shape`` of an edge's.
    """

    name: str
    features: int
    classes: int
    ranks: list[RankStatistics]
    estimated: bool
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def rows(self, kind: str) -> list[Rows]:
        """Each rank's rows of a kind, an attribute of :class:`RankStatistics`."""
        return [getattr(rank, kind) for rank in self.ranks]

    def rows_sent(self, kind: str = "pulled") -> int:
        """Rows that all ranks send in one exchange of a kind."""
        return sum(int(rows.sent.sum()) for rows in self.rows(kind))


def from_parts(json_path: str | os.PathLike, features: str = "feat") -> GraphStatistics:
    """Count the rows of a partitioned graph; parts are read one after another.

    Raises ``PartitionError`` for bad files, ``NotSupportedError`` for several node or edge types.
    """
    book = read_book(json_path)
    _expect_one_type(str(json_path), len(book.ntypes), len(book.canonical_etypes))
    return from_summary(summarize(json_path), features)


def from_summary(summary: dict, features: str = "feat") -> GraphStatistics:
    """Statistics from what :func:`sar.partition.summary.summarize` counted.

    Raises ``NotSupportedError`` for several node or edge types.
    """
    _expect_one_type(summary["graph_name"], len(summary["nodes"]), len(summary["edges"]))
    (ntype,) = summary["nodes"]
    feature = summary["node_features"].get(f"{ntype}/{features}")
    width = int(np.prod(feature["shape"])) if feature else 0
    pulled, summed, ended = (
        np.array(summary["rows"][name]) for name in ("halo", "fewest", "ended")
    )
    sizes = [(part["num_nodes"], part["num_edges"]) for part in summary["parts"]]
    columns = {key.rpartition("/")[2]: one for key, one in summary["edge_features"].items()}
    graph = _graph(summary["graph_name"], width, sizes, pulled, summed, ended)
    return replace(graph, columns=columns)


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
    ranks = [
        RankStatistics(
            *size, *(Rows(rows[part], rows[:, part]) for rows in (pulled, summed, ended))
        )
        for part, size in enumerate(sizes)
    ]
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
    return estimate(
        graph.name, nodes, edges, number, features=graph.features, classes=graph.classes,
        halo_share=min(share, number - 1),
    )  # fmt: skip


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
