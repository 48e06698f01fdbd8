"""The loaders: of nodes, of edges, of subgraphs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sar.comm import Group
from sar.partition.book import EType
from sar.partition.load import PartitionData
from sar.sampling.link_inputs import LinkInputs, LinkOptions
from sar.sampling.loader import Loader
from sar.sampling.negatives import negative_sampling
from sar.sampling.node_inputs import InputNodes, NodeInputs
from sar.sampling.options import NumNeighbors


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
        self._begin(NodeInputs(data, input_nodes, input_time, self.options, self._swap))


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
        links, error = LinkOptions(), None
        try:
            if neg_sampling is not None and neg_sampling_ratio is not None:
                raise ValueError("neg_sampling_ratio: got one beside neg_sampling, expected either")
            if neg_sampling_ratio:
                neg_sampling = {"mode": "binary", "amount": neg_sampling_ratio}
            links = LinkOptions(negative_sampling(neg_sampling), exclude, reverse_etype)
        except Exception as caught:  # any: the others would wait
            error = caught
        super().__init__(data, num_neighbors, options, group, vars(links), error)
        labels = edge_label, edge_label_time
        given = data, edge_label_index, *labels, links, self.options, self._swap
        self._begin(LinkInputs(*given))
