"""Ranks that take turns: the bits of ranks that compute side by side, and errors that end all."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import training
from harness.graphs import community
from harness.threads import run_threads

import sar
from sar.comm import Group, ThreadGroup, TurnGroup
from sar.errors import CommError, PartitionError, SarError
from sar.sampling import NeighborLoader

SIZE = 3
MODELS = (
    "SAGEConv-mean", "GraphConv-both", "GINConv-sum", "GATConv", "EdgeConv-norm", "mailbox",
    "HeteroGraphConv-sum",
)  # fmt: skip


def in_turns(size: int, case: Callable[..., Any], *args: Any, seconds: float = 60) -> list[Any]:
    """What the ranks return; a run that hangs fails."""
    found: dict[str, Any] = {}

    def main() -> None:
        try:
            found["results"] = TurnGroup.run(size, lambda group: case(group, *args))
        except BaseException as error:  # noqa: BLE001 - raised again below
            found["error"] = error

    runner = threading.Thread(target=main, daemon=True)
    runner.start()
    runner.join(seconds)
    assert not runner.is_alive(), "ranks in turns still run"
    if "error" in found:
        raise found["error"]
    return found["results"]


def test_turns_go_forth_and_back_and_one_rank_computes():
    order: list[int] = []
    busy: list[int] = []

    def case(group: Group) -> None:
        for _ in range(3):
            busy.append(group.rank)
            order.append(group.rank)
            time.sleep(0.01)
            assert busy == [group.rank]
            busy.remove(group.rank)
            group.turn()

    in_turns(SIZE, case)
    assert order == [0, 1, 2, 2, 1, 0, 0, 1, 2]


@pytest.mark.parametrize("name", MODELS)
def test_training_has_the_bits_of_ranks_side_by_side(name: str, partitioned: Any):
    setting = training.Setting(name, dtype=torch.float32)
    path = partitioned(setting.sample, 4, "adversarial")
    args = training.case_train, path, setting, training.start_state(setting)
    want = run_threads(4, *args)
    got = in_turns(4, *args)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.loss == theirs.loss
        for one, other in (
            (mine.logits, theirs.logits),
            (mine.input_grads, theirs.input_grads),
            (mine.grads, theirs.grads),
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_random_numbers_are_each_ranks_own():
    def case(group: Group) -> list:
        torch.manual_seed(group.rank)
        drawn = []
        for _ in range(2):
            group.turn()
            drawn.append([torch.rand(()).item(), np.random.rand(), random.random()])
        return drawn

    before = torch.get_rng_state()
    got = in_turns(SIZE, case)
    assert torch.equal(torch.get_rng_state(), before), "the caller's own state has changed"
    for rank, drawn in enumerate(got):
        torch.manual_seed(rank)
        assert [one[0] for one in drawn] == [torch.rand(()).item(), torch.rand(()).item()]
        assert [one[1:] for one in drawn] == [one[1:] for one in got[0]]


def test_groups_of_some_ranks_take_turns_too():
    def case(group: Group) -> float:
        mine = group.part([0, 2] if group.rank != 1 else [1])
        total = mine.all_reduce(torch.tensor(float(group.rank + 1)))
        return float(group.all_reduce(total))

    assert in_turns(SIZE, case) == [10.0] * SIZE


def fails(group: Group) -> None:
    if group.rank == 1:
        raise ValueError("of rank 1")
    group.turn()


def ends_early(group: Group) -> None:
    if group.rank != 1:
        group.turn()


def elsewhere(group: Group) -> None:
    other = group.part(range(group.size))
    (other if group.rank == 1 else group).turn()


def calls_another(group: Group) -> None:
    if group.rank == 1:
        group.broadcast(torch.zeros(2))
    else:
        group.all_reduce(torch.zeros(2))


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        (fails, ValueError, "of rank 1"),
        (ends_early, CommError, "rank 1 has ended"),
        (elsewhere, CommError, "wait for each other in different collectives"),
        (calls_another, CommError, "ranks call different things"),
    ],
)
def test_an_error_ends_all_ranks_at_once(case: Callable, error: type, words: str):
    begin = time.monotonic()
    with pytest.raises(error, match=words):
        in_turns(SIZE, case, seconds=20)
    assert time.monotonic() - begin < 10


def test_run_parts_calls_a_function_for_each_part(partitioned: Any, tmp_path: Path):
    path = partitioned(community(60, 300, 3, classes=3, features=4), SIZE)

    def total(partition: Any, scale: float) -> tuple:
        rows = partition.node_features["_N/feat"].double().sum(0) * scale
        everybody = sar.current_group().all_reduce(rows.clone())
        return partition.part_id, rows, everybody

    got = sar.run_parts(path, total, (2.0,), directory=tmp_path / "spill")
    want = ThreadGroup.run(SIZE, lambda _: total(sar.load_partition_data(path), 2.0))
    assert [one[0] for one in got] == list(range(SIZE))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_run_parts_tells_what_is_wrong(partitioned: Any, tmp_path: Path):
    path = partitioned(community(60, 300, 3, classes=3, features=4), SIZE)
    with pytest.raises(TypeError, match=r"function: got .*, expected a function"):
        sar.run_parts(path, 3, directory=tmp_path)
    with pytest.raises(TypeError, match=r"args: got str"):
        sar.run_parts(path, print, "x", directory=tmp_path)
    with pytest.raises(PartitionError, match="no such file"):
        sar.run_parts(path + "x", print, directory=tmp_path)
    with pytest.raises(SarError, match="run_parts: called where there is a group"):
        ThreadGroup.run(1, lambda _: sar.run_parts(path, print, directory=tmp_path))


def test_mini_batches_are_those_of_ranks_side_by_side(partitioned: Any):
    """A loader has no thread that would take its rank's turn."""
    path = partitioned(community(300, 900, 3), SIZE)

    def case(group: Group) -> list[torch.Tensor]:
        data = sar.load_partition_data(path)
        seeds = torch.ones(len(data.node_features["_N/feat"]), dtype=torch.bool)
        found = list[torch.Tensor]()
        with NeighborLoader(data, [3, 2], seeds, batch_size=20, as_="tensors") as loader:
            for batch in loader:
                feat = batch.node_data["_N"]["feat"].requires_grad_()
                sar.global_mean(feat.square()).backward()
                found += [batch.node_ids["_N"], feat.grad]
        return found

    want, got = run_threads(SIZE, case), in_turns(SIZE, case)
    assert len(want[0]) > 2
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
