"""What was drawn, as a message."""

from __future__ import annotations

from typing import Any

from sar.sampling.batch import Drawn, Types
from sar.sampling.link_inputs import Links
from sar.sampling.sampler import Edges, Sample


def as_message(drawn: Drawn) -> dict[str, Any]:
    """Tensors and plain data for :func:`sar.sampling.messages.packed`."""
    sample, told = drawn.sample, dict(drawn.told)
    links = told.pop("links", None)
    hops = [{e: list(edges) for e, edges in hop.items()} for hop in sample.hops]
    return {
        "sample": [sample.nodes, sample.trees, hops, sample.num_nodes, sample.seeds, sample.starts],
        "rows": drawn.rows,
        "input_type": drawn.input_type,
        "step": drawn.step,
        "told": told,
        "links": None if links is None else list(links),
        "is_by_hop": drawn.is_by_hop,
    }


def from_message(message: dict[str, Any], types: Types) -> Drawn:
    """What :func:`as_message` was given, of a graph with these types."""
    nodes, trees, hops, num_nodes, seeds, starts = message["sample"]
    hops = [{e: Edges(*edges) for e, edges in hop.items()} for hop in hops]
    sample = Sample(nodes, trees, hops, num_nodes, seeds, starts)
    told = dict(message["told"])
    if message["links"] is not None:
        told["links"] = Links(*message["links"])
    kind = message["input_type"]
    input_type = tuple(kind) if isinstance(kind, list) else kind
    return Drawn(
        types, sample, message["rows"], input_type, message["step"], told, message["is_by_hop"]
    )
