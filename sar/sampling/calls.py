"""Functions of the user's that loaders call, and what these have to give back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from sar.partition.book import EType, PartitionBook
from sar.sampling.sampler import Sample
from sar.sampling.structure import edge_ids, node_ids


def transformed(transform: Callable[[Any], Any] | None, batch: Any) -> Any:
    """What is given in place of a batch."""
    if transform is None:
        return batch
    made = transform(batch)
    if made is None:
        raise TypeError("transform: returned None, expected the batch, or what is given instead")
    return made


def filtered(call: Callable[[Sample], Any], sample: Sample) -> Sample:
    """What is taken in place of a sample.

    Raises ``TypeError`` and ``ValueError`` for what is no sample.
    """
    made = call(sample)
    if not isinstance(made, Sample):
        got = "None" if made is None else type(made).__name__
        raise TypeError(f"filter: returned {got}, expected the Sample that it was called with")
    made.starts = [{} for _ in made.hops]  # of edges that may have gone
    for ntype, ids in made.nodes.items():
        if len(ids) != sum(made.num_nodes[ntype]):
            wanted = sum(made.num_nodes[ntype])
            raise ValueError(f"filter: got {len(ids)} nodes of {ntype!r}, expected the {wanted}")
    for hop in made.hops:
        for etype, (src, dst, eid) in hop.items():
            if not len(src) == len(dst) == len(eid):
                sizes = len(src), len(dst), len(eid)
                raise ValueError(f"filter: got {sizes} ends and ids of {etype}, expected as many")
            for ntype, ends in ((etype[0], src), (etype[2], dst)):
                _check_range("an end", etype, ends, len(made.nodes[ntype]))
    return made


def check_ids(book: PartitionBook, ids: Mapping[str | EType, Tensor]) -> None:
    """Raise ``ValueError`` for ids of a filter's that nodes or edges do not have: rows would be
    read by them."""
    for kind, one in ids.items():
        known = node_ids(book, kind) if isinstance(kind, str) else edge_ids(book, kind)
        _check_range("id", kind, one, known.total)


def _check_range(what: str, kind: object, ids: Tensor, count: int) -> None:
    wrong = (ids < 0) | (ids >= count)
    if wrong.any():
        got = int(ids[wrong][0])
        raise ValueError(f"filter: got {what} {got} of {kind!r}, expected 0 to {count - 1}")
