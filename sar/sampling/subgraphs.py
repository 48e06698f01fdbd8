"""Samples whose edges go both ways."""

from __future__ import annotations

import torch

from sar.errors import NotSupportedError
from sar.partition.book import EType
from sar.sampling.sampler import Edges, Sample


def bidirectional(sample: Sample) -> Sample:
    """The edges that were drawn and their reverses, each pair of nodes once, as one hop.

    A reverse that was drawn as well keeps its own id, another has that of its edge.
    """
    found = dict[EType, Edges]()
    for hop in sample.hops:
        for etype, edges in hop.items():
            before = found.get(etype)
            found[etype] = edges if before is None else Edges(*map(torch.cat, zip(before, edges)))
    for etype, (src, dst, eid) in found.items():
        if etype[0] != etype[2]:
            raise NotSupportedError(
                f"subgraph_type: got 'bidirectional' for {etype}; expected relations between nodes "
                "of one type"
            )
        ends = torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])
        pairs, which = ends.unique(dim=1, return_inverse=True)
        first = torch.full((pairs.shape[1],), ends.shape[1])
        first.scatter_reduce_(0, which, torch.arange(ends.shape[1]), "amin")
        found[etype] = Edges(pairs[0], pairs[1], torch.cat([eid, eid])[first])
    sample.hops, sample.starts = [found], [{}]
    return sample
