"""Published sizes of graphs that people ask about before they have them."""

from __future__ import annotations

from dataclasses import dataclass


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
