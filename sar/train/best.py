"""The epoch with the best validation metric, and the model as it was then."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sar.train.callbacks import Record


class Best:
    """Of equals, the first. Every metric grows as the model gets better.

    Attributes:
        record: of that epoch; ``None`` before there is a validation metric.
        model: its parameters and buffers; ``None`` where they are not kept.
    """

    def __init__(self) -> None:
        self.record: Record | None = None
        self.model: dict[str, Tensor] | None = None

    def see(self, record: Record) -> bool:
        """Whether this epoch is better than all before it."""
        value = record["val_acc"]
        if value is None or (self.record is not None and value <= self.record["val_acc"]):
            return False
        self.record, self.model = record, None
        return True

    def keep(self, model: nn.Module) -> None:
        """The model is that of the best epoch now."""
        self.model = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def restore(self, history: list[Record], saved: dict[str, Any] | None) -> None:
        """What a run knew that is continued; ``saved`` is :meth:`content`."""
        self.record = None
        for record in history:
            self.see(record)
        is_same = saved and self.record is not None and saved["epoch"] == self.record["epoch"]
        self.model = saved["model"] if saved and is_same else None

    def content(self) -> dict[str, Any] | None:
        """For a checkpoint; ``None`` where there is no model."""
        if self.record is None or self.model is None:
            return None
        return {"epoch": self.record["epoch"], "model": self.model}
