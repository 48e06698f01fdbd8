"""DGL's blocks, made of arrays that are known to fit.

``dgl.create_block`` looks for the largest id and makes a graph of each relation first: four times
what the block takes itself, half of which are its edge ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sar._private import dgl_makers
from sar.partition.book import EType
from sar.partition.require import require_dgl

Ends = tuple[Tensor, Tensor]
_FORMATS = ["coo", "csr", "csc"]  # that DGL may make of the one it gets


def make_block(
    edges: Mapping[EType, Ends],
    starts: Mapping[EType, Tensor],
    sources: Mapping[str, int],
    targets: Mapping[str, int],
) -> Any:
    """What ``dgl.create_block`` gives for edges whose ends are in range.

    Args:
        edges: of each relation, int64 sources and destinations.
        starts: of relations whose edges are sorted by destination, int64 [n + 1] where those of
            each destination begin.
        sources, targets: how many nodes of each type there are.
    """
    require_dgl("DGL's blocks")
    dgl = dgl_makers()
    relations, ntypes = sorted(edges), sorted(sources)
    made = []
    for etype in relations:
        (src, dst), counts = edges[etype], (sources[etype[0]], targets[etype[2]])
        if etype in starts:
            ids = torch.arange(len(src))  # without, DGL refuses to read rows of edges
            given = starts[etype], src, ids, _FORMATS, True
            made.append(dgl.from_csr(2, *counts, *given))
        else:
            made.append(dgl.from_coo(2, *counts, src, dst, _FORMATS))
    nodes = [*(sources[n] for n in ntypes), *(targets[n] for n in ntypes)]
    index = dgl.from_relations(
        _meta_graph(tuple(ntypes), tuple(relations)), made, dgl.to_index(nodes, "int64")
    )
    return dgl.block(index, (ntypes, ntypes), [etype[1] for etype in relations])


@cache
def _meta_graph(ntypes: tuple[str, ...], relations: tuple[EType, ...]) -> Any:
    """Node types as sources, then as destinations, and a relation for each edge."""
    src = [ntypes.index(etype[0]) for etype in relations]
    dst = [len(ntypes) + ntypes.index(etype[2]) for etype in relations]
    return dgl_makers().meta_graph(2 * len(ntypes), src, dst, True)
