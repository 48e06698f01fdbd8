"""`sar validate`: whether a model is the same on several ranks, before it is trained."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import sar
from sar import registry
from sar.graph import GraphView, graphs_among
from sar.models import ModelOptions, build_model, call_of, prepare_graph
from sar.models.build import find_maker
from sar.models.calling import GRAPHS
from sar.models.validation.calls import call_on, columns_by_type, front_end_of
from sar.options import take


def run(args: argparse.Namespace) -> int:
    options = take(ModelOptions, args)
    maker = find_maker(options.model) if options.is_own else None
    front_end = "sar" if maker is None else options.front_end or front_end_of(maker)
    own = GRAPHS if front_end == "sar" else front_end
    features = None if args.features == "feat" else args.features
    make = _Maker(options, own, features, args.labels)
    found = sar.validate(
        make,
        args.input,
        partial(_call, options, own, features),
        args.parts,
        prepare=True,
        front_end=front_end,
    )
    print(json.dumps(found.to_dict()) if args.json else found)
    return 0 if found.ok else 1


def _call(
    options: ModelOptions, front_end: str, features: str | None, model: nn.Module, graph: Any
) -> Any:
    said = options.call or options.edge_features or not options.is_own
    call = call_of(options, model) if said else None
    return call_on(model, prepare_graph(graph, options), front_end, features, call)


class _Maker:
    """Makes the model as `sar train` does; the first graph says how many classes there are."""

    def __init__(
        self, options: ModelOptions, front_end: str, features: str | None, labels: str
    ) -> None:
        self.options, self.front_end, self.features, self.labels = (
            options, front_end, features, labels
        )  # fmt: skip
        self.classes: tuple[int, str] | None = None

    def __call__(self, given: Any) -> nn.Module:
        front = registry.front_end(self.front_end)
        columns = front.node_columns(given)
        widths = {t: x.shape[1] for t, x in columns_by_type(front, given, self.features).items()}
        if self.classes is None:
            self.classes = _classes(
                columns, front.LABELS if self.labels == "label" else self.labels
            )
        number, ntype = self.classes
        graph = _whole(given)
        torch.manual_seed(0)
        in_feats: Any = widths[next(iter(widths))] if graph.is_homogeneous else widths
        return build_model(self.options, in_feats, number, graph=graph, target_type=ntype)


def _whole(given: Any) -> GraphView:
    """The graph of all relations."""
    found: Any = graphs_among([given])[0]
    return getattr(found, "whole", None) or found


def _classes(columns: dict[str, Any], labels: str) -> tuple[int, str]:
    """How many classes there are, and of which type the nodes are that have some."""
    for ntype, frame in columns.items():
        if labels in list(frame.keys()):
            values: Tensor = frame[labels]
            if values.dim() == 2 and values.shape[1] > 1:
                return values.shape[1], ntype
            return max(2, int(values.double().nan_to_num(-1).max()) + 1), ntype
    known = sorted({name for frame in columns.values() for name in frame.keys()})
    raise ValueError(f"labels: got {labels!r}, expected one of the columns {', '.join(known)}")
