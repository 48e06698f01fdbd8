"""A command's work for one part after another, in this process."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sar.cli.outputs import check_writable
from sar.comm import Group, TurnGroup
from sar.config import parse_bytes
from sar.memory.spill import Spill, check_folder
from sar.partition.load import read_book

SPILL = "spill"


def work_in_turns(args: argparse.Namespace, work: Callable[..., None]) -> None:
    """Do ``work(args, group, device)`` for each part of the partitions ``args.input``."""
    memory = None if args.memory is None else parse_bytes(args.memory, "--memory")
    with Spill(args.out_of_core, memory) as spill:

        def rank(group: Group) -> None:
            spill_of(group)[SPILL] = spill
            with spill.following(group):
                work(args, group, torch.device("cpu"))

        TurnGroup.run(
            read_book(args.input).num_parts, rank, between=[spill], table_bytes=spill.table_bytes
        )


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
