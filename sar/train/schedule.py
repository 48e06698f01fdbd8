"""How the learning rate changes from epoch to epoch: torch's schedulers, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)

from sar.comm import Group
from sar.train.options import TrainOptions

PLATEAU_FACTOR, PLATEAU_PATIENCE = 0.5, 10


def make_schedule(
    optimizer: torch.optim.Optimizer, options: TrainOptions, given: LRScheduler | None
) -> tuple[LRScheduler, ReduceLROnPlateau | None]:
    """The scheduler stepped after every epoch, and the one stepped after evaluations behind the
    warm-up. ``given`` is the user's, in place of ``options.schedule``."""
    if isinstance(given, ReduceLROnPlateau):
        return ConstantLR(optimizer, factor=1.0), given
    if given is not None:
        return given, None
    steps, rise, plateau = options.warmup, None, None
    if options.schedule == "plateau":
        plateau = ReduceLROnPlateau(
            optimizer, mode="max", factor=PLATEAU_FACTOR, patience=PLATEAU_PATIENCE, threshold=0.0
        )
    if steps:  # in equal steps to the full rate
        rise = LinearLR(optimizer, start_factor=1 / (steps + 1), total_iters=steps)
    if options.schedule == "cosine":
        cosine = CosineAnnealingLR(optimizer, max(1, options.epochs - steps))
        return (SequentialLR(optimizer, [rise, cosine], [steps]) if rise else cosine), None
    return rise or ConstantLR(optimizer, factor=1.0), plateau


def check_validation(
    options: TrainOptions, plateau: Any, rows: Mapping[str, Sized], group: Group
) -> None:
    """Raise ``ValueError`` on every rank for options that need validation nodes; collective."""
    for name, value in {"early_stop": options.early_stop, "schedule": plateau}.items():
        if value and not group.all_reduce(torch.tensor(len(rows.get("val", ())))):
            got = repr(getattr(options, name))
            raise ValueError(f"{name}: got {got} and no validation nodes, expected some")
