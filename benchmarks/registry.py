"""The list of benchmarks, and what one of them reports."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured number and the bound that it has to keep, if there is one."""

    name: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def ok(self) -> bool:
        """False when the bound is missed; a NaN misses every bound."""
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    @property
    def bound(self) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:.4g}"
        return "" if self.at_least is None else f">= {self.at_least:.4g}"


@dataclass
class Table:
    """Rows of cells for people to read, beside the figures; numbers are formatted on printing."""

    title: str
    columns: list[str]
    rows: list[list[Any]] = field(default_factory=list)


@dataclass
class Report:
    """What a benchmark measured, or why it was skipped."""

    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    skipped: str | None = None

    @property
    def ok(self) -> bool:
        return all(figure.ok for figure in self.figures)


@dataclass(frozen=True)
class Options:
    """Choices of the command line.

    Attributes:
        sar_path: a checkout of IntelLabs SAR to measure beside, or None.
        sar_path_gat: another one for attention layers, or None: the same.
        before: an earlier checkout of this library to measure beside, or None.
        data: folder of the real graphs' npz files, or None.
        cache: folder where generated graphs and their partitions are kept between runs.
        ranks: numbers of ranks of the memory benchmark.
        repeats: measured epochs of each contender.
        nodes: of the community graph that is cut.
    """

    sar_path: Path | None = None
    sar_path_gat: Path | None = None
    before: Path | None = None
    data: Path | None = None
    cache: Path = Path("build/benchmarks")
    ranks: tuple[int, ...] = (2, 4, 8)
    repeats: int = 7
    nodes: int = 1_000_000


@dataclass(frozen=True)
class Benchmark:
    """A named measurement; ``group`` runs several by one name."""

    name: str
    group: str
    summary: str
    run: Callable[[Options], Report]


_benchmarks: dict[str, Benchmark] = {}


def benchmark(
    name: str, group: str
) -> Callable[[Callable[[Options], Report]], Callable[[Options], Report]]:
    """Register the decorated function; the first line of its docstring is the summary."""

    def register(run: Callable[[Options], Report]) -> Callable[[Options], Report]:
        summary = (run.__doc__ or "").strip().splitlines()[0]
        _benchmarks[name] = Benchmark(name, group, summary, run)
        return run

    return register


def load_all() -> dict[str, Benchmark]:
    """Import every module of :mod:`benchmarks.cases` and return what they registered, by name."""
    from benchmarks import cases

    for module in pkgutil.iter_modules(cases.__path__):
        importlib.import_module(f"{cases.__name__}.{module.name}")
    return dict(sorted(_benchmarks.items(), key=lambda item: (item[1].group, item[0])))


def select(known: dict[str, Benchmark], wanted: str) -> list[Benchmark]:
    """Benchmarks whose name or group is ``wanted``. Raises ValueError when there is none."""
    chosen = [item for item in known.values() if wanted in (item.name, item.group)]
    if not chosen:
        names = ", ".join(known)
        groups = ", ".join(sorted({item.group for item in known.values()}))
        raise ValueError(f"NAME: got {wanted!r}, expected one of {names} or a group: {groups}")
    return chosen
