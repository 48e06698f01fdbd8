"""Numbers that describe a partitioned graph, gathered from its files without loading features."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import numpy as np

from sar.partition.book import PartitionBook
from sar.partition.cover import count_fewest
from sar.partition.load import PartitionData, load_partition, read_book
from sar.partition.methods.graph import marked
from sar.partition.quality import CutQuality


def summarize(
    json_path: str | os.PathLike,
    *,
    watch: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> dict:
    """Sizes, halo, cut, balance and features of a partitioned graph, as JSON-able values.

    `docs/formats.md` (JSON of ``sar inspect``) has the table of keys. An edge is cut when its
    source lies in another part. Halo nodes are a part's different remote sources, so a node counts
    once for each part that receives it; boundary nodes are inner nodes that some other part
    receives.

    Parts are read one after another; a byte for each node stays in memory. ``watch`` gets the
    numbers of the parts and gives them out again, as a progress bar does. Raises PartitionError for
    bad files.
    """
    book = read_book(json_path)
    count = _Count(book)
    for part in watch(range(book.num_parts)):
        count.add(load_partition(json_path, part))
    return count.described()


class _Count:
    """The numbers of the summary, counted part by part; [P, P] ``rows`` as in `summarize`.

    ``needed`` has for each type and part a bool [n]: another part needs the node. ``has_train``
    says that some part has a ``train_mask``.
    """

    def __init__(self, book: PartitionBook) -> None:
        size, self.book = book.num_parts, book
        self.needed = {
            ntype: [np.zeros(book.part_nodes(ntype, part), bool) for part in range(size)]
            for ntype in book.ntypes
        }
        self.cuts = {etype: np.zeros(size, np.int64) for etype in book.canonical_etypes}
        self.rows = {name: np.zeros((size, size), np.int64) for name in ("halo", "fewest", "ended")}
        self.training, self.has_train, self.pulled = np.zeros(size, np.int64), False, 0
        self.features: dict[str, dict] = {"node_features": {}, "edge_features": {}}

    def add(self, data: PartitionData) -> None:
        part, book = data.part_id, self.book
        for etype, shard in data.edges.items():
            sizes = list(map(len, self.needed[etype[0]]))
            ends = shard.src.numpy(), shard.dst.numpy()
            self.rows["fewest"][part] += count_fewest(*ends, shard.offsets, sizes, part)
        for peer in range(book.num_parts):
            if peer != part:
                self._add_peer(data, peer)
        for name in (f"{ntype}/train_mask" for ntype in book.ntypes):
            if name in data.node_features:
                self.has_train = True
                self.training[part] += int(marked(data.node_features[name]).sum())
        stores = data.node_features, data.edge_features
        for features, store in zip(self.features.values(), stores):
            for name in store:  # parts may differ, so all are looked at
                if "/" in name:
                    dtype, shape = store.info(name)
                    kind = str(dtype).removeprefix("torch.")
                    features.setdefault(name, {"dtype": kind, "shape": list(shape[1:])})

    def _add_peer(self, data: PartitionData, peer: int) -> None:
        """Count the rows that part ``data`` receives from ``peer``."""
        together: dict[str, np.ndarray] = {}
        for etype, shard in data.edges.items():
            own, ntype = slice(*shard.offsets[peer : peer + 2]), etype[0]
            self.cuts[etype][data.part_id] += own.stop - own.start
            self.rows["ended"][peer, data.part_id] += len(shard.dst[own].unique())
            used = np.zeros_like(self.needed[ntype][peer])
            used[shard.src[own].numpy()] = True
            self.pulled += int(used.sum())
            together[ntype] = used | together.get(ntype, used)
        for ntype, used in together.items():
            self.rows["halo"][data.part_id, peer] += int(used.sum())
            self.needed[ntype][peer] |= used

    def described(self) -> dict:
        book, rows = self.book, self.rows
        nodes = {ntype: np.array(list(map(len, own))) for ntype, own in self.needed.items()}
        edges = {etype: np.diff(book.edge_ranges[etype], axis=1)[:, 0] for etype in self.cuts}
        quality = CutQuality(
            graph_name=book.graph_name,
            num_etypes=len(edges),
            nodes=np.sum([*nodes.values()], axis=0),
            typed_nodes=nodes,
            edges=np.sum([*edges.values()], axis=0),
            cut_edges=np.sum([*self.cuts.values()], axis=0),
            halo=rows["halo"].sum(1),
            boundary=np.sum([[one.sum() for one in own] for own in self.needed.values()], axis=0),
            training=self.training if self.has_train else None,
            rows=rows["halo"],
        )
        fewest = int(rows["fewest"].sum())
        saved = 1 - fewest / self.pulled if self.pulled else 0.0
        return {
            **quality.to_dict(),
            "part_method": book.part_method,
            "halo_hops": book.halo_hops,
            "digest": book.digest(),
            "rows": {name: one.tolist() for name, one in rows.items()},
            "sum_rows": {"pulled": self.pulled, "fewest": fewest, "saved": saved},
            "end_rows": int(rows["ended"].sum()),
            "edges": {
                ":".join(etype): {
                    "total": int(own.sum()),
                    "per_part": own.tolist(),
                    "cut_per_part": self.cuts[etype].tolist(),
                }
                for etype, own in edges.items()
            },
            **self.features,
        }
