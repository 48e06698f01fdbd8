"""How far a run is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys

from sar.comm import Group
from sar.train.callbacks import Record
from sar.train.options import TrainOptions


class Progress:
    """Shown by rank 0, or nothing.

    Where standard error is a terminal it gets a bar. Else standard output gets a line for every
    ``options.log_every`` epochs, and for the last one.
    """

    def __init__(self, done: int, options: TrainOptions, group: Group) -> None:
        self._options, self._bar, self._last = options, None, done
        self._shows = options.progress and group.rank == 0
        self._held: Record | None = None
        if self._shows and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(initial=done, total=options.epochs, unit="epoch", mininterval=0.5)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._held is not None:
            self._write(self._held)

    def show(self, record: Record) -> None:
        """An epoch is done."""
        if not self._shows:
            return
        if self._bar is not None:
            shown = {name: record[name] for name in ("loss", "val_acc", "test_acc")}
            self._bar.set_postfix({n: _short(value) for n, value in shown.items()}, refresh=False)
            self._bar.update()
        elif record["epoch"] % self._options.log_every == 0:
            self._write(record)
        else:
            self._held = record

    def _write(self, record: Record) -> None:
        self._held = None
        splits = [
            f"{split} {record[split + '_acc']:.4f}"
            for split in ("train", "val", "test")
            if record[split + "_acc"] is not None
        ]
        words = [f"epoch {record['epoch']}/{self._options.epochs}", f"loss {record['loss']:.4f}"]
        line = "  ".join([*words, *splits, f"{record['seconds']:.3g} s"])
        sys.stdout.write(line + "\n")
        sys.stdout.flush()  # it may be a file that somebody watches


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
