"""Seeds by the name of a mask, as ids that any rank understands; what nodes have by name."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sar.partition.book import EType
from sar.partition.load import PartitionData
from sar.sampling.owners import look_up
from sar.sampling.structure import node_ids, source_ids, target_ids
from sar.sampling.swap import Swap


def chosen_ids(data: PartitionData, ntype: str | None = None, mask: str | None = None) -> Tensor:
    """int64 [s] ids of this part's nodes of a type, those in a mask: original ids where the
    partitions hold them, else global ones."""
    ntype = _ntype(data, ntype)
    ids = data.keys.node_names(ntype)[0]
    return ids if mask is None else ids[_mask(data.node_features, f"{ntype}/{mask}")]


def width_of(data: PartitionData, name: str, ntype: str | None = None) -> int:
    """Numbers in a row of a feature of nodes, the same on all ranks."""
    return math.prod(_feature(data, name, ntype).shape[1:])


def classes_of(data: PartitionData, name: str, ntype: str | None = None) -> int:
    """Of this part's labels: one more than the largest, or the columns of a matrix."""
    labels = _feature(data, name, ntype)
    if labels.dim() > 1 and labels.shape[1] > 1:
        return labels.shape[1]
    return int(labels.nan_to_num(-1).max()) + 1 if len(labels) else 0


def _feature(data: PartitionData, name: str, ntype: str | None) -> Tensor:
    prefix, features = f"{_ntype(data, ntype)}/", data.node_features
    if prefix + name not in features:
        there = sorted(key.removeprefix(prefix) for key in features if key.startswith(prefix))
        raise ValueError(f"name: got {name!r}, expected one of {', '.join(there)}")
    return features[prefix + name]


def _ntype(data: PartitionData, ntype: str | None) -> str:
    if ntype is None and len(data.book.ntypes) > 1:
        raise ValueError(f"ntype: got none, expected one of {data.book.ntypes}")
    ntype = ntype or data.book.ntypes[0]
    if ntype not in data.book.ntypes:
        raise ValueError(f"ntype: got {ntype!r}, expected one of {data.book.ntypes}")
    return ntype


def chosen_ends(
    data: PartitionData,
    swap: Swap,
    etype: str | EType | None = None,
    mask: str | None = None,
) -> Tensor:
    """int64 [s, 2] the same of both ends of this part's edges of a relation; collective."""
    book = data.book
    if etype is None and len(book.canonical_etypes) > 1:
        raise ValueError(f"etype: got none, expected one of {book.canonical_etypes}")
    one = book.canonical_etypes[0] if etype is None else book.canonical(_tuple(etype))
    src, dst = source_ids(data, one), target_ids(data, one)
    if mask is not None:
        chosen = _mask(data.edge_features, f"{':'.join(one)}/{mask}")
        src, dst = src[chosen], dst[chosen]
    ends = []
    for ntype, ids in ((one[0], src), (one[2], dst)):
        bounds = node_ids(book, ntype).bounds
        ends.append(look_up(swap, ids, bounds, data.keys.node_names(ntype)[0]))
    return torch.stack(ends, dim=1)


def _tuple(etype: str | EType | list[str]) -> str | EType:
    return tuple(etype) if isinstance(etype, list) else etype  # type: ignore[return-value]


def _mask(store: object, name: str) -> Tensor:
    if name not in store:  # type: ignore[operator]
        there = [key for key in store if key.endswith("_mask")]  # type: ignore[attr-defined]
        raise ValueError(f"mask: got {name!r}, expected one of {there or 'none'}")
    mask = store[name]  # type: ignore[index]
    if mask.dtype != torch.bool or mask.dim() != 1:
        raise ValueError(f"mask: {name!r} is {mask.dtype} {list(mask.shape)}, expected bool")
    return mask
