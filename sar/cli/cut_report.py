"""The report of a cut, lines of text: sizes of the parts, the price of balance, a prediction."""

from __future__ import annotations

import argparse

import numpy as np

from sar.partition.arrays import GraphArrays
from sar.partition.quality import CutQuality, balance
from sar.plan import Predicted, from_quality, predict_training
from sar.run_options import ModelOptions

_INDENT = 9  # columns of a label


def model_of(args: argparse.Namespace, default: str = "sage") -> ModelOptions | None:
    """The model to predict, or ``None`` where no option asks for it."""
    given = {name: getattr(args, name) for name in ("model", "layers", "hidden")}
    given = {name: value for name, value in given.items() if value is not None}
    return ModelOptions(**{"model": default} | given) if given else None


def report_lines(quality: CutQuality, before: CutQuality | None = None) -> list[str]:
    """The graph, the cut, and the spread of each kind of size over parts. ``before`` is the cut
    from which this one was refined for balance: a line tells what balance costs."""
    edges, cut = int(quality.edges.sum()), int(quality.cut_edges.sum())
    share = f" ({100 * quality.cut_share:.1f} %)" if edges else ""
    kinds = f"{len(quality.typed_nodes)} node and {quality.num_etypes} edge types"
    lines = [
        f"graph    {quality.graph_name}: {int(quality.nodes.sum()):,} nodes, {edges:,} edges, "
        f"{kinds}",
        f"cut      {cut:,} edges{share} run between {quality.num_parts} partitions",
        f"nodes    {spread(quality.nodes)}",
        f"edges    {spread(quality.edges)}",
        f"halo     {spread(quality.halo)}",
        f"boundary {spread(quality.boundary)}",
    ]
    if quality.training is not None:
        lines.append(f"training {spread(quality.training)}")
    if before is not None:
        lines.append(f"balance  {_price(quality, before)}")
    empty = int((quality.nodes == 0).sum())
    if empty:
        lines.append(f"empty    {empty:,} of {quality.num_parts:,} partitions have no node")
    return lines


def spread(counts: np.ndarray) -> str:
    low, high = int(counts.min()), int(counts.max())
    return f"{low:,} to {high:,} a partition, largest / mean {balance(counts):.3f}"


def _price(quality: CutQuality, before: CutQuality) -> str:
    rows, old = int(quality.halo.sum()), int(before.halo.sum())
    share = f" ({100 * (rows - old) / old:+.1f} %)" if old else ""
    verb = "costs" if rows >= old else "saves"
    changes = ", ".join(
        f"{title} {was:.2f} to {now:.2f}"
        for title, was, now in (
            ("nodes", before.node_balance, quality.node_balance),
            ("edges", before.edge_balance, quality.edge_balance),
            ("halo", before.halo_balance, quality.halo_balance),
        )
    )
    return f"{verb} {abs(rows - old):,} halo rows{share}; largest / mean: {changes}"


def predict_cut(
    graph: GraphArrays, quality: CutQuality, model: ModelOptions | None = None
) -> Predicted | None:
    """Memory and traffic of training on a new cut, by default of GraphSAGE with 3 layers of width
    256; ``None`` where the built-in models do not train on it: several types, or no features."""
    if not graph.is_homogeneous:
        return None
    (data,) = [graph.node_data.get(ntype, {}) for ntype in graph.num_nodes]
    if "feat" not in data or not graph.total_nodes:
        return None
    width = int(np.prod(data["feat"].shape[1:]))
    return predict_training(from_quality(quality, width), model or ModelOptions())


def prediction_lines(found: Predicted, indent: int = _INDENT) -> list[str]:
    model, widths = found.model, found.features
    width = " and ".join(map(str, widths.values() if isinstance(widths, dict) else [widths]))
    what = (
        f"{model.layers}-layer {model.model}, hidden {model.hidden}, {width} features, "
        f"{found.classes} classes"
    )
    memory = _scaled(found.memory_bytes, 2**30, "GiB")
    sent = _scaled(found.sent_bytes, 1e6, "MB")
    return [
        f"{'memory':<{indent}}{memory} a rank (predicted: {what})",
        f"{'traffic':<{indent}}{sent} sent by a rank in an epoch",
    ]


def _scaled(values: list[float], unit: float, name: str) -> str:
    low, high = min(values) / unit, max(values) / unit
    return f"{low:,.2f} to {high:,.2f} {name}"
