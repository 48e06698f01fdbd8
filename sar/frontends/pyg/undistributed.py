"""Modules of PyG that cannot run over a graph's parts, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from operator import attrgetter
from typing import Any

from torch import Tensor

from sar._private import tree_leaves
from sar.comm import current_group
from sar.errors import NotSupportedError
from sar.frontends.pyg.index import Symbol
from sar.graph import graphs_among

_SEARCHES = "searches the neighbors of each row among all nodes; make the edges before the graph is"
_SEARCHES += " cut (knn_graph, radius_graph), and use a layer that takes an edge_index"
_POOLS = "makes a graph of fewer nodes out of all nodes; pool by data.batch (global_mean_pool)"
_ATTENDS = "lets every node attend to every other, N x N weights"
_TABLE = "holds a row for each node of the graph on every rank; use layers on the rows of a"
_TABLE += " sar.nn.ShardedEmbedding"
_CUGRAPH = "runs kernels of cuGraph on ids of nodes; use the layer without the prefix"

# By module of PyG and class; those that get no edge index meet rows of the graph alone.
UNDISTRIBUTED: dict[str, dict[str, str]] = {
    "torch_geometric.nn.conv": {
        "CuGraphGATConv": _CUGRAPH,
        "CuGraphRGCNConv": _CUGRAPH,
        "CuGraphSAGEConv": _CUGRAPH,
        "DynamicEdgeConv": _SEARCHES,
        "FusedGATConv": "runs kernels of dgNN on ids of nodes; use GATConv",
        "GPSConv": _ATTENDS,
        "GravNetConv": _SEARCHES,
        "MeshCNNConv": "knows an edge's neighbors by its place among all edges",
        "PANConv": "multiplies sparse matrices of all nodes",
        "WLConv": "numbers colors in the order of all nodes; WLConvContinuous runs",
        "XConv": _SEARCHES,
    },
    "torch_geometric.nn.pool": {
        "ASAPooling": _POOLS,
        "ClusterPooling": _POOLS,
        "EdgePooling": _POOLS,
        "MemPooling": _POOLS,
        "PANPooling": _POOLS,
        "SAGPooling": _POOLS,
        "TopKPooling": _POOLS,
    },
    "torch_geometric.nn.attention": {
        "PerformerAttention": _ATTENDS,
        "PolynormerAttention": _ATTENDS,
        "QFormer": _ATTENDS,
        "SGFormerAttention": _ATTENDS,
    },
    "torch_geometric.nn.models": {
        "AttentiveFP": "makes edges between nodes and their graphs; use global_add_pool",
        "DimeNet": _SEARCHES,
        "DimeNetPlusPlus": _SEARCHES,
        "GNNFF": _SEARCHES,
        "GraphUNet": _POOLS,
        "InnerProductDecoder.forward_all": _ATTENDS,
        "LightGCN": _TABLE,
        "LightGCN.get_embedding": _TABLE,
        "LINKX": _TABLE,
        "Polynormer": _ATTENDS,
        "RECT_L.get_semantic_labels": "means the rows of one rank by their labels; use "
        "scatter(x, batch) with a column batch that has the labels",
        "SchNet": _SEARCHES,
        "SGFormer": _ATTENDS,
        "ViSNet": _SEARCHES,
    },
}
_TRANSFORMS = (
    "Center", "Delaunay", "FixedPoints", "NormalizeFeatures", "NormalizeRotation", "NormalizeScale",
    "RandomNodeSplit", "SVDFeatureReduction", "TargetIndegree",
)  # fmt: skip
_READS_ALL = "reads the rows of all nodes at once; transform the data before they are cut"
_EXPLAINS = "takes one rank's nodes for all; explain on a graph that is not cut"
_CANNOT = "cannot be distributed: it "
_SCALES = "scales by the mean error of one rank's nodes; expected autoscale=False"
_DRAWS = (
    "in training mode draws pairs of all nodes that have no edge, for get_attention_loss; expected "
    ".eval() of this layer, whose weights still get gradients, or GATConv"
)


def refusals() -> Iterator[tuple[Any, str, Callable]]:
    """(class, method, what is to stand in for it)."""
    for module, reasons in UNDISTRIBUTED.items():
        for path, reason in reasons.items():
            name, _, method = path.partition(".")
            kind, method = getattr(import_module(module), name, None), method or "forward"
            if kind is not None and method in vars(kind):  # some versions lack some
                yield kind, method, _refusing(vars(kind)[method], path, _CANNOT + reason)
    for name in _TRANSFORMS:
        kind = getattr(import_module("torch_geometric.transforms"), name)
        yield kind, "forward", _refusing(kind.forward, name, _CANNOT + _READS_ALL)
    kind = import_module("torch_geometric.explain").Explainer
    yield kind, "__call__", _refusing(kind.__call__, "Explainer", _CANNOT + _EXPLAINS)
    kind = import_module("torch_geometric.nn.conv").SuperGATConv
    is_training = attrgetter("training")
    yield kind, "forward", _refusing(kind.forward, kind.__name__, _DRAWS, is_training)
    kind = import_module("torch_geometric.nn.models").CorrectAndSmooth
    scales = attrgetter("autoscale")
    yield kind, "correct", _refusing(kind.correct, kind.__name__, _SCALES, scales)


def _refusing(
    forward: Callable, name: str, reason: str, when: Callable[[Any], bool] | None = None
) -> Callable:
    """``forward``, refused of sharded graphs; ``when`` an object is so, on their edges alone."""

    @wraps(forward)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        if _are_sharded(leaves) if when is None else when(layer) and _have_symbols(leaves):
            error = NotSupportedError(f"{name} {reason}")
            error.layer = name
            raise error
        return forward(layer, *args, **kwargs)

    return call


def _have_symbols(leaves: list) -> bool:
    return any(isinstance(leaf, Symbol) for leaf in leaves)


def _are_sharded(leaves: list) -> bool:
    """Whether edges of a sharded graph are among arguments, or as many rows as a rank has."""
    if graphs_among(leaves) or _have_symbols(leaves):
        return True
    group = current_group()
    if group.size == 1:
        return False
    counts = {count for graph in list(group.graphs) for count in (0, *graph.row_counts)}
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return any(size in counts for x in tensors for size in x.shape[:2])  # [1, n, F] of attention
