"""Training on blocks in place of the whole graph: of all training rows, or of mini-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sar import registry
from sar._private import NormBase
from sar.comm import Group
from sar.errors import NotSupportedError
from sar.graph import GraphView
from sar.graph.layer_blocks import plan_blocks
from sar.models import Call
from sar.nn import DistributedBN1D
from sar.partition.load import PartitionData
from sar.sampling import Edges, NeighborLoader, Sample
from sar.train.data import NodeData
from sar.train.options import ModelOptions, SampledOptions

LEAST_SAVED = 0.2
_INPUT = "sampled_input"  # the name under which a loader finds what the trainer has read
_OWN = Call()


@dataclass
class TrainingBlocks:
    """The blocks of the training rows, one a layer, and the features that the first one reads.
    ``saved``: share of the whole graph's work that they leave out."""

    graphs: list[GraphView]
    features: Tensor
    saved: float


def training_blocks(
    model: nn.Module, graph: Any, data: NodeData, mode: str, group: Group, call: Call
) -> tuple[TrainingBlocks | None, str]:
    """Blocks to train on, or ``None`` for the whole graph, and why; collective. ``mode`` is
    ``"off"``, ``"on"``, or ``"auto"``: when they save at least :data:`LEAST_SAVED`. Raises
    ``ValueError`` on every rank for ``"on"`` where the model or the graph does not allow it."""
    if mode == "off":
        return None, "off"
    reason = _obstacle(model, graph, data, group, call)
    if reason is not None and mode == "on":
        raise ValueError(f"mfgs: got 'on', but {reason}")
    if reason is None and mode == "auto":
        reason = _disadvantage(model, graph, data, group)
    if reason is not None:
        return None, f"not used: {reason}"
    features = data.features
    if isinstance(features, dict):
        return None, "not used: features are of several types"
    least = LEAST_SAVED if mode == "auto" else 0.0
    plan = plan_blocks(graph, data.rows["train"], int(model.num_blocks), least)  # type: ignore[arg-type]
    told = f"{100 * plan.saved:.0f} % of rows, edges and traffic"
    if plan.saved < least:
        return None, f"not used: they would save at most {told}"
    graphs = plan.build()
    rows = next(iter(graphs[0]._store.src_rows.values()))
    read = features.index_select(0, rows.to(features.device))
    return TrainingBlocks(graphs, read, plan.saved), f"used: they save {told}"


def _obstacle(model: nn.Module, graph: Any, data: NodeData, group: Group, call: Call) -> str | None:
    """Why training cannot run on blocks at all."""
    if call.columns:
        return "the model gets columns of edges"
    if not isinstance(getattr(model, "num_blocks", None), int):
        return "the model does not say by num_blocks that it takes a list of blocks"
    if not isinstance(graph, GraphView) or graph.is_block or not graph.is_homogeneous:
        return "the graph is not a whole one of one node type and one edge type"
    if "train" not in data.rows:
        return "there are no training nodes"
    rows = data.rows["train"]  # a block has each once
    twice = torch.tensor(len(rows) - len(rows.unique()))
    return "a training node is listed twice" if group.all_reduce(twice, "max") else None


def _disadvantage(model: nn.Module, graph: Any, data: NodeData, group: Group) -> str | None:
    """Why blocks would give another result than the whole graph, or save too little."""
    if any(isinstance(part, (NormBase, DistributedBN1D)) for part in model.modules()):
        return "batch norm takes its statistics over all nodes"
    count = int(group.all_reduce(torch.tensor(len(data.rows["train"]))))
    share = count / max(1, graph.num_nodes_global())  # the last layer's; others compute more
    if 1 - share >= LEAST_SAVED:
        return None
    return f"{100 * share:.0f} % of the nodes are training nodes"


@dataclass(frozen=True)
class Batch:
    """A step of this rank: what the model is ``given`` in place of a graph (blocks, the input
    layer's first, or what else its front end makes), ``features`` [n, F] of the input nodes (by
    node type where there are several), and ``labels`` of the seeds."""

    given: Any
    features: Tensor | dict[str, Tensor]
    labels: Tensor


class Batches:
    """Mini-batches of this rank's training nodes; made collectively. ``columns``: of edges, by
    relation. Raises ``ValueError`` and ``NotSupportedError`` on every rank for a model that cannot
    be trained so."""

    def __init__(
        self,
        partition: PartitionData,
        data: NodeData,
        model: ModelOptions,
        options: SampledOptions,
        seed: int,
        group: Group,
        call: Call = _OWN,
        columns: Mapping[Any, list[str]] | None = None,
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
        fields |= columns or {}
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
        """The batches of epoch ``number`` from step ``first`` on, the same in every run."""
        rows, labels, ntype = self._data.rows["train"], self._data.labels, self._data.ntype
        device = rows.device
        if labels is None:
            raise ValueError("data: got no labels, expected some for training")
        for batch in self.loader.iterate(number, first):
            given, found, chosen = self._front_end.read_batch(batch, ntype, _INPUT, device)
            features = found if isinstance(self._data.features, dict) else found[ntype]
            yield Batch(given, features, labels[rows[chosen.to(device)]])

    def close(self) -> None:
        self.loader.close()


def check_model(model: ModelOptions, options: SampledOptions) -> None:
    """Raise for ``gcn``, and where ``fanouts`` are not as many as the model's layers."""
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
    """Raise ``ValueError`` for a model whose ``num_blocks`` is not the number of ``fanouts``."""
    count = getattr(model, "num_blocks", None)
    if registry.front_end(call.front_end).BLOCKS and count != len(options.fanouts):
        raise ValueError(
            f"fanouts: got {len(options.fanouts)}, expected one for each graph layer of "
            f"{type(model).__name__}, whose num_blocks is {count}; a model that also takes a list "
            "of blocks in place of the graph says how many by self.num_blocks"
        )


def with_loops(sample: Sample) -> Sample:
    """Replace self loops by one, of id -1, at each node that draws neighbors."""
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
    """Mean of the losses of an epoch's steps, each seed counting alike."""

    loss: float = 0.0
    seeds: int = 0

    def add(self, loss: float, seeds: int) -> None:
        self.loss += loss * seeds
        self.seeds += seeds

    @property
    def value(self) -> float:
        return self.loss / max(1, self.seeds)
