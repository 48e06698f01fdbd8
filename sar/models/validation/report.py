"""What :func:`sar.validate` gives: a row for each module, and the first place that differs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

_HEADER = ("module", "class", "calls", "output", "gradient")
_MOST_ROWS = 40


@dataclass(frozen=True)
class ModuleRow:
    """A module of the model, in the order of calls.

    Attributes:
        name: in the model; that of the class for the model itself; ``"(call)"`` is what calls it.
        class_name: of the module. calls: how often it is called.
        output, gradient: largest difference of its results, and of their gradients, over the
            largest number of each; ``None`` where it was not compared, as of parts of fused layers.
    """

    name: str
    class_name: str
    calls: int
    output: float | None
    gradient: float | None


@dataclass(frozen=True)
class Finding:
    """The first place that differs, in the order of calls, or backwards where gradients do.

    Attributes:
        name, class_name: of the module whose own forward it is; ``"(call)"``: outside of the model.
        what: ``"output"``, ``"gradient"``, ``"gradient of .."`` a parameter, ``"buffer .."``,
            ``"error"``.
        why: the reason that experiments showed.
        where: before which module, or between which, where the module calls others.
        difference: over the largest number; infinite for shapes that do not fit, and for errors.
    """

    name: str
    class_name: str
    what: str
    why: str
    where: str
    difference: float

    def __str__(self) -> str:
        place = f"{self.name} ({self.class_name})" if self.class_name else self.name
        where = f", {self.where}" if self.where else ""
        what = "error" if self.what == "error" else f"{self.what} differs by {self.difference:.1e}"
        return f"{place}{where}: {what}: {self.why}"


@dataclass(frozen=True)
class Validation:
    """What :func:`sar.validate` gives; as a string, a table and its verdict.

    Attributes:
        rows: of the modules that were called.
        first: the first place that differs; ``None`` where ranks compute what one process does.
        parts: number of ranks. num_nodes, num_edges: of the graph that they shared.
        piece: what of a large graph that was, in words; ``None``: all of it.
        reference: what ran on the whole graph: ``"dgl"``, ``"pyg"``, or ``"one rank"`` of this
            library, where the model does not run on a graph of these.
        dtype: in which it was run. tolerance: what differs more, relative, is not the same.
    """

    rows: tuple[ModuleRow, ...]
    first: Finding | None
    parts: int
    num_nodes: int
    num_edges: int
    piece: str | None
    reference: str
    dtype: str
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether results and gradients agree."""
        return self.first is None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has no infinity: ``None`` there."""
        found = asdict(self) | {"ok": self.ok}
        for row in [*found["rows"], found["first"] or {}]:
            row |= {key: None for key, value in row.items() if value == math.inf}
        return found

    def __str__(self) -> str:
        rows = [_HEADER, *(_cells(row, self.tolerance) for row in self._shown())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if left := len(self.rows) - len(self._shown()):
            lines.append(f".. and {left} more")
        piece = f", {self.piece}" if self.piece else ""
        graph = f"{self.num_nodes:,} nodes, {self.num_edges:,} edges{piece}"
        lines.append(f"{self.parts} ranks against {self.reference} in {self.dtype}: {graph}")
        told = "the model is the same on ranks" if self.first is None else f"first: {self.first}"
        return "\n".join([*lines, told])

    def _shown(self) -> tuple[ModuleRow, ...]:
        """All rows, or those around the first that differs."""
        if len(self.rows) <= _MOST_ROWS:
            return self.rows
        names = [row.name for row in self.rows]
        at = names.index(self.first.name) if self.first and self.first.name in names else 0
        start = max(0, min(at - _MOST_ROWS // 2, len(self.rows) - _MOST_ROWS))
        return self.rows[start : start + _MOST_ROWS]


def _cells(row: ModuleRow, tolerance: float) -> tuple[str, ...]:
    def word(by: float | None) -> str:
        return "-" if by is None else "same" if by <= tolerance else f"{by:.1e}"

    return row.name, row.class_name, f"{row.calls}", word(row.output), word(row.gradient)
