"""What training out of core takes, by a plan and by runs of this process: a line of JSON a model.

Models in half of what they need for tensors, those of one's own in memory. The first model also
trains within the least memory, and with half of what that has for tensors.

    python tests/harness/turns.py FOLDER PARTS.json MODEL [PARTS.json MODEL ..]
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import sar
from sar.comm import current_group
from sar.errors import SarError
from sar.files import scratch_folder
from sar.memory.machine import anonymous_bytes
from sar.models import build_model, prepare_graph
from sar.plan import CLASSES, Work, from_book
from sar.plan.to_scale import NO_LIMIT
from sar.plan.turns import Model
from sar.run_options import DataOptions, ModelOptions, TrainOptions
from sar.train import Trainer, load_node_data

HEAP = 16 << 20
EPOCHS = 4  # until nothing new leaves memory


class Peak(threading.Thread):
    """The most memory that no file backs, while it runs."""

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self.most, self.over = 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self.over.wait(0.002):
            self.most = max(self.most, anonymous_bytes())

    def stop(self) -> int:
        self.over.set()
        self.join()
        return self.most


def moved() -> tuple[int, int]:
    """Bytes that this process read from disks and wrote to them."""
    lines = Path("/proc/self/io").read_text().split()
    return int(lines[lines.index("read_bytes:") + 1]), int(lines[lines.index("write_bytes:") + 1])


def run(path: str, options: ModelOptions, folder: str, memory: int) -> dict[str, Any]:
    """Bytes of the last epoch, and the peak; or the error of too little memory."""
    marks = list[tuple[int, int]]()

    def train(partition: Any) -> None:
        group = current_group()
        data = load_node_data(partition, DataOptions(), group=group)
        graph = prepare_graph(sar.construct_full_graph(partition), options)
        torch.manual_seed(0)
        model = build_model(
            options, data.widths, data.num_classes, graph=graph, target_type=data.ntype
        )
        trainer = Trainer(model, graph, data, TrainOptions(mfgs="off"), group=group)
        for _ in range(EPOCHS):
            trainer.train_epoch()
            if group.rank == 0:
                marks.append(moved())

    peak = Peak()
    try:
        sar.run_parts(path, train, directory=folder, memory=memory)
    except SarError as error:
        return {"error": str(error)}
    finally:
        most = peak.stop()
    read, written = (after - before for before, after in zip(*marks[-2:], strict=True))
    return {"read": read, "written": written, "peak": most}


def main(folder: str, words: list[str]) -> None:
    for path, name in zip(words[::2], words[1::2], strict=True):
        options, graph = ModelOptions(name, layers=2, hidden=128), from_book(path)
        work = Work(options, graph.features, graph.classes or CLASSES, types=graph.types)
        with scratch_folder() as scratch:
            model = Model(work, graph.size, *graph.totals, Path(folder), scratch)
            most = model.trained(NO_LIMIT)
            memory = NO_LIMIT if options.is_own else (model.process + most.peak_bytes) // 2
            found = {
                "model": name,
                "plan": asdict(most if options.is_own else model.within(memory)),
            }
            if not options.is_own:  # a run of a small graph has as much less for its tensors
                found["less"] = asdict(model.within(memory - HEAP))
            if name == words[1]:
                least = model.least(most).memory
        found["run"] = run(path, options, folder, memory)
        if name == words[1]:
            found["least"] = run(path, options, folder, least)
            half = model.process + (least - model.process) // 2
            found["half"] = run(path, options, folder, half)
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
