"""`sar plan`: memory, traffic and time of a run, before there are machines to run it on."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from dataclasses import asdict
from pathlib import Path

from sar.cli.inspect import aligned
from sar.cli.models import model_options
from sar.cli.pictures import check_plot
from sar.cli.plan_picture import draw, settings_of
from sar.cli.values import parse_rate
from sar.config import parse_bytes
from sar.plan import (
    KNOWN,
    GraphStatistics,
    Hardware,
    Prediction,
    Work,
    estimate,
    from_parts,
    measure_costs,
    predict,
)


def run(args: argparse.Namespace) -> int:
    """Print the table of settings, or a JSON of it."""
    model = model_options(args)
    hardware = _hardware(args)
    check_plot(args)
    graph = _graph(args)
    width = args.feature_width or graph.features
    if not width:
        raise ValueError("--feature-width: got nothing and the partitions hold no 'feat'")
    classes = args.classes or graph.classes or 16
    costs = {
        name: measure_costs(Work(model, width, classes, name, args.constant_inputs), args.threads)
        for name in dict.fromkeys(args.activations)
    }
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


def _graph(args: argparse.Namespace) -> GraphStatistics:
    if args.graph.endswith(".json") or os.path.isdir(args.graph):
        graph = from_parts(args.graph)
        expected = graph.size if args.hosts is None else args.hosts * args.ranks_per_host
        if expected != graph.size:
            raise ValueError(
                f"--hosts: got {args.hosts} hosts of {args.ranks_per_host} ranks for a graph of "
                f"{graph.size} parts, expected as many ranks as parts"
            )
        return graph
    if args.graph not in KNOWN:
        near = difflib.get_close_matches(args.graph, KNOWN, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"graph: got {args.graph!r}, expected PARTS.json or one of {', '.join(KNOWN)}{hint}"
        )
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
    """The prediction as lines of text."""
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
