"""Commands whose ranks are workers that are there already, as starting some takes seconds."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from harness.pool import WorkerPool


def case_command(group: Any, command: str, options: dict[str, Any]) -> None:
    """What a rank of the command line does."""
    module = importlib.import_module(f"sar.cli.{command}")
    module.work(Namespace(**options), group, torch.device("cpu"))


def launch_on(processes: WorkerPool) -> Callable[[str, Namespace, int], None]:
    """Stands for ``sar.cli.train.launch``, and for that of ``evaluate``."""

    def launch(command: str, args: Namespace, nproc: int) -> None:
        options = {name: value for name, value in vars(args).items() if not callable(value)}
        processes.run(nproc, case_command, command, options)

    return launch
