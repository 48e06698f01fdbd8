"""Command line: ``python -m benchmarks list`` and ``python -m benchmarks run NAME|GROUP``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from benchmarks import registry, report
from sar.options import POSITIVE


def positive(text: str) -> int:
    """As the package's own options are read."""
    try:
        return POSITIVE.read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name the benchmarks and their groups")
    run = commands.add_parser("run", help="measure; exit 1 when a figure misses its bound")
    run.add_argument("name", metavar="NAME|GROUP")
    run.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    run.add_argument("--sar-path", type=Path, metavar="CHECKOUT", help="IntelLabs SAR, beside")
    run.add_argument(
        "--sar-path-gat", type=Path, metavar="CHECKOUT", help="another one, for attention layers"
    )
    run.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="an earlier state of this library, beside"
    )
    run.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("SAR_DATA"),
        help="folder with cora.npz, cnr2000.npz ... (default: $SAR_DATA)",
    )
    run.add_argument("--cache", type=Path, default=registry.Options.cache, help="generated graphs")
    run.add_argument(
        "--ranks", type=positive, nargs="+", default=registry.Options.ranks, help="of `memory`"
    )
    run.add_argument("--repeats", type=positive, default=registry.Options.repeats, help="epochs")
    run.add_argument(
        "--nodes", type=positive, default=registry.Options.nodes, help="of `cut`'s largest graph"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 for a missed bound, 2 for a wrong argument."""
    args = parse(arguments)
    known = registry.load_all()
    if args.command == "list":
        report.print_list(list(known.values()))
        return 0
    try:
        chosen = registry.select(known, args.name)
        checkouts = {"--sar-path": args.sar_path, "--sar-path-gat": args.sar_path_gat}
        refuse_other_folders({**checkouts, "--before": args.before})
        if args.json is not None and not args.json.parent.is_dir():
            raise ValueError(f"--json: got {args.json}, expected a file in a folder that is there")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    options = registry.Options(
        sar_path=args.sar_path and args.sar_path.resolve(),
        sar_path_gat=args.sar_path_gat and args.sar_path_gat.resolve(),
        before=args.before and args.before.resolve(),
        data=args.data and Path(args.data),
        cache=args.cache,
        ranks=tuple(args.ranks),
        repeats=args.repeats,
        nodes=args.nodes,
    )
    return run(chosen, options, args.json)


def refuse_other_folders(checkouts: dict[str, Path | None]) -> None:
    """Raise ``ValueError`` for an option that names no checkout of a package `sar`."""
    for option, path in checkouts.items():
        if path is not None and not (path / "sar").is_dir():
            raise ValueError(f"{option}: {path} holds no folder 'sar', expected a checkout")


def run(chosen: list[registry.Benchmark], options: registry.Options, out: Path | None) -> int:
    """Measure the chosen benchmarks one after another, print each as it ends."""
    machine = report.machine()
    report.print_machine(machine)
    results = {}
    for item in chosen:
        begin = time.perf_counter()
        result = item.run(options)
        seconds = time.perf_counter() - begin
        report.print_report(item, result, seconds)
        results[item.name] = report.as_json(result, seconds)
    if out is not None:
        out.write_text(json.dumps({"machine": machine, "benchmarks": results}, indent=1))
    return 0 if all(entry["ok"] for entry in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
