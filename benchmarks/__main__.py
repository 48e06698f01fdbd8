"""Command line: ``python -m benchmarks list`` and ``python -m benchmarks run NAME|GROUP``."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from benchmarks import registry, report
from sar.cli.options import PATH
from sar.cli.parser import Command, Group
from sar.options import TEXT, Option, options_of, take

RUN = Command(
    "run", "", "measure; exit 1 when a figure misses its bound",
    "Run one benchmark, or those of a group; `list` names them.",
    Group(
        "measurement",
        Option("name", "what to run", TEXT, None, "NAME|GROUP", place=True),
        Option("json", "also write the figures there", PATH),
        *options_of(registry.Options),
    ),
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 for a missed bound, 2 for a wrong argument."""
    command, *words = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    known = registry.load_all()
    if command == "list":
        report.print_list(list(known.values()))
        return 0
    if command != "run":
        print("usage: python -m benchmarks list | run NAME|GROUP [options]", file=sys.stderr)
        return 0 if command in ("-h", "--help") else 2
    args = RUN.read(words, "python -m benchmarks run")
    try:
        chosen = registry.select(known, args.name)
        if args.json is not None and not args.json.parent.is_dir():
            raise ValueError(f"--json: got {args.json}, expected a file in a folder that is there")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.data is None and os.environ.get("SAR_DATA"):
        args.data = Path(os.environ["SAR_DATA"])
    return run(chosen, take(registry.Options, args), args.json)


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
