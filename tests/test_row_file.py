"""Features that stay in a file: the same numbers, bit for bit, and not in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_threads
from harness.graphs import homogeneous, mixed
from harness.parts import Cutter
from torch import Tensor

import sar
from sar.partition.column import Column
from sar.partition.features import FeatureStore
from sar.train import (
    DataOptions,
    ModelOptions,
    Trainer,
    TrainOptions,
    build_model,
    load_node_data,
    memory,
)


def test_a_feature_of_any_alignment(partitioned: Cutter, tmp_path: Path) -> None:
    """DGL's files align nothing; the names before a tensor move it."""
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> None:
        store = sar.load_dgl_partition_data(path, group.rank, "cpu").node_features
        for name in ("_N/feat", "_N/label", "_N/train_mask"):
            file = store.to_file(name, folder=tmp_path)
            assert file.tensor.data_ptr() % file.tensor.element_size() == 0
            assert torch.equal(file.tensor, store[name]) and file.tensor.dtype == store[name].dtype
        wide = store.to_file("_N/feat", torch.float64, tmp_path, lambda block: block * 2)
        assert torch.equal(wide.tensor, store["_N/feat"].double() * 2)

    run_threads(2, case)


def history(group: Any, path: str, model: Any, options: DataOptions, where: Any) -> list[Any]:
    part = sar.load_dgl_partition_data(path, group.rank, "cpu")
    data = load_node_data(part, options, map_features=where)
    assert bool(data.files) == (where is not False)
    graph = sar.construct_full_graph(part)
    trainer = Trainer(copy.deepcopy(model), graph, data, TrainOptions(epochs=3))
    records = [(record["loss"], record["train_acc"]) for record in trainer.fit()]
    return [records, *(p.detach() for p in trainer.model.parameters())]


@pytest.mark.parametrize("name", ["sage", "gin"])
@pytest.mark.parametrize("normalize", [False, True])
def test_training_is_the_same_bit_for_bit(
    name: str, normalize: bool, partitioned: Cutter, tmp_path: Path
) -> None:
    path = partitioned(mixed(), 3, "random")
    model = build_model(ModelOptions(name, 2, 8, batch_norm=True), 6, 4)
    options = DataOptions(normalize_features=normalize)
    found = [
        run_threads(3, history, path, model, options, where) for where in (False, str(tmp_path))
    ]
    for one, other in zip(*found, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))


def test_a_folder_that_is_not_there_is_named_on_every_rank(partitioned: Cutter) -> None:
    path = partitioned(homogeneous("pair", 4, [0, 1, 2, 3], [1, 2, 3, 0]), 2, [0, 0, 1, 1])

    def case(group: Any) -> str:
        part = sar.load_dgl_partition_data(path, group.rank, "cpu")
        with pytest.raises(OSError, match="map_features: no room or no access in /nowhere") as info:
            load_node_data(part, DataOptions(), map_features="/nowhere")
        return str(info.value)

    assert len(set(run_threads(2, case))) == 1


def test_features_in_a_file_take_no_memory(tmp_path: Path) -> None:
    """64 MB, written and read by blocks."""
    size, width = 1 << 17, 128

    class Twos(Column):
        dtype, shape = torch.float32, (size, width)

        def read(
            self, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
        ) -> Tensor:
            return torch.full(((size if stop is None else stop) - start, width), 2.0, dtype=dtype)

    before, store = memory.anonymous_mb(), FeatureStore({})
    store.map("x", Twos())
    file = store.to_file("x", folder=tmp_path)
    total = sum(float(block.sum()) for block in file.tensor.split(1 << 12))
    assert total == 2.0 * size * width
    assert memory.anonymous_mb() - before < 50

    def released() -> float:
        """MB that leave this process at a release, all pages read just before."""
        file.tensor.view(-1)[:: 4096 // 4].sum()
        resident = memory.resident_mb()
        file.release()
        return resident - memory.resident_mb()

    assert max(released() for _ in range(5)) > 50  # a busy system takes some away by itself
