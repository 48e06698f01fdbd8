"""Training is the same from whatever was read and however it was cut and written."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from harness import run_threads

import sar
from sar.comm import Group
from sar.partition.arrays import GraphArrays
from sar.partition.cut import PartitionOptions
from sar.partition.run import partition
from sar.partition.sources.generate import community_graph
from sar.train import (
    DataOptions,
    ModelOptions,
    Trainer,
    TrainOptions,
    build_model,
    load_node_data,
)

pytestmark = pytest.mark.filterwarnings("ignore:reduce function")
ALL = frozenset({"edges", "halo", "train"})
CUTS = {
    "coarsen": PartitionOptions(3, "coarsen", seed=1),
    "balanced": PartitionOptions(3, "coarsen", ALL, seed=1),
    "hotness": PartitionOptions(3, "hotness", seed=1),
    "coarsen to PyG": PartitionOptions(3, "coarsen", seed=1, format="pyg"),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one part."""
    return losses(community(), tmp_path_factory.mktemp("alone"), PartitionOptions(1))


def community() -> GraphArrays:
    return community_graph(150, 1100, 3, classes=4, features=6)


def losses(graph: GraphArrays, folder: Path, options: PartitionOptions) -> list[float]:
    """Of eight epochs."""
    path = partition(graph, folder / "out", options).path
    torch.manual_seed(0)
    first = build_model(ModelOptions("sage", 2, 8, batch_norm=True), 6, 4).double()

    def case(group: Group) -> list[dict]:
        part = sar.load_partition_data(path, group.rank)
        data = load_node_data(part, DataOptions())
        data.features = data.features.double()
        view = sar.construct_full_graph(part)
        return Trainer(copy.deepcopy(first), view, data, TrainOptions(epochs=8)).fit()

    histories = run_threads(options.num_parts, case)
    return [record["loss"] for record in histories[0]]


@pytest.mark.parametrize("cut", CUTS)
def test_the_trainer_loses_as_on_one_part(cut: str, alone: list[float], tmp_path: Path) -> None:
    found = losses(community(), tmp_path, CUTS[cut])
    assert found == pytest.approx(alone, rel=1e-9)
    assert alone[-1] < 0.9 * alone[0]
