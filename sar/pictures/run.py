"""A training run as pictures and reports see it: the JSON of `sar train`, checked and named."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SPLITS = ("train", "val", "test")
_NEEDED = ("epochs", "ranks", "layers", "config")


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
    epochs = result["epochs"]
    if not epochs:
        raise ValueError("run: got no epoch, expected one or more to draw")
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
