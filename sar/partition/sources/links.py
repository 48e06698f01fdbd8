"""OGB's link-property data sets: a graph of all true edges, and which of them are held out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sar.errors import SarError
from sar.partition.arrays import CanonicalEtype, GraphArrays
from sar.partition.sources.datasets import from_dgl, ogb_loader

_HELD_OUT = {"valid": "val_mask", "test": "test_mask"}  # OGB's splits, and ours
_MASKS = ("train_mask", *_HELD_OUT.values())
_RELATION = "etype"  # the column of relations' numbers, as of an `.npz` of triples
_Ends = tuple[Tensor, Tensor]


def load_ogb_links(name: str, root: str | None = None) -> GraphArrays:
    """An OGB link-property data set (`ogbl-collab`, `ogbl-wikikg2` ...) with its split as masks.

    Edges of training come first, as OGB's graph has them; then those of `valid` and of `test`: each
    edge has `train_mask`, `val_mask` and `test_mask`. Where the graph has its edges in both
    directions those that are held out come in both, too, each beside the other. Columns of edges
    that the split has (`weight`, `year`) are kept; what it does not say of edges that are held out
    is 0. Relations of knowledge graphs are numbers in `etype`; those of `ogbl-biokg` are edge types
    beside. Negatives that the split names, of any part, are left out with one warning: they are no
    edges (`NegativeSampler` draws some).

    root: OGB's folder, "dataset" below the working directory by default, as in OGB. Raises
    MissingDependencyError without ogb, SarError when it cannot be downloaded or contradicts itself.
    """
    with ogb_loader("linkproppred", name, root) as (loader, root):
        dataset = loader.DglLinkPropPredDataset(name=name, root=root)
        split, graph = dataset.get_edge_split(), dataset[0]
    try:
        return _with_held_out(from_dgl(graph, name), split)
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
        raise SarError(
            f"data set {name!r} in {root}: graph and split contradict each other: {error!r}"
        ) from error


def _with_held_out(graph: GraphArrays, split: Mapping[str, Mapping[str, Any]]) -> GraphArrays:
    """The graph of training with the edges of `valid` and `test` behind, and masks.

    split: as of OGB's `get_edge_split()`: by part, `edge` [n, 2], or `source_node` and
        `target_node` [n], or `head`, `relation` and `tail` [n] (with `head_type` and `tail_type`
        where there are several types), and columns.
    Raises ValueError, KeyError, IndexError, TypeError for what contradicts.
    """
    _warn_of_negatives(graph.name, split)
    relations = _name_relations(graph)
    both = _is_both_ways(graph, split["train"])
    for etype, columns in graph.edge_data.items():
        count = len(graph.edges[etype][0])
        columns |= {mask: torch.full((count,), mask == _MASKS[0]) for mask in _MASKS}
    for part, mask in _HELD_OUT.items():
        for etype, ends, columns in _edges_of(graph, split[part], relations):
            if both:
                ends = _with_turned(ends)
                columns = {key: one.repeat_interleave(2, 0) for key, one in columns.items()}
            _append(graph, etype, ends, columns, mask)
    return graph.validate()


def _warn_of_negatives(name: str, split: Mapping[str, Mapping[str, Any]]) -> None:
    left = [f"{part}.{key}" for part, content in split.items() for key in content if "neg" in key]
    if left:
        warnings.warn(
            f"data set {name!r}: negatives are no edges and left out: {', '.join(left)}",
            stacklevel=3,
        )


def _name_relations(graph: GraphArrays) -> dict[tuple[int, str, str], CanonicalEtype]:
    """Renames OGB's column `reltype` [E, 1]; the edge type of a relation's number and its ends'
    types, for graphs of several edge types."""
    found: dict[tuple[int, str, str], CanonicalEtype] = {}
    for etype, columns in graph.edge_data.items():
        for key, column in columns.items():  # a column of one is a vector
            if column.dim() == 2 and column.shape[1] == 1:
                columns[key] = column[:, 0].contiguous()
        if "reltype" in columns:
            columns[_RELATION] = columns.pop("reltype")
            for number in columns[_RELATION].unique().tolist():
                found[int(number), etype[0], etype[2]] = etype
    return {} if len(graph.edges) == 1 else found


def _is_both_ways(graph: GraphArrays, train: Mapping[str, Any]) -> bool:
    """Whether the graph has each edge of training in both directions. Raises ValueError."""
    key = next(key for key in ("edge", "source_node", "head") if key in train)
    told, total = len(train[key]), graph.total_edges
    if total not in (told, 2 * told):
        raise ValueError(
            f"the graph has {total:,} edges, but training {told:,}, expected as many or half"
        )
    return total == 2 * told > 0


def _edges_of(
    graph: GraphArrays,
    part: Mapping[str, Any],
    relations: Mapping[tuple[int, str, str], CanonicalEtype],
) -> list[tuple[CanonicalEtype, _Ends, dict[str, Tensor]]]:
    """By edge type, ends and columns of what is held out."""
    if "head" not in part:
        (etype,) = graph.edges
        pair = (part["source_node"], part["target_node"]) if "edge" not in part else None
        src, dst = (_ids(one) for one in (pair or torch.as_tensor(part["edge"]).T))
        known = graph.edge_data[etype]
        columns = {key: torch.as_tensor(part[key]) for key in known if key in part}
        return [(etype, (src, dst), columns)]
    head, tail, number = (_ids(part[key]) for key in ("head", "tail", "relation"))
    if not relations:
        (etype,) = graph.edges
        return [(etype, (head, tail), {_RELATION: number})]
    kinds = list(zip(number.tolist(), part["head_type"], part["tail_type"], strict=True))
    ordered = {kind: position for position, kind in enumerate(dict.fromkeys(kinds))}
    which, found = torch.tensor([ordered[kind] for kind in kinds], dtype=torch.int64), []
    for kind, position in ordered.items():
        rows = (which == position).nonzero()[:, 0]
        found.append((relations[kind], (head[rows], tail[rows]), {_RELATION: number[rows]}))
    return found


def _ids(values: Any) -> Tensor:
    ids = torch.as_tensor(values)
    if ids.dtype.is_floating_point or ids.dim() != 1:
        raise ValueError(f"got ids of {ids.dtype} {tuple(ids.shape)}, expected one integer each")
    return ids.long()


def _with_turned(ends: _Ends) -> _Ends:
    """Each edge, and the one that runs the other way beside it."""
    src, dst = ends
    return torch.stack([src, dst], 1).reshape(-1), torch.stack([dst, src], 1).reshape(-1)


def _append(
    graph: GraphArrays, etype: CanonicalEtype, ends: _Ends, columns: dict[str, Tensor], mask: str
) -> None:
    """More edges of a type; what is not said of them is 0."""
    count = len(ends[0])
    (src, dst), known = graph.edges[etype], graph.edge_data[etype]
    graph.edges[etype] = torch.cat([src, ends[0]]), torch.cat([dst, ends[1]])
    for key, column in known.items():
        rows = column.new_zeros(count, *column.shape[1:])
        if key == mask:
            rows.fill_(True)
        elif key in columns:
            rows.copy_(columns[key].reshape(rows.shape))
        known[key] = torch.cat([column, rows])
