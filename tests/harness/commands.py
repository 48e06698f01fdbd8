"""Commands whose ranks are workers that are there already, as starting some takes seconds."""

from __future__ import annotations

import importlib
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from harness.pool import WorkerPool
from sar.__main__ import read_words
from sar.cli.train import make_trainer
from sar.comm import TurnGroup

CPU = torch.device("cpu")


def case_command(group: Any, command: str, options: dict[str, Any], folder: str = ".") -> None:
    """What a rank of the command line does, which was typed in ``folder``."""
    module, before = importlib.import_module(f"sar.cli.{command}"), os.getcwd()
    os.chdir(folder)
    try:
        module.work(Namespace(**options), group, CPU)
    finally:
        os.chdir(before)


def launch_on(processes: WorkerPool) -> Callable[[str, Namespace, int], None]:
    """Stands for ``sar.cli.train.launch``, and for that of ``evaluate``."""

    def launch(command: str, args: Namespace, nproc: int) -> None:
        options = {name: value for name, value in vars(args).items() if not callable(value)}
        processes.run(nproc, case_command, command, options, os.getcwd())

    return launch


def on_threads(size: int, command: str, *words: object) -> None:
    """A command on ranks that are threads of this process, in turns: each draws its own numbers."""
    args = read_words([command, *map(str, words)])
    work = importlib.import_module(f"sar.cli.{command}").work
    TurnGroup.run(size, lambda group: work(args, group, CPU))


def trainer_of(group: Any, *words: str) -> Any:
    """What trains on a rank of ``sar train``."""
    return make_trainer(read_words(["train", *words]), group, CPU)
