"""Sums over several relations: rows that more than one of them reads travel once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sar.graph import GraphView
from sar.ops import aggregate
from sar.stream.plan import agree_on_gradients

EType = tuple[str, str, str]


def sums_of_relations(
    graph: Any, h: Mapping[str, Tensor], weights: Mapping[EType, Tensor]
) -> Iterator[tuple[EType, Tensor]]:
    """For each relation the sums, by destination, of its source rows times its matrix; collective.

    A matrix that makes rows narrower is multiplied first. Else the relations out of one node type
    are summed together, where that spares messages.

    Args:
        h: [num_src, width] rows by node type.
        weights: [width, out] of each relation, in an order that all ranks share.
    """
    ready: dict[EType, Tensor] = {}
    for etype, weight in weights.items():
        x = h[etype[0]]
        if weight.shape[0] > weight.shape[1]:
            yield etype, graph.aggregate(x @ weight, etype=etype)
            continue
        if etype not in ready:
            ready |= _sums(graph, x, [e for e in weights if e[0] == etype[0]])
        yield etype, ready.pop(etype) @ weight


def _sums(graph: Any, x: Tensor, etypes: list[EType]) -> dict[EType, Tensor]:
    """[num_dst, width] of each relation."""
    if not isinstance(graph, GraphView) or graph.group.size == 1 or len(etypes) == 1:
        return {etype: graph.aggregate(x, etype=etype) for etype in etypes}
    joint = graph.joint_relation(etypes)
    agree_on_gradients(joint.plan, [("rows", x)], 1)
    rows = aggregate(joint, x, "sum", graph.policy)
    sizes = [graph.num_dst_nodes(etype[2]) for etype in etypes]
    return dict(zip(etypes, torch.split(rows, sizes), strict=True))
