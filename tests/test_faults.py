"""Ranks that die, lie or disagree: every other rank ends, with the cause, in time."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
from harness import WorkerPool, run_threads
from harness.graphs import mixed, star
from harness.parts import Cutter, load_partition

import sar


def case_killed(group: Any, path: str, when: str) -> tuple[str, float]:
    """Rank 1 is killed at some point of a pass; the others tell what they got."""
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    graph = sar.construct_full_graph(data)
    x = torch.ones(graph.num_nodes(), 3, requires_grad=True)
    out = graph.aggregate(x, "sum")

    def end(now: str) -> None:
        if group.rank == 1 and when == now:
            os.kill(os.getpid(), signal.SIGKILL)

    begun = time.monotonic()
    try:
        end("backward")
        out.sum().backward()
        end("forward")
        for _ in range(3):
            graph.aggregate(x.detach(), "mean")
        end("reduction")
        group.all_reduce(torch.zeros(1))
        group.agree(None)
    except sar.CommError as error:
        return str(error), time.monotonic() - begun
    return "nothing", 0.0


@pytest.mark.parametrize("when", ["forward", "backward", "reduction"])
def test_a_killed_rank_ends_the_others(when: str, partitioned: Cutter, either: WorkerPool) -> None:
    path = partitioned(mixed(), 3, "random")
    results = either.run(3, case_killed, path, when, timeout=30.0, may_die={1})
    assert results[1] is None
    for rank in (0, 2):
        words, seconds = results[rank]
        assert words.startswith(f"rank {rank}: ") and "rank 1: died or left early" in words
        assert seconds < 25, "before the timeout: the connection is closed"


def case_killed_while_groups_are_made(group: Any, what: str) -> tuple[str, float]:
    """Rank 1 is killed in place of making a group with the others; they tell what they got."""
    make = group.beside if what == "beside" else group.torch_group
    if group.rank == 1:
        time.sleep(0.5)  # the others wait for it
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        make()
        group.agree(None)
    except sar.CommError as error:
        return str(error), time.monotonic() - begun
    return "nothing", 0.0


@pytest.mark.parametrize("what", ["beside", "torch"])
def test_a_rank_killed_while_groups_are_made(what: str, either: WorkerPool) -> None:
    """Nobody waits for the timeout: a process is seen to have ended before it has connected."""
    results = either.run(3, case_killed_while_groups_are_made, what, timeout=50.0, may_die={1})
    for rank in (0, 2):
        words, seconds = results[rank]
        assert f"rank {rank}" in words and "rank 1: died or left early" in words
        assert seconds < 25, "long before the timeout"


# Files that do not fit. `damage(folder)` changes the copy that one rank reads.


def case_load(group: Any, path: str, other: str, liar: int) -> str:
    """Rank ``liar`` loads another path; every rank returns what it got."""
    try:
        data = sar.load_dgl_partition_data(other if group.rank == liar else path, group.rank, "cpu")
        sar.construct_full_graph(data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def truncate(folder: Path) -> None:
    file = folder / "part1" / "graph.dgl"
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])


def swap(folder: Path) -> None:
    """Another part's file where this one's should be."""
    shutil.copy(folder / "part0" / "graph.dgl", folder / "part1" / "graph.dgl")


def drop_feature(folder: Path) -> None:
    file = str(folder / "part1" / "node_feat.dgl")
    features = dgl.data.utils.load_tensors(file)
    del features["_N/label"]
    dgl.data.utils.save_tensors(file, features)


def widen_feature(folder: Path) -> None:
    file = str(folder / "part1" / "node_feat.dgl")
    features = dgl.data.utils.load_tensors(file)
    features["_N/feat"] = torch.cat([features["_N/feat"]] * 2, 1)
    dgl.data.utils.save_tensors(file, features)


DAMAGE = {
    "truncated graph": truncate,
    "part of another rank": swap,
    "missing feature": drop_feature,
    "wider feature": widen_feature,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_bad_file_on_one_rank_raises_on_all(
    name: str, partitioned: Cutter, tmp_path: Path
) -> None:
    path = partitioned(mixed(), 3, "random")
    folder = tmp_path / "copy"
    shutil.copytree(Path(path).parent, folder)
    other = str(folder / Path(path).name)
    assert run_threads(3, case_load, path, other, 1) == ["nothing"] * 3, "a copy is as good"
    DAMAGE[name](folder)
    messages = run_threads(3, case_load, path, other, 1)
    assert len(set(messages)) == 1, messages
    assert messages[0].startswith("PartitionError: "), messages[0]


def test_another_graph_on_one_rank(partitioned: Cutter, processes: WorkerPool) -> None:
    path, other = partitioned(mixed(), 3, "random"), partitioned(mixed(seed=7), 3, "random")
    for messages in (
        run_threads(3, case_load, path, other, 2),
        processes.run(3, case_load, path, other, 2),
    ):
        assert len(set(messages)) == 1
        assert messages[0].startswith("PartitionError: ") and "graph" in messages[0]


def test_another_json_on_one_rank(partitioned: Cutter) -> None:
    path, other = partitioned(mixed(), 2, "random"), partitioned(star(), 2, "random")
    for wrong, liar, words in ((other, 0, "PartitionError: "), (path + "x", 1, "rank 1")):
        messages = run_threads(2, case_load, path, wrong, liar)
        assert len(set(messages)) == 1 and words in messages[0]


@pytest.mark.parametrize(("parts", "ranks"), [(2, 3), (4, 3), (3, 1)])
def test_as_many_parts_as_ranks(parts: int, ranks: int, partitioned: Cutter) -> None:
    path = partitioned(mixed(), parts, "random")
    messages = run_threads(ranks, case_load, path, path, -1)
    assert len(set(messages)) == 1
    assert "PartitionError" in messages[0] and f"{parts} parts" in messages[0]
    assert str(ranks) in messages[0]


@pytest.mark.parametrize(
    ("parts", "words"), [((1, 0), "rank 0: .*got 1, expected 0"), ((0, 0), "rank 1: .*got 0")]
)
def test_a_rank_loads_its_own_part(parts: tuple[int, int], words: str, partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")
    calls = (
        lambda part: sar.load_dgl_partition_data(path, part),
        lambda part: sar.construct_full_graph(load_partition(path, part)),
        lambda part: sar.construct_mfgs(load_partition(path, part), torch.tensor([]).long(), 1),
    )

    def case(group: Any) -> list[str]:
        found = []
        for call in calls:
            with pytest.raises(sar.PartitionError, match="part_id") as caught:
                call(parts[group.rank])
            found.append(str(caught.value))
        return found

    first, second = run_threads(2, case)
    assert first == second
    assert all(re.match(words, message) for message in first), first


@pytest.mark.parametrize("policy", [{"rounds": 1}, 1, "strict"])
def test_a_policy_is_a_policy(policy: Any, partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> str:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        with pytest.raises(TypeError, match="policy: got .*, expected a sar.Policy") as caught:
            sar.construct_full_graph(data, policy)
        return str(caught.value)

    assert len(set(run_threads(2, case))) == 1


@pytest.mark.parametrize("kind", ["width", "dtype", "narrow", "rounds"])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_rows_that_differ_between_ranks(op: str, kind: str, partitioned: Cutter) -> None:
    """Without the check the transport would cut rows at the wrong places or end the process."""
    path = partitioned(mixed(), 3, "random")

    def case(group: Any) -> str:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        odd = group.rank == 1
        policy = sar.Policy(rounds=2 if odd and kind == "rounds" else 1)
        graph = sar.construct_full_graph(data, policy)
        width = 5 if odd and kind == "width" else 4
        others = {"dtype": torch.float64, "narrow": torch.bfloat16}
        dtype = others.get(kind, torch.float32) if odd else torch.float32
        with pytest.raises(ValueError, match="ranks differ") as caught:
            graph.aggregate(torch.ones(graph.num_nodes(), width, dtype=dtype), op)
        return str(caught.value)

    assert len(set(run_threads(3, case))) == 1


def test_data_of_another_type_on_one_rank(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> str:
        data = None if group.rank == 1 else load_partition(path, 0)
        with pytest.raises(TypeError, match="partition_data: got NoneType") as caught:
            sar.construct_full_graph(data)
        return str(caught.value)

    assert len(set(run_threads(2, case))) == 1
