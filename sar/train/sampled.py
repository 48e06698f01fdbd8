"""Training on mini-batches: what the trainer goes through in place of the whole graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sar import registry
from sar.comm import Group
from sar.errors import NotSupportedError
from sar.models import Call
from sar.partition.load import PartitionData
from sar.sampling import Edges, NeighborLoader, Sample
from sar.train.data import NodeData
from sar.train.options import ModelOptions, SampledOptions

_INPUT = "sampled_input"  # the name under which a loader finds what the trainer has read
_OWN = Call()


@dataclass(frozen=True)
class Batch:
    """A step of this rank.

    Attributes:
        given: what the model is called with in place of a graph: blocks, the input layer's first,
            or what else its front end makes.
        features: [n, F] of the input nodes; by node type where there are several types.
        labels: of the seeds.
    """

    given: Any
    features: Tensor | dict[str, Tensor]
    labels: Tensor


class Batches:
    """The training nodes of this rank in mini-batches; made collectively.

    Args:
        partition: this rank's part.
        data: as the trainer has it.
        model: the model, which may want self loops.
        call: how it is called.

    Raises ``ValueError`` and ``NotSupportedError`` on every rank for a model that cannot be
    trained so.
    """

    def __init__(
        self,
        partition: PartitionData,
        data: NodeData,
        model: ModelOptions,
        options: SampledOptions,
        seed: int,
        group: Group,
        call: Call = _OWN,
    ) -> None:
        check_model(model, options)
        ntype = data.ntype
        start = int(partition.book.node_ranges[ntype][partition.part_id][0])
        self.options, self._data, rows = options, data, data.rows["train"]
        self._front_end = registry.front_end(call.front_end)
        given = data.features if isinstance(data.features, dict) else {ntype: data.features}
        for one, features in given.items():
            partition.node_features[f"{one}/{_INPUT}"] = features.cpu()
        fields: dict[Any, list[str]] = {one: [_INPUT] for one in given}
        if call.columns:
            fields[partition.book.canonical_etypes[0]] = call.columns
        self.loader = NeighborLoader(
            partition, list(options.fanouts), (ntype, rows.cpu() + start),
            batch_size=options.batch_size, shuffle=True, as_=call.front_end, seed=seed,
            group=group, fields=fields,
            filter=with_loops if model.model == "gat" else None,
        )  # fmt: skip

    def __len__(self) -> int:
        """Steps of an epoch, the same on all ranks."""
        return len(self.loader)

    def epoch(self, number: int, first: int) -> Iterator[Batch]:
        """The batches of an epoch from a step on, the same in every run."""
        rows, labels, ntype = self._data.rows["train"], self._data.labels, self._data.ntype
        device = rows.device
        if labels is None:
            raise ValueError("data: got no labels, expected some for training")
        for batch in self.loader.iterate(number, first):
            given, found, chosen = self._front_end.read_batch(batch, ntype, _INPUT, device)
            features = found if isinstance(self._data.features, dict) else found[ntype]
            yield Batch(given, features, labels[rows[chosen.to(device)]])

    def close(self) -> None:
        """End the loader."""
        self.loader.close()


def check_model(model: ModelOptions, options: SampledOptions) -> None:
    """Raise for a model that mini-batches do not train."""
    if not model.is_own and len(options.fanouts) != model.layers:
        raise ValueError(
            f"fanouts: got {len(options.fanouts)}, expected one for each of {model.layers} layers"
        )
    if model.model == "gcn":
        raise NotSupportedError(
            "model: got 'gcn', which normalizes by degrees of the whole graph, and mini-batches "
            "do not hold them; expected sage, gin or gat"
        )


def check_takes_blocks(model: nn.Module, options: SampledOptions, call: Call = _OWN) -> None:
    """Raise ``ValueError`` for a model that does not say that it takes so many blocks."""
    count = getattr(model, "num_blocks", None)
    if registry.front_end(call.front_end).BLOCKS and count != len(options.fanouts):
        raise ValueError(
            f"fanouts: got {len(options.fanouts)}, expected one for each graph layer of "
            f"{type(model).__name__}, whose num_blocks is {count}; a model that also takes a list "
            "of blocks in place of the graph says how many by self.num_blocks"
        )


def with_loops(sample: Sample) -> Sample:
    """One self loop at each node that draws, and no other; a loop's id is -1."""
    for hop, edges in enumerate(sample.hops):
        for etype, (src, dst, eid) in edges.items():
            count = sum(sample.num_nodes[etype[2]][: hop + 1])
            loops, kept = torch.arange(count), src != dst
            edges[etype] = Edges(
                torch.cat([src[kept], loops]),
                torch.cat([dst[kept], loops]),
                torch.cat([eid[kept], torch.full_like(loops, -1)]),
            )
    return sample


@dataclass
class MeanLoss:
    """Of the losses of an epoch's steps, each seed counting alike."""

    loss: float = 0.0
    seeds: int = 0

    def add(self, loss: float, seeds: int) -> None:
        self.loss += loss * seeds
        self.seeds += seeds

    @property
    def value(self) -> float:
        return self.loss / max(1, self.seeds)
