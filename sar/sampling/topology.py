"""In-edges with the weights and times that draws need."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sar.kernels.sampling import Csc
from sar.partition.book import EType
from sar.partition.load import PartitionData
from sar.sampling.features import FeatureTables
from sar.sampling.structure import edge_weights, in_edges, source_ids
from sar.sampling.swap import Swap

ALWAYS, NEVER = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


def topology(
    data: PartitionData,
    swap: Swap,
    etypes: Iterable[EType],
    weight_attr: str | None = None,
    time_attr: str | None = None,
) -> dict[EType, Csc]:
    """The in-edges of this part's nodes, of some relations; collective.

    Args:
        weight_attr: the edge feature that chances are in proportion to.
        time_attr: the feature that says when a node or an edge came. An edge came when it says so
            itself, else with its source; one that neither says anything about was always there.

    Raises ``ValueError`` on every rank for weights and times that do not fit.
    """
    edges, error = dict[EType, Csc](), None
    times: dict[EType, Tensor] = {}
    if time_attr is not None:
        times = _times(data, swap, list(etypes), time_attr)
    try:
        for etype in etypes:
            weight = None if weight_attr is None else edge_weights(data, etype, weight_attr)
            edges[etype] = in_edges(data, etype, weight, times.get(etype))
    except Exception as caught:  # any, too little memory as well: the others would wait
        error = caught
    swap.group.agree(error, "loader")
    return edges


def own_times(data: PartitionData, ntype: str, time_attr: str) -> Tensor | None:
    """int64 [n] when this part's nodes of a type came; ``None`` where nodes do not say."""
    name = f"{ntype}/{time_attr}"
    return _integers(data.node_features[name], name) if name in data.node_features else None


def _times(
    data: PartitionData, swap: Swap, etypes: list[EType], time_attr: str
) -> dict[EType, Tensor]:
    """int64 [E] per relation, by ascending id; those of sources are fetched."""
    aged = [n for n in data.book.ntypes if f"{n}/{time_attr}" in data.node_features]
    found, error, wanted = dict[EType, Tensor](), None, dict[EType, Tensor]()
    try:
        for ntype in aged:
            own_times(data, ntype, time_attr)
        for etype in etypes:
            name = f"{':'.join(etype)}/{time_attr}"
            if name in data.edge_features:
                found[etype] = _integers(data.edge_features[name], name)
            elif etype[0] in aged:
                wanted[etype] = source_ids(data, etype)
            else:
                found[etype] = torch.full((data.num_edges(etype),), ALWAYS)
        if not aged and all(bool((one == ALWAYS).all()) for one in found.values()):
            raise ValueError(f"time_attr: got {time_attr!r}, which neither nodes nor edges have")
    except Exception as caught:  # any, too little memory as well: the others would wait
        error = caught
    swap.group.agree(error, "loader")
    tables = FeatureTables(data, swap, {ntype: [time_attr] for ntype in aged})
    for etype in etypes:
        if etype[0] in aged and etype not in found:
            rows = tables.fetch({etype[0]: wanted[etype]})
            found[etype] = rows[etype[0]][time_attr].long()
    return found


def _integers(times: Tensor, name: str) -> Tensor:
    if times.dim() != 1 or times.is_floating_point() or times.dtype == torch.bool:
        raise ValueError(
            f"time_attr: {name!r} is {times.dtype} {list(times.shape)}, expected integers, one each"
        )
    return times.long()
