"""Telling others of a run, on rank 0: callbacks, and a progress bar or lines on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from sar.comm import Group
from sar.train.data import SPLITS
from sar.train.options import TrainOptions

Record = dict[str, Any]


class Callback:
    """Methods that the trainer calls during a run; override what you need.

    Every rank is given as many. Rank 0 alone calls them, so they write files, and do nothing that
    is collective. What one raises ends the run on all ranks, with its message.
    """

    def on_start(self, run: Record, done: Sequence[Record]) -> None:
        """Before the first epoch.

        Args:
            run: ``metric``, ``epochs``, ``num_ranks``, ``num_parameters``, ``mfgs``, ``config``.
            done: the records of the epochs that a resumed run has behind it.
        """

    def on_epoch(self, record: Record) -> None:
        """After each epoch.

        Args:
            record: ``epoch`` (from 1), ``loss``, ``lr``, ``seconds``, and the metric on each split
                by its name, as ``val_accuracy``; ``None`` where it was not evaluated.
        """

    def on_end(self, best: Record | None, error: BaseException | None) -> None:
        """When training is over, also by an error.

        Args:
            best: the record with the largest validation metric, if there is one and no error.
        """


def without_old_names(record: Record, metric: str) -> Record:
    """A record with the metric under its own name, as ``val_accuracy``, in place of ``val_acc``."""
    old = {f"{split}_acc": f"{split}_{metric}" for split in SPLITS}
    return {old.get(name, name): value for name, value in record.items()}


class Callbacks:
    """All callbacks of a run; every method is collective, but for :meth:`give_up`."""

    def __init__(self, callbacks: Sequence[Callback], group: Group) -> None:
        self._all, self._group = list(callbacks), group
        self._begun = 0

    def start(self, run: Record, done: Sequence[Record]) -> None:
        def begin(one: Callback) -> None:
            self._begun += 1
            one.on_start(run, done)

        self._tell(begin)

    def epoch(self, record: Record) -> None:
        self._tell(lambda one: one.on_epoch(record))

    def end(self, best: Record | None) -> None:
        self._tell(lambda one: one.on_end(best, None))
        self._begun = 0

    def give_up(self, error: BaseException) -> None:
        """End, after an error, those that were started; what they raise adds nothing."""
        for one in self._all[: self._begun]:
            with suppress(Exception):
                one.on_end(None, error)

    def _tell(self, what: Any) -> None:
        if not self._all:
            return
        error: Exception | None = None
        if self._group.rank == 0:
            try:
                for one in self._all:
                    what(one)
            except Exception as problem:  # any: the others would wait
                error = problem
        if self._group.all_reduce(torch.tensor(int(error is not None)), "max"):
            self._group.agree(error)


class Progress:
    """A bar on standard error where that is a terminal, else lines on standard output; rank 0
    alone. Lines come every ``options.log_every`` epochs, and for the last one."""

    def __init__(self, done: int, options: TrainOptions, group: Group) -> None:
        self._options, self._bar = options, None
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
            for split in SPLITS
            if record[split + "_acc"] is not None
        ]
        words = [f"epoch {record['epoch']}/{self._options.epochs}", f"loss {record['loss']:.4f}"]
        line = "  ".join([*words, *splits, f"{record['seconds']:.3g} s"])
        sys.stdout.write(line + "\n")
        sys.stdout.flush()  # it may be a file that somebody watches


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
