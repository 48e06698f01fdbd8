"""Sums out of a table: those of ranks side by side to rounding, whatever fits into it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import training
from harness.graphs import NUM_FEATURES
from harness.threads import run_threads

from sar.comm import TurnGroup
from sar.errors import CommError, SarError

MODELS = (
    "SAGEConv-mean", "SAGEConv-gcn", "GraphConv-both", "GraphConv-right", "GINConv-sum",
    "GraphConv-both-weighted", "SAGEConv-mean-weighted",
)  # fmt: skip


def with_table(size: int, num_bytes: int, case: Any, *args: Any) -> list[Any]:
    return TurnGroup.run(size, lambda group: case(group, *args), table=num_bytes)


def few(setting: training.Setting, size: int) -> int:
    """Bytes of a table for two columns of the features, and what a rank holds beside it."""
    nodes, width = setting.sample.total_nodes, 16 if "GIN" in setting.model else NUM_FEATURES
    return 8 * nodes * 2 + -(-6 * width * 8 * nodes // size)


def numbers(ranks: list[Any]) -> list[torch.Tensor]:
    """All that training gave, in one order."""
    parts = [part for rank in ranks for part in (rank.logits, rank.input_grads, rank.grads)]
    return [part[name] for part in parts for name in sorted(part) if part[name] is not None]


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_ranks_side_by_side(name: str, size: int, partitioned: Any):
    setting = training.Setting(name, dtype=torch.float64)
    path = partitioned(setting.sample, size, "adversarial" if size > 1 else "random")
    args = training.case_train, path, setting, training.start_state(setting)
    want = numbers(run_threads(size, *args))
    whole, some = (numbers(with_table(size, most, *args)) for most in (1 << 26, few(setting, size)))
    for mine, theirs, blocks in zip(whole, want, some, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        assert torch.equal(mine, blocks)


def test_a_table_has_equal_blocks_of_columns_that_fit():
    def columns(group: Any) -> list[int]:
        return [group.table.columns(100, width, torch.float32) for width in (64, 33, 1)]

    wide = 400 * (64 + 6 * 64 // 2)
    assert with_table(2, wide, columns)[0] == [64, 33, 1]
    assert with_table(2, wide - 400, columns)[0] == [32, 33, 1]


def test_a_table_without_room_for_a_column_is_refused(partitioned: Any):
    setting = training.Setting("SAGEConv-mean")
    path = partitioned(setting.sample, 3, "random")
    with pytest.raises(SarError, match="table of rows .* expected at least"):
        with_table(3, 100, training.case_train, path, setting, training.start_state(setting))


def test_ranks_that_sum_other_rows_are_told():
    def publish(group: Any) -> None:
        group.table.publish([torch.zeros(3, 2)], "mean" if group.rank else "sum", 3 * group.rank, 6)

    with pytest.raises(
        CommError, match="ranks sum different rows .*rank 0: .'sum'.*rank 1: .'mean'"
    ):
        with_table(2, 1 << 20, publish)
