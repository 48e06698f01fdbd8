"""Printing: tables, figures beside their bounds, the class of the machine, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict
from typing import Any

from benchmarks.registry import Benchmark, Report, Table

_PACKAGES = ("torch", "dgl", "numpy", "numba")


def machine() -> dict[str, Any]:
    """Cores, memory and versions; nothing that names the host."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }


def print_machine(info: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items())
    print(f"{info['cores']} cores, {info['memory_gib']} GiB, {info['system']}; {versions}")


def print_list(benchmarks: list[Benchmark]) -> None:
    table = Table("", ["name", "group", "what it measures"])
    table.rows = [[item.name, item.group, item.summary] for item in benchmarks]
    print_table(table)


def print_report(item: Benchmark, report: Report, seconds: float) -> None:
    print(f"\n== {item.name}: {item.summary} [{seconds:.0f} s]")
    if report.skipped is not None:
        print(f"skipped: {report.skipped}")
        return
    for table in report.tables:
        print_table(table)
    if report.figures:
        print_table(_bounds(report))


def _bounds(report: Report) -> Table:
    """Each figure beside its bound."""
    figures = Table("Bounds", ["figure", "measured", "unit", "bound", ""])
    for figure in report.figures:
        verdict = "" if not figure.bound else "ok" if figure.ok else "MISSED"
        figures.rows.append([figure.name, figure.value, figure.unit, figure.bound, verdict])
    return figures


def print_table(table: Table) -> None:
    """Columns as wide as their widest cell; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(table.columns, *cells)]
    if table.title:
        print(f"\n{table.title}")
    print("  ".join(name.ljust(width) for name, width in zip(table.columns, widths)).rstrip())
    for row, values in zip(cells, table.rows):
        aligned = [
            text.ljust(width) if isinstance(value, str) else text.rjust(width)
            for text, value, width in zip(row, values, widths)
        ]
        print("  ".join(aligned).rstrip())


def as_json(report: Report, seconds: float) -> dict[str, Any]:
    """The report as plain data, with a verdict for each figure."""
    return {
        "ok": report.ok,
        "skipped": report.skipped,
        "seconds": round(seconds, 1),
        "figures": [{**asdict(figure), "ok": figure.ok} for figure in report.figures],
        "tables": [asdict(table) for table in report.tables],
    }


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
