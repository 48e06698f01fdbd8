"""What the library says of a model: a line for each kind of layer, and what computes it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from sar.comm import Group
from sar.comm.meter import Told
from sar.layers.explain import way_of

logger = logging.getLogger("sar")


def say(text: str) -> None:
    """Log as information; where nobody has set up logging, on the standard error stream.

    Python itself shows nothing below warnings then. ``logging.getLogger("sar").setLevel(..)``
    silences it.
    """
    if logger.hasHandlers():
        logger.info(text)
    elif logger.level <= logging.INFO:  # also NOTSET, which is 0
        where, nothing = ("", 0), ()
        record = logger.makeRecord(logger.name, logging.INFO, *where, text, nothing, None)
        logging.StreamHandler().emit(record)


@contextmanager
def layers_logged(model: nn.Module, group: Group) -> Iterator[None]:
    """When the first forward pass of ``model`` inside ends, rank 0 logs what computed its layers.

    Layers are known by :func:`sar.nn.mark_layers`, which has to be around; no communication.
    """
    meter = group.meter
    if group.rank != 0 or meter.told is not None:
        yield
        return
    told = meter.told = Told()

    def end(*_: Any) -> None:
        handle.remove()
        meter.told = None
        for line in lines_of(model, told):
            logger.info(line)

    handle = model.register_forward_hook(end)
    try:
        yield
    finally:
        handle.remove()
        meter.told = None


def lines_of(model: nn.Module, told: Told) -> list[str]:
    """``SAGEConv x 3: fused`` and the like, in the order of the modules."""
    counted: Counter[tuple[str, str, str | None]] = Counter()
    names = {layer for layer, _, _ in told.ways}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if (name or kind) in names:
            what, why = way_of(module, name or kind, told.ways)
            counted[kind, what, why] += 1
    lines = []
    for (kind, what, why), number in counted.items():
        reason = "" if why is None else f", not fused: {why} (sar.explain shows more)"
        lines.append(f"{kind} x {number}: {what}{reason}")
    return lines
