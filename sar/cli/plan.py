"""`sar plan`: memory, traffic and time of a run, before there are machines to run it on."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from dataclasses import asdict
from typing import Any

from sar.cli.inspect import aligned
from sar.cli.pictures import add_plot_arguments, check_plot
from sar.cli.plan_picture import draw, settings_of
from sar.cli.train import add_model_arguments, model_options
from sar.config import CONSTANT_INPUTS, parse_bytes
from sar.memory.activations import ACTIVATIONS
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

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "plan",
        help="predict memory, traffic and time of a run",
        description="Predict peak memory, bytes an epoch and time of an epoch from counted rows, "
        "and from costs of the model that are measured on small graphs on this machine.",
    )
    parser.add_argument(
        "graph", metavar="PARTS.json|NAME", help=f"partitions, or one of {', '.join(KNOWN)}"
    )
    model = parser.add_argument_group("model")
    add_model_arguments(model)
    model.add_argument("--feature-width", type=int, metavar="F", help="default: the graph's")
    model.add_argument("--classes", type=int, metavar="C", help="default: the graph's, or 16")
    model.add_argument(
        "--activations", nargs="+", choices=ACTIVATIONS, default=["keep", "recompute"],
        metavar="HOW", help=f"compared, of {', '.join(ACTIVATIONS)}; default keep recompute",
    )  # fmt: skip
    model.add_argument(
        "--constant-inputs", choices=CONSTANT_INPUTS, default="memory",
        help="as of sar train, default memory",
    )  # fmt: skip
    machines = parser.add_argument_group("machines")
    machines.add_argument("--hosts", type=int, metavar="N", help="default: one for each part")
    machines.add_argument("--ranks-per-host", type=int, default=1, metavar="R", help="default 1")
    machines.add_argument("--cores", type=int, metavar="C", help="of a host, default one a rank")
    machines.add_argument("--threads", type=int, default=1, help="of a rank, default 1")
    machines.add_argument(
        "--bandwidth", default="25Gbit", metavar="RATE", help="of a host, default 25Gbit"
    )
    machines.add_argument("--memory", metavar="SIZE", help="of a host, like 256GiB")
    graph = parser.add_argument_group("graph that is not cut yet")
    graph.add_argument(
        "--halo-share", type=float, metavar="X",
        help="rows a rank receives over rows it owns, default what a random cut gives",
    )  # fmt: skip
    graph.add_argument(
        "--as-stored", action="store_true", help="do not add the reverse of every directed edge"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_plot_arguments(parser, "memory and time against the number of ranks")
    return parser


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
        draw(args.plot, args.dark, f"{graph.name}, {model_words}", graph, costs, hardware)
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
    for name in ("hosts", "ranks_per_host", "cores", "threads", "feature_width", "classes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option}: got {value}, expected at least 1")
    if args.halo_share is not None and not args.halo_share >= 0:
        raise ValueError(f"--halo-share: got {args.halo_share}, expected 0 or more")
    memory = None if args.memory is None else parse_bytes(args.memory, "--memory")
    ranks = args.ranks_per_host
    cores = args.cores or ranks * args.threads
    return Hardware(parse_rate(args.bandwidth), memory, ranks, max(1, cores // args.threads))


def parse_rate(text: str) -> float:
    """Bits a second of ``"25Gbit"`` or ``"100 Mbit"``; raises ``ValueError``."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?bit)(?:/s)?\s*", text.lower())
    if match is None or not float(match.group(1)) > 0:
        raise ValueError(f"--bandwidth: got {text!r}, expected a rate like '25Gbit' or '100Mbit'")
    return float(match.group(1)) * _RATES[match.group(2)]


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
