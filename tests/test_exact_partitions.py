"""Training is the same from whatever was read and however it was cut and written."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_threads

import sar
from sar.train import DataOptions, ModelOptions, Trainer, TrainOptions, build_model, load_node_data

pytestmark = pytest.mark.filterwarnings("ignore:reduce function")
SOURCE = "synthetic:nodes=150,edges=1100,seed=3,classes=4,features=6"
CUTS: dict[str, dict] = {
    "coarsen": {},
    "balanced": {"balance": {"edges", "halo", "train"}},
    "hotness": {"method": "hotness"},
    "coarsen to PyG": {"format": "pyg"},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one part."""
    return losses(tmp_path_factory.mktemp("alone"), 1)


def losses(folder: Path, num_parts: int, **options: Any) -> list[float]:
    """Of eight epochs."""
    path = sar.partition_graph(SOURCE, folder / "out", num_parts, seed=1, **options)
    torch.manual_seed(0)
    first = build_model(ModelOptions("sage", 2, 8, batch_norm=True), 6, 4).double()

    def case(group: sar.comm.Group) -> list[dict]:
        part = sar.load_partition_data(path, group.rank)
        data = load_node_data(part, DataOptions())
        data.features = data.features.double()
        view = sar.construct_full_graph(part)
        return Trainer(copy.deepcopy(first), view, data, TrainOptions(epochs=8)).fit()

    histories = run_threads(num_parts, case)
    return [record["loss"] for record in histories[0]]


@pytest.mark.parametrize("cut", CUTS)
def test_the_trainer_loses_as_on_one_part(cut: str, alone: list[float], tmp_path: Path) -> None:
    found = losses(tmp_path, 3, **CUTS[cut])
    assert found == pytest.approx(alone, rel=1e-9)
    assert alone[-1] < 0.9 * alone[0]
