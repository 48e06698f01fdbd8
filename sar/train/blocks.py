"""Only rows that reach the loss: whether training runs on blocks, and what it needs for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sar._private import NormBase
from sar.comm import Group
from sar.graph import GraphView
from sar.graph.layer_blocks import plan_blocks
from sar.models import Call
from sar.nn import DistributedBN1D
from sar.train.data import NodeData

LEAST_SAVED = 0.2


@dataclass
class TrainingBlocks:
    """The blocks of the training rows, one a layer, and the features that the first one reads.

    Attributes:
        saved: share of the whole graph's work that they leave out.
    """

    graphs: list[GraphView]
    features: Tensor
    saved: float


def training_blocks(
    model: nn.Module, graph: Any, data: NodeData, mode: str, group: Group, call: Call
) -> tuple[TrainingBlocks | None, str]:
    """Blocks to train on, or ``None`` for the whole graph, and why; collective.

    Args:
        call: how the model is called.
        mode: ``"off"``, ``"on"``, or ``"auto"``: when they save at least :data:`LEAST_SAVED`.

    Raises ``ValueError`` on every rank for ``"on"`` where the model or the graph does not allow it.
    """
    if mode == "off":
        return None, "off"
    reason = "the model gets columns of edges" if call.columns else _obstacle(model, graph, data)
    if reason is None:
        reason = _repeated(data, group)
    if reason is not None and mode == "on":
        raise ValueError(f"mfgs: got 'on', but {reason}")
    if reason is None and mode == "auto":
        reason = _dependence(model) or _too_many(data, graph, group)
    if reason is not None:
        return None, f"not used: {reason}"
    features = data.features
    if isinstance(features, dict):
        return None, "not used: features are of several types"
    plan = plan_blocks(graph, data.rows["train"], int(model.num_blocks))  # type: ignore[arg-type]
    told = f"save {100 * plan.saved:.0f} % of rows, edges and traffic"
    if mode == "auto" and plan.saved < LEAST_SAVED:
        return None, f"not used: they would {told}"
    graphs = plan.build()
    rows = next(iter(graphs[0]._store.src_rows.values()))
    read = features.index_select(0, rows.to(features.device))
    return TrainingBlocks(graphs, read, plan.saved), f"used: they {told}"


def _obstacle(model: nn.Module, graph: Any, data: NodeData) -> str | None:
    """Why training cannot run on blocks at all."""
    if not isinstance(getattr(model, "num_blocks", None), int):
        return "the model does not say by num_blocks that it takes a list of blocks"
    if not isinstance(graph, GraphView) or graph.is_block or not graph.is_homogeneous:
        return "the graph is not a whole one of one node type and one edge type"
    return None if "train" in data.rows else "there are no training nodes"


def _repeated(data: NodeData, group: Group) -> str | None:
    """A block has each row once."""
    rows = data.rows["train"]
    twice = torch.tensor(len(rows) - len(rows.unique()))
    return "a training node is listed twice" if group.all_reduce(twice, "max") else None


def _dependence(model: nn.Module) -> str | None:
    """Why blocks would give another result than the whole graph."""
    norms = (NormBase, DistributedBN1D)
    if any(isinstance(part, norms) for part in model.modules()):
        return "batch norm takes its statistics over all nodes"
    return None


def _too_many(data: NodeData, graph: GraphView, group: Group) -> str | None:
    """The last layer computes the training rows, each layer before at least those."""
    count = int(group.all_reduce(torch.tensor(len(data.rows["train"]))))
    share = count / max(1, graph.num_nodes_global())
    if 1 - share >= LEAST_SAVED:
        return None
    return f"{100 * share:.0f} % of the nodes are training nodes"
