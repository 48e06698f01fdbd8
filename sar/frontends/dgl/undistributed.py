"""Modules of DGL's that get a graph and cannot run over its parts, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from sar.errors import NotSupportedError
from sar.graph.view import GraphView

_EXPLAINS = "searches subgraphs of one process' graph; explain on a graph that is not partitioned"
_WALKS = "walks over the edges of the whole graph; learn on a graph that is not partitioned"
_DENSE = "takes a dense adjacency matrix, which holds every pair of nodes"
_CUGRAPH = "runs kernels of cuGraph on a graph of its own; use the layer without the prefix"

UNDISTRIBUTED = {
    "SetTransformerEncoder": "lets every node attend to every other, N x N weights",
    "SetTransformerDecoder": "pads all nodes of the graph into one dense tensor",
    "GNNExplainer": _EXPLAINS,
    "HeteroGNNExplainer": _EXPLAINS,
    "SubgraphX": _EXPLAINS,
    "HeteroSubgraphX": _EXPLAINS,
    "DeepWalk": _WALKS,
    "MetaPath2Vec": _WALKS,
    "DenseGraphConv": _DENSE,
    "DenseSAGEConv": _DENSE,
    "DenseChebConv": _DENSE,
    "CuGraphGATConv": _CUGRAPH,
    "CuGraphRelGraphConv": _CUGRAPH,
    "CuGraphSAGEConv": _CUGRAPH,
}


def refusing(method: Callable, name: str, reason: str) -> Callable:
    """``method`` of class ``name``, which raises ``NotSupportedError`` for a sharded graph."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, GraphView) for one in (*args, *kwargs.values())):
            error = NotSupportedError(f"{name} cannot be distributed: it {reason}")
            error.layer = name
            raise error
        return method(*args, **kwargs)

    return call
