"""The sampling names of the original; sampled mini-batches are not built yet."""

from __future__ import annotations

from typing import Any, NoReturn

from sar.errors import NotSupportedError


def _refuse(name: str) -> NoReturn:
    raise NotSupportedError(
        f"{name}: sampled mini-batches are not supported yet; train full-batch on "
        "sar.construct_full_graph(...), or on the blocks of sar.construct_mfgs(...), which hold "
        "only what the training nodes need"
    )


class DistNeighborSampler:
    """Samples neighbors of seeds over all ranks. Raises ``NotSupportedError``."""

    def __init__(self, fanouts: list[int], *args: Any, **kwargs: Any) -> None:
        _refuse("DistNeighborSampler")


def DataLoader(*args: Any, **kwargs: Any) -> NoReturn:
    """Iterates over sampled blocks. Raises ``NotSupportedError``."""
    _refuse("DataLoader")
