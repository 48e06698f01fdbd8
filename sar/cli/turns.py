"""A command's work for one part after another, in this process."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from sar.cli.outputs import check_writable
from sar.comm import Group, TurnGroup
from sar.comm.meter import Meter
from sar.config import parse_bytes
from sar.memory.machine import check_folder
from sar.memory.spill import Spill
from sar.partition.load import read_book

SPILL = "spill"
_EVERY = 60  # seconds between lines where there is no terminal


def work_in_turns(args: argparse.Namespace, work: Callable[..., None]) -> None:
    """Do ``work(args, group, device)`` for each part of the partitions ``args.input``."""
    memory = None if args.memory is None else parse_bytes(args.memory, "--memory")
    size = read_book(args.input).num_parts
    shows = not getattr(args, "no_progress", False)
    with Spill(args.out_of_core, memory) as spill, TurnProgress(spill, size, shows) as progress:

        def rank(group: Group) -> None:
            spill_of(group)[SPILL] = spill
            progress.meters[group.rank] = group.meter
            with spill.following(group):
                work(args, group, torch.device("cpu"))

        TurnGroup.run(size, rank, between=[spill, progress], table=spill)


class TurnProgress:
    """What each part does, turn by turn: a bar where standard error is a terminal, else a line a
    minute on standard output. A :class:`sar.comm.turns.Between`.

    ``meters``: those of the ranks, by rank.
    """

    def __init__(self, spill: Spill, num_parts: int, shows: bool) -> None:
        self.meters = dict[int, Meter]()
        self._spill, self._num_parts, self._shows = spill, num_parts, shows
        self._turns, self._told = 0, time.monotonic()
        is_bar = shows and sys.stderr.isatty()
        self._bar = tqdm(unit="turn", leave=False, position=1) if is_bar else None

    def begin(self, rank: int, following: Sequence[int]) -> None: ...

    def end(self, rank: int) -> None:
        self._turns += 1
        if self._bar is not None:
            self._bar.set_postfix_str(self._now(rank), refresh=False)
            self._bar.update()
        elif self._shows and time.monotonic() - self._told > _EVERY:
            self._told = time.monotonic()
            print(f"turn {self._turns:,}  {self._now(rank)}", flush=True)

    def _now(self, rank: int) -> str:
        layer = " ".join(self.meters[rank].at_work).strip() if rank in self.meters else "loading"
        read, written = self._spill.read_bytes / 1e9, self._spill.written_bytes / 1e9
        part = f"part {rank + 1}/{self._num_parts}"
        return f"{part}, {layer}  {read:.1f} GB read, {written:.1f} GB written"

    def __enter__(self) -> TurnProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def check_out_of_core(args: argparse.Namespace) -> None:
    """Raise now for a folder that is in memory, or that cannot be written."""
    if args.out_of_core is not None:
        check_folder(Path(args.out_of_core), "--out-of-core")
        check_writable(Path(args.out_of_core), "--out-of-core")


def spill_of(group: Group) -> dict[Any, Any]:
    return group.shared if isinstance(group, TurnGroup) else {}


def told(group: Group) -> dict[str, Any]:
    """What a report says of the file: nothing where tensors stay in memory."""
    spill = spill_of(group).get(SPILL)
    return {} if spill is None else {"out_of_core": spill.summary()}
