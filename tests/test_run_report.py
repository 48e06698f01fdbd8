"""What the report of a run says of it: the model's own settings, when and how it ran, its times."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness import WorkerPool
from harness.commands import launch_on
from test_pictures import Page, result
from test_train_sampled import cut, graph

from sar.__main__ import main
from sar.pictures import read_run
from sar.pictures.report import page

NET = """
import time, torch
from sar.models import SAGEConv

class Net(torch.nn.Module):
    def __init__(self, in_feats, out_feats, width=8):
        super().__init__()
        self.first, self.last = Slow(in_feats, width), SAGEConv(width, out_feats)

    def forward(self, graph, x):
        return self.last(graph, self.first(graph, x))

class Slow(torch.nn.Module):
    calls = 0

    def __init__(self, *widths):
        super().__init__()
        self.conv = SAGEConv(*widths)

    def forward(self, graph, x):
        time.sleep(0 if self.calls else 2)  # as where a kernel is compiled
        self.calls += 1
        return self.conv(graph, x).relu()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, processes: WorkerPool) -> dict[str, Any]:
    """The JSON of two epochs of a model of one's own."""
    folder: Path = tmp_path_factory.mktemp("run")
    (folder / "net.py").write_text(NET)
    words = ["train", cut(graph(), 2, folder), "--model", f"{folder / 'net.py'}:Net"]
    words += ["--epochs", "2", "--json", str(folder / "out.json"), "--no-progress"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sar.cli.train.launch", launch_on(processes))
        assert main([*words, "--model-args", "width=6"]) == 0
    return json.loads((folder / "out.json").read_text())


def test_whole_numbers_are_grouped_everywhere() -> None:
    words = Page(page(read_run(result(epochs=1234, hidden=1024, batch_size=2000)))).words
    for number in (1234, 1024, 2000):
        assert f"{number:,}" in words and not re.search(rf"\n{number}\b", words), number


def test_settings_are_those_of_the_model_that_ran(run: dict[str, Any]) -> None:
    assert not {"layers", "hidden", "heads", "dropout", "batch_norm"} & set(run["config"])
    assert run["config"]["model"].endswith("net.py:Net") and run["config"]["args"] == {"width": 6}


def test_date_command_and_total_time(run: dict[str, Any]) -> None:
    words = Page(page(read_run(run))).words
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", words), "the date"
    assert re.search(r"sar train \S+ .*--epochs 2", words), "the command"
    assert re.search(r"total", words), "how long all of it took"


def test_times_of_layers_leave_the_first_epoch_out(run: dict[str, Any]) -> None:
    """Which compiles and opens files; the median of the epochs' seconds leaves it out already."""
    assert max(row["longest_compute"] for row in run["layers"]) < 2
