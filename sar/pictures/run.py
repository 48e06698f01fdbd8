"""A training run as pictures and reports see it: the JSON of `sar train`, checked and named."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SPLITS = ("train", "val", "test")
_NEEDED = ("epochs", "ranks", "layers", "config")
_NUMBERS = {  # that each row has
    "epochs": ("epoch", "loss", "seconds"),
    "ranks": ("rank", "peak_rss_mb", "baseline_rss_mb", "sent_bytes", "received_bytes"),
    "layers": ("compute", "wait", "longest_compute", "longest_wait", "sent"),
}


@dataclass(frozen=True)
class Run:
    """What `sar train --json` wrote.

    Attributes:
        epochs: a record of each epoch, ranks: of each rank, layers: of each layer and pass.
        config: the options. versions: of the software.
        metric: name of what ``scores`` holds.
        scores: by split, for each epoch; ``None`` where it was not evaluated. Splits that never
            were are left out.
    """

    epochs: list[dict[str, Any]]
    ranks: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    config: dict[str, Any]
    versions: dict[str, str]
    metric: str
    scores: dict[str, list[float | None]]

    def column(self, name: str) -> list[float]:
        """Of each epoch."""
        return [record[name] for record in self.epochs]

    @property
    def best(self) -> int | None:
        """Place in ``epochs`` of the best score, by validation where there is one."""
        for split in ("val", "test", "train"):
            known = [(s, -at) for at, s in enumerate(self.scores.get(split, [])) if s is not None]
            if known:
                return -max(known)[1]
        return None

    @property
    def seconds(self) -> float:
        """Median of an epoch."""
        return statistics.median(self.column("seconds"))


def read_run(result: Any) -> Run:
    """Check a result and name its parts.

    Raises ``ValueError`` for what `sar train --json` did not write, and for a run without an epoch.
    """
    missing = [key for key in _NEEDED if key not in result] if isinstance(result, Mapping) else None
    if missing is None or missing:
        what = type(result).__name__ if missing is None else f"no {', '.join(missing)}"
        raise ValueError(f"run: got {what}, expected the JSON of sar train --json")
    if not isinstance(result["config"], dict):
        raise ValueError("run: got no options in config, expected the JSON of sar train --json")
    for table in _NUMBERS:
        _check_rows(table, result[table])
    epochs = result["epochs"]
    if not epochs or not result["ranks"]:
        raise ValueError("run: got no epoch or no rank, expected one or more to draw")
    scores: dict[str, list[float | None]] = {}
    for split in SPLITS:
        key = next((name for name in epochs[0] if name.startswith(f"{split}_")), None)
        column = [record.get(key) for record in epochs]
        if any(score is not None for score in column):
            scores[split] = column
    metric = result.get("metric") or result["config"].get("metric") or "score"
    return Run(
        epochs, result["ranks"], result["layers"], result["config"], result.get("versions", {}),
        metric, scores,
    )  # fmt: skip


def _check_rows(table: str, rows: Any) -> None:
    """Raise ``ValueError`` unless each row of a table has its numbers."""
    for row in rows if isinstance(rows, list) else [None]:
        known = row if isinstance(row, Mapping) else {}
        for name in _NUMBERS[table]:
            value = known.get(name)
            if not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
                raise ValueError(
                    f"run: {table}: got no number for {name!r}, expected the JSON of sar train "
                    "--json"
                )
