"""Command line of `sar bench`: ``python -m benchmarks.tables``."""

from __future__ import annotations

import sys

from benchmarks import report
from benchmarks.registry import Table
from benchmarks.tables import measured, output
from sar.cli.commands import COMMANDS

_ASKED = ("scale", "method", "model", "ranks", "epochs", "bandwidth")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; the exit status."""
    args = COMMANDS["bench"].read(sys.argv[1:] if arguments is None else arguments, "sar bench")
    args.ranks = sorted(set(args.ranks))
    machine = report.machine()
    report.print_machine(machine)
    tables: dict = measured.compare(args)
    tables["bandwidth"], reason = measured.bandwidth(args)
    tables["skipped"] = {} if reason is None else {"bandwidth": f"not measured: {reason}"}
    for name, title in output.TITLES.items():
        if rows := tables[name]:
            report.print_table(Table(title, list(rows[0]), [[*row.values()] for row in rows]))
        else:
            print(f"\n{title}: {tables['skipped'].get(name, '')}")
    asked = {name: getattr(args, name) for name in _ASKED}
    output.write(args.out, machine, asked, tables, args.dark)
    print(f"\nwritten to {args.out}: bench.json, bench.md and plots")
    return 0


if __name__ == "__main__":
    sys.exit(main())
