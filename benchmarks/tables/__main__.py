"""Command line of `sar bench`: ``python -m benchmarks.tables``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from benchmarks import report
from benchmarks.registry import Table
from benchmarks.tables import measured, output
from benchmarks.tables.contenders import Request
from sar.cli.commands import COMMANDS


def request_of(args: argparse.Namespace) -> Request:
    """The options as they were given."""
    path = args.sar_path and args.sar_path.resolve()
    return Request(
        args.scale, args.method, args.model, tuple(sorted(set(args.ranks))), args.epochs,
        tuple(args.bandwidth), path, args.cache,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; the exit status."""
    args = COMMANDS["bench"].read(sys.argv[1:] if arguments is None else arguments, "sar bench")
    request = request_of(args)
    machine = report.machine()
    report.print_machine(machine)
    tables: dict = {"memory": measured.memory(request)}
    _show("memory", tables["memory"])
    tables["speed"] = measured.speed(request)
    _show("speed", tables["speed"])
    tables["bandwidth"], reason = measured.bandwidth(request)
    tables["skipped"] = {} if reason is None else {"bandwidth": f"not measured: {reason}"}
    _show("bandwidth", tables["bandwidth"], tables["skipped"].get("bandwidth", ""))
    tables["traffic"] = measured.traffic(request)
    _show("traffic", tables["traffic"])
    about = {k: v for k, v in asdict(request).items() if k not in ("cache", "sar_path")}
    about = {k: list(v) if isinstance(v, tuple) else v for k, v in about.items()}
    output.write(args.out, machine, about, tables, args.dark)
    print(f"\nwritten to {args.out}: bench.json, bench.md and plots")
    return 0


def _show(name: str, rows: list[measured.Row], reason: str = "") -> None:
    if rows:
        table = Table(output.TITLES[name], list(rows[0]), [list(row.values()) for row in rows])
        report.print_table(table)
    else:
        print(f"\n{output.TITLES[name]}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
