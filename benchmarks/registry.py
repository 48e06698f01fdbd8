"""The list of benchmarks, and what one of them reports."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sar.cli.options import PATH
from sar.options import POSITIVE, Kind, option


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


CHECKOUT = Kind(
    "CHECKOUT", "a checkout, which has a folder 'sar'", lambda text: Path(text).resolve(), Path,
    lambda path: (path / "sar").is_dir(),
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Choices of the command line."""

    sar_path: Path | None = option(None, "IntelLabs SAR, beside", CHECKOUT)
    sar_path_gat: Path | None = option(None, "another one, for attention layers", CHECKOUT)
    before: Path | None = option(None, "an earlier state of this library, beside", CHECKOUT)
    data: Path | None = option(None, "folder with cora.npz ..; default: $SAR_DATA", PATH, "DIR")
    cache: Path = option(Path("build/benchmarks"), "generated graphs and their cuts", PATH, "DIR")
    ranks: tuple[int, ...] = option((2, 4, 8), "of `memory`", POSITIVE, many="+")
    repeats: int = option(7, "measured epochs of each contender", POSITIVE)
    nodes: int = option(1_000_000, "of the largest graph of `cut`", POSITIVE)
    scale: int = option(21, "2^SCALE nodes of the graph of `larger`", POSITIVE)


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
