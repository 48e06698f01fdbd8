"""Callbacks that write a run's epochs: JSON lines, CSV, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from sar.errors import MissingDependencyError
from sar.files import naming, open_own, write_whole
from sar.train.callbacks import Callback, Record
from sar.train.data import SPLITS

LINES_FORMAT = 1
_SYNC_SECONDS = 1.0  # at most one flush to the disk in this time, which takes some milliseconds


class LineFile(Callback):
    """A text file that grows by whole lines, behind the epochs that a resumed run has done before.
    Each line is given to the system at once, so it outlives the process; once a second, and at the
    end, the file is flushed to the disk. A line that does not fit on the disk is taken back."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path).absolute()
        self._file: BinaryIO | None = None
        self._size, self._synced = 0, 0.0

    def _begin(self, lines: Sequence[str]) -> None:
        text = "".join(line + "\n" for line in lines).encode()
        write_whole(self.path, lambda file: file.write(text), durable=True)
        with naming(self.path):
            self._file = open(open_own(self.path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)
        self._size, self._synced = len(text), time.monotonic()

    def _add(self, line: str) -> None:
        file, data = self._opened(), (line + "\n").encode()
        size = self._size + len(data)
        with naming(self.path):
            try:
                while data:  # a write that is cut short does not say why, the next one does
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(self._size)
                raise
            self._size = size
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                os.fsync(file.fileno())
                self._synced = time.monotonic()

    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise ValueError(f"{self.path}: got an epoch before the start of a run")
        return self._file

    def on_end(self, best: Record | None, error: BaseException | None) -> None:
        if self._file is not None:
            with self._file as file, naming(self.path):
                os.fsync(file.fileno())
            self._file = None


class JsonLines(LineFile):
    """One JSON object a line: a header, then every epoch.

    Args:
        about: what the header holds beside what the trainer tells.
    """

    def __init__(self, path: str | os.PathLike, about: Record | None = None) -> None:
        super().__init__(path)
        self._about = about or {}

    def on_start(self, run: Record, done: Sequence[Record]) -> None:
        header = {"format": LINES_FORMAT, **run, **self._about, "resumed_after": len(done)}
        self._begin([_as_json(header), *map(_as_json, done)])

    def on_epoch(self, record: Record) -> None:
        self._add(_as_json(record))


class Csv(LineFile):
    """A row of comma-separated values for every epoch, below a row of names."""

    _names: Sequence[str] = ()

    def on_start(self, run: Record, done: Sequence[Record]) -> None:
        splits = [f"{split}_{run['metric']}" for split in SPLITS]
        self._names = ["epoch", "loss", "lr", *splits, "seconds"]
        self._begin([_csv_row(self._names), *map(self._row, done)])

    def on_epoch(self, record: Record) -> None:
        self._add(self._row(record))

    def _row(self, record: Record) -> str:
        return _csv_row(["" if record.get(n) is None else record[n] for n in self._names])


class TensorBoard(Callback):
    """Curves for TensorBoard, in a folder; a resumed run goes on where it was.

    Raises ``MissingDependencyError`` where the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        require("tensorboard", "TensorBoard's files")
        self.folder = Path(folder)
        self._writer: Any = None

    def on_start(self, run: Record, done: Sequence[Record]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with naming(self.folder):
            self._writer = SummaryWriter(str(self.folder), purge_step=len(done) + 1)
            self._writer.add_text("run", f"```\n{json.dumps(run, indent=1, default=str)}\n```")

    def on_epoch(self, record: Record) -> None:
        with naming(self.folder):
            for name, value in _numbers(record).items():
                split, _, metric = name.partition("_")
                tag = f"{metric}/{split}" if metric else name
                self._writer.add_scalar(tag, value, record["epoch"])
            self._writer.flush()

    def on_end(self, best: Record | None, error: BaseException | None) -> None:
        if self._writer is not None:
            with naming(self.folder):
                self._writer.close()
            self._writer = None


class Wandb(Callback):
    """Curves at Weights & Biases, whose own environment variables say where and how.

    Raises ``MissingDependencyError`` where the package wandb is not installed.
    """

    def __init__(self, project: str) -> None:
        require("wandb", "Weights & Biases")
        self._project = project
        self._run: Any = None

    def on_start(self, run: Record, done: Sequence[Record]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=self._project, config=run)

    def on_epoch(self, record: Record) -> None:
        self._run.log(_numbers(record), step=record["epoch"])

    def on_end(self, best: Record | None, error: BaseException | None) -> None:
        if self._run is not None:
            self._run.summary.update({f"best_{n}": v for n, v in _numbers(best or {}).items()})
            self._run.finish(exit_code=0 if error is None else 1)
            self._run = None


KINDS: dict[str, Any] = {"jsonl": JsonLines, "csv": Csv, "tensorboard": TensorBoard, "wandb": Wandb}


def make_logger(text: str) -> Callback:
    """The logger that ``KIND:WHERE`` names, as ``csv:run.csv``. Raises ``ValueError`` for another
    text, ``MissingDependencyError`` for an absent package."""
    kind, _, where = text.partition(":")
    if kind not in KINDS or not where:
        raise ValueError(
            f"logger: got {text!r}, expected jsonl:FILE, csv:FILE, tensorboard:DIR or wandb:PROJECT"
        )
    return KINDS[kind](where)


def require(package: str, what: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingDependencyError(f"{what}: needs {package}: pip install {package}")


def _as_json(record: Record) -> str:
    return json.dumps(record, allow_nan=False, default=str)  # a config may hold anything


def _csv_row(values: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue()


def _numbers(record: Record) -> dict[str, float]:
    """A record's finite numbers, without the epoch's: what is drawn."""
    known = {n: v for n, v in record.items() if n != "epoch" and isinstance(v, int | float)}
    return {name: value for name, value in known.items() if math.isfinite(value)}
