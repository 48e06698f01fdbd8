"""Modules of DGL's that get a graph and cannot run over its parts, with the reason."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from sar.errors import NotSupportedError

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


def refuse_undistributed() -> None:
    """Raise ``NotSupportedError`` when code of such a module is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("dgl."):
            owner = frame.f_locals.get("self")
            name = type(owner).__name__
            if isinstance(owner, torch.nn.Module) and name in UNDISTRIBUTED:
                raise NotSupportedError(f"{name} cannot be distributed: it {UNDISTRIBUTED[name]}")
        frame = frame.f_back
