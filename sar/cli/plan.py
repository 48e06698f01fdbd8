"""`sar plan`: memory, traffic and time of a run, before there are machines to run it on."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from sar.cli.inputs import check_columns
from sar.cli.inspect import aligned
from sar.cli.options import parse_rate
from sar.cli.pictures import check_pictures
from sar.cli.plan_turns import plan_turns
from sar.config import parse_bytes
from sar.models import try_own
from sar.options import closest, take
from sar.partition.arrays import ETYPE_HOMO
from sar.pictures import Plan, draw_plan, save
from sar.pictures.plan import SIZE
from sar.plan import (
    CLASSES,
    KNOWN,
    Costs,
    GraphStatistics,
    Hardware,
    Prediction,
    Work,
    estimate,
    from_book,
    from_parts,
    measure_costs,
    numbers,
    other_number,
    predict,
    settings_of,
)
from sar.plan.types import Types
from sar.run_options import ModelOptions


def run(args: argparse.Namespace) -> int:
    model = take(ModelOptions, args)
    hardware = _hardware(args)
    check_pictures(args)
    graph = _graph(args)
    width = _width(args, graph, model)
    _check_columns(model, graph)
    classes = args.classes or graph.classes or CLASSES
    more = args.constant_inputs, graph.columns, graph.types
    if args.out_of_core:
        return plan_turns(args, graph, Work(model, width, classes, "keep", *more))
    works = [Work(model, width, classes, name, *more) for name in dict.fromkeys(args.activations)]
    costs = {one.activations: measure_costs(one, args.threads) for one in works}
    settings = settings_of(graph.size, list(costs))
    found = [predict(graph, costs[one.activations], one, hardware) for one in settings]
    if args.plot is not None:
        model_words = f"{model.layers}-layer {model.model}, hidden {model.hidden}"
        name = f"{graph.name}, {model_words}"
        draw(Path(args.plot), args.dark, name, graph, costs, hardware)
    if args.json:
        content = {
            "graph": graph.name,
            "ranks": graph.size,
            "estimated": graph.estimated,
            "costs": {name: asdict(one) for name, one in costs.items()},
            "settings": [asdict(one) for one in found],
        }
        print(json.dumps(content, indent=2))
    else:
        print("\n".join(render(graph, found)))
    return 0


def _width(args: argparse.Namespace, graph: GraphStatistics, model: ModelOptions) -> int:
    """Columns of the input; raises for models and graphs that do not fit."""
    if graph.types is None and model.model == "rgcn":
        raise ValueError("--model: got rgcn, which is for several node types")
    if graph.types is not None and args.feature_width:
        raise ValueError("--feature-width: got one for several node types, expected none")
    width = args.feature_width or graph.features
    if not width:
        raise ValueError("--feature-width: got nothing and the partitions hold no 'feat'")
    return int(width)


def _check_columns(model: ModelOptions, graph: GraphStatistics) -> None:
    """Raise now for columns of edges that the partitions do not hold."""
    if model.is_own:
        types, stored = graph.types or Types.of_one(graph.features), [*graph.columns]
        seen = SimpleNamespace(ntypes=[*types.nodes], canonical_etypes=types.relations)
        featured = [] if types.is_homogeneous else [*types.features]
        if types.is_homogeneous:
            stored = [f"{':'.join(ETYPE_HOMO)}/{name}" for name in stored]
        made = try_own(model.model, model.args, seen, featured)
        check_columns(model, made, types.relations, stored)


def _graph(args: argparse.Namespace) -> GraphStatistics:
    is_parts = args.graph.endswith(".json") or os.path.isdir(args.graph)
    if args.out_of_core:
        if not is_parts:
            raise ValueError(f"graph: got {args.graph!r} and --out-of-core, expected PARTS.json")
        return from_book(args.graph, target_type=args.target_type)
    if is_parts:
        graph = from_parts(args.graph, target_type=args.target_type)
        expected = graph.size if args.hosts is None else args.hosts * args.ranks_per_host
        if expected != graph.size:
            raise ValueError(
                f"--hosts: got {args.hosts} hosts of {args.ranks_per_host} ranks for a graph of "
                f"{graph.size} parts, expected as many ranks as parts"
            )
        return graph
    if args.graph not in KNOWN:
        known = f"{', '.join(KNOWN)}{closest(args.graph, KNOWN)}"
        raise ValueError(f"graph: got {args.graph!r}, expected PARTS.json or one of {known}")
    if args.hosts is None:
        raise ValueError("--hosts: got nothing, expected the number of hosts for a known graph")
    data = KNOWN[args.graph]
    both = data.directed and not args.as_stored
    return estimate(
        args.graph,
        data.nodes,
        data.edges * (2 if both else 1),
        args.hosts * args.ranks_per_host,
        features=data.features,
        classes=data.classes,
        halo_share=args.halo_share,
    )


def _hardware(args: argparse.Namespace) -> Hardware:
    memory = None if args.memory is None else parse_bytes(args.memory, "--memory")
    ranks = args.ranks_per_host
    cores = args.cores or ranks * args.threads
    return Hardware(parse_rate(args.bandwidth), memory, ranks, max(1, cores // args.threads))


def render(graph: GraphStatistics, found: list[Prediction]) -> list[str]:
    nodes, edges = (sum(getattr(rank, name) for rank in graph.ranks) for name in ("nodes", "edges"))
    largest = max(graph.ranks, key=lambda rank: rank.nodes)
    lines = [
        f"graph   {graph.name}, {nodes:,} nodes, {edges:,} edges, {graph.size} ranks",
        f"rank    {largest.nodes:,} nodes, {int(largest.pulled.received.sum()):,} halo rows"
        + (" (estimated)" if graph.estimated else ""),
        "",
    ]
    rows = [["setting", "memory a rank", "sent an epoch", "compute", "wire", "epoch", "fits"]]
    for one in found:
        fits = "-" if one.fits is None else "yes" if one.fits else "no"
        rows.append(
            [one.setting.name, f"{one.memory_bytes / 2**30:.2f} GiB"]
            + [f"{one.sent_bytes / 1e9:.3f} GB"]
            + [f"{s:.3g} s" for s in (one.compute_seconds, one.wire_seconds, one.seconds)]
            + [fits]
        )
    lines += aligned(rows)
    fitting = [one for one in found if one.fits]
    if fitting:
        best = min(fitting, key=lambda one: one.seconds)
        lines += ["", f"fits: {best.setting.name}, {best.seconds:.3g} s an epoch"]
    elif any(one.fits is False for one in found):
        lines += ["", "no setting fits: take more hosts, or hosts with more memory"]
    return lines


def draw(
    path: Path, dark: bool, name: str,
    graph: GraphStatistics, costs: Mapping[str, Costs], hardware: Hardware,
) -> None:  # fmt: skip
    """Draw predictions for the ranks of ``graph``, and for an eighth to four times as many."""
    asked = graph.size
    least = min(asked, hardware.ranks_per_host)
    sizes = [number for number in numbers(asked) if number >= least]
    memory: dict[str, list[tuple[int, float]]] = {}
    seconds: dict[str, list[tuple[int, float]]] = {}
    for number in sizes:
        sized = graph if number == asked else other_number(graph, number)
        for setting in settings_of(max(3, number), list(costs)):  # one-shot is a line of its own
            setting = replace(setting, rounds=min(setting.rounds, max(1, number - 1)))
            found = predict(sized, costs[setting.activations], setting, hardware)
            memory.setdefault(setting.name, []).append((number, found.memory_bytes))
            seconds.setdefault(setting.name, []).append((number, found.seconds))
    ranks = "1 rank" if asked == 1 else f"{asked} ranks"
    note = f"dotted: {ranks}" if graph.estimated else f"dotted: {ranks}, counted; others: estimates"
    limit = None if hardware.memory is None else hardware.memory / hardware.ranks_per_host
    plan = Plan(name, note, memory, seconds, asked, limit)
    save(path, partial(draw_plan, plan), SIZE, dark)
