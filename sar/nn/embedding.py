"""Learned rows for nodes without features; every rank holds those of the nodes it owns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sar import expect
from sar.comm.seeds import digest_of_text
from sar.graph import GraphView, graph_of
from sar.kernels.keyed import keyed_uniform
from sar.nn.params import ShardedParameter

_BLOCK_ROWS = 1 << 16


class ShardedEmbedding(nn.Module):
    """A learned row for each node of one type, held by the rank that owns the node.

    ``embedding(graph)`` gives the rows that a graph or a block takes as input; their gradients come
    home through the exchange of the layers that read them. :func:`sar.nn.gather_grads` and
    :func:`sar.nn.sync_params` leave the rows alone, :func:`sar.nn.clip_grad_norm_` counts them, and
    :func:`sar.train.save_embedding` writes them in a form that any number of ranks reads.

    Args:
        graph: the graph or one of its blocks; rows are made for all nodes of this rank's part.
        ntype: the node type.
        dim: width of a row.
        sparse: let the gradient hold only the rows of the block (a sparse tensor), for
            ``torch.optim.SparseAdam`` or ``SGD``, which then touch no others.
        bound: rows start uniform in [-bound, bound).
        seed: with the node's original id, what a row starts from: the same for any number of ranks.
            Where the partitions hold no ``orig_id``, the partitioning's own ids stand in.
        dtype: of the rows; torch's default.

    Attributes:
        weight: [num_nodes of this rank, dim].
        ids: int64 [num_nodes of this rank] what names the rows in a checkpoint.
        numbering: ``"original"``, or which partitioning the ids belong to.

    Raises:
        TypeError: ``graph`` is not a sharded graph, ``dim`` no int.
        ValueError: the type does not exist, or ``dim`` is less than 1.
    """

    def __init__(
        self,
        graph: GraphView,
        ntype: str,
        dim: int,
        *,
        sparse: bool = False,
        bound: float = 1.0,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        graph = expect.instance(graph_of(graph), "graph", GraphView, "a ShardedGraph")
        expect.one_of(ntype, "ntype", graph._store.book.ntypes)
        expect.integer(dim, "dim", at_least=1)
        self.ntype, self.dim, self.sparse, self.bound, self.seed = ntype, dim, sparse, bound, seed
        self.num_nodes = graph.num_nodes_global(ntype)
        self.ids, self.numbering = graph.node_names(ntype)
        empty = torch.empty(len(self.ids), dim, dtype=dtype, device=graph.device)
        self.weight = ShardedParameter(empty)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give the rows the values of a new embedding of this seed."""
        with torch.no_grad():
            for start in range(0, len(self.ids), _BLOCK_ROWS):
                ids = self.ids[start : start + _BLOCK_ROWS]
                rows = initial_rows(ids, self.ntype, self.dim, self.seed, self.bound)
                self.weight[start : start + len(ids)] = rows.to(self.weight)

    def forward(self, graph: Any = None) -> Tensor:
        """Rows of the graph's source nodes, [n, dim]; without a graph those of all own nodes."""
        if graph is None:
            rows = torch.arange(len(self.weight), device=self.weight.device)
        else:
            rows = graph_of(graph).source_rows(self.ntype)
        return F.embedding(rows, self.weight, sparse=self.sparse)

    def extra_repr(self) -> str:
        return f"{self.ntype!r}, {len(self.ids)} of {self.num_nodes} rows, {self.dim}"


def initial_rows(ids: Tensor, ntype: str, dim: int, seed: int = 0, bound: float = 1.0) -> Tensor:
    """float64 [n, dim], uniform in [-bound, bound), by seed, type, original id and column."""
    return (keyed_uniform(ids, dim, digest_of_text(f"{seed} {ntype}")) * 2 - 1) * bound
