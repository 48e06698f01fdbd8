"""Tensors that leave memory in ways that nobody expects: the same bits as where all stays."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sar.comm import Group, TurnGroup
from sar.errors import CommError
from sar.memory.spill import Spill

SIZE, MIB = 3, 1 << 20
COUNT = 1 << 21  # float32 of 8 MiB
Pass = Callable[[], None]


def in_memory() -> int:
    """Bytes of this process that no file backs; those that the allocator keeps go first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(one.split()[1]) for one in lines if one.startswith("RssAnon"))


def passing(group: Group) -> Pass:
    """A pass of turns in which each rank needs 16 MiB for other things."""

    def go() -> None:
        for _ in range(2):
            group.turn()
            float(sum(torch.full((COUNT,), 1.0).sum() for _ in range(2)))

    return go


def run(folder: Path | None, case: Callable[[Group, Pass], Any], more: int = 40) -> list[Any]:
    """What ranks return that keep 16 MiB beside what the case does, with ``more`` MiB for all."""

    def body(group: Group) -> Any:
        held = [torch.full((COUNT,), float(group.rank + i)) for i in range(2)]
        found = case(group, passing(group))
        return found, [one.sum().item() for one in held]

    if folder is None:
        return TurnGroup.run(SIZE, body)
    with Spill(folder, in_memory() + more * MIB) as spill:

        def followed(group: Group) -> Any:
            with spill.following(group):
                return body(group)

        found = TurnGroup.run(SIZE, followed, between=[spill])
        assert spill.written_bytes > 0
    return found


def rows(group: Group) -> Tensor:
    return torch.arange(COUNT, dtype=torch.float32) * (group.rank + 1)


def resized(group: Group, go: Pass) -> Any:
    x = rows(group)
    go()
    x.resize_(COUNT + COUNT // 2)
    x[COUNT:] = 1
    go()
    x.untyped_storage().resize_(4 * COUNT)
    go()
    out = torch.empty(0)
    torch.mul(x[:COUNT], 2, out=out)
    go()
    return x[:COUNT].clone(), out


def shared(group: Group, go: Pass) -> Any:
    x = rows(group)
    go()
    x.share_memory_()
    go()
    x[4] = 1
    go()
    return x.clone()


def copied(group: Group, go: Pass) -> Any:
    x, stream = rows(group), io.BytesIO()
    go()
    torch.save(x[: COUNT // 2].clone(), stream)
    stream.seek(0)
    found = [copy.deepcopy(x), torch.load(stream)]
    go()
    for one in found:
        one[3] = 8
        go()
    return found


def nested(group: Group, go: Pass) -> Any:
    parts = torch.nested.nested_tensor([torch.rand(300, 900), torch.rand(400, 900)])
    go()
    twice = parts * 2
    go()
    return [one.clone() for one in twice.unbind()]


def aliased(group: Group, go: Pass) -> Any:
    x = rows(group)
    view, array, other = x.view(1024, -1)[3:900:5].t(), x.numpy(), torch.from_dlpack(x)
    for step in range(2):
        go()
        array[7 + step], other[9 + step] = 3, 4
        go()
        view[5:9].add_(1)
    return x, view.clone(), float(array[::512].sum())


def of_another_rank(group: Group, go: Pass) -> Any:
    made = group.shared.setdefault("rows", {})
    made[group.rank] = rows(group)
    go()
    x = made[(group.rank + 1) % SIZE]
    x[group.rank] = 9
    go()
    return x.clone(), made[group.rank].sum()


def forward_mode(group: Group, go: Pass) -> Any:
    """Derivatives that are known to be 0 are tensors without memory."""
    x, scale = rows(group) / COUNT, rows(group)

    def function(a: Tensor) -> Tensor:
        return (a.sin() * scale).cumsum(0) + torch.where(x > 0.5, a, x * 3)

    found = torch.func.jvp(function, (x,), (torch.ones_like(x),))
    go()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, scale)
        parts = torch.autograd.forward_ad.unpack_dual(function(dual))
    go()
    return *found, *parts


CASES = [resized, shared, copied, nested, aliased, of_another_rank, forward_mode]


@pytest.mark.parametrize("case", CASES)
def test_tensors_that_get_other_memory_or_are_seen_elsewhere(case: Callable, tmp_path: Path):
    torch.manual_seed(0)
    want = run(None, case)
    torch.testing.assert_close(run(tmp_path, case, 52), want, rtol=0, atol=0)


def test_copies_and_what_is_loaded_leave_memory_too(tmp_path: Path):
    """Ten copies of 8 MiB that no operator has made, of each rank, with room for eight in all."""

    def case(group: Group, go: Pass) -> Any:
        copies = []
        for step in range(10):
            copies.append(copy.deepcopy(rows(group)))
            copies[-1][step] = -1
            go()
        return [one.sum().item() for one in copies]

    assert run(tmp_path, case, 64) == run(None, case)


def test_a_child_of_a_fork_reads_what_was_out_and_writes_nothing(tmp_path: Path):
    """The parent goes on, and writes other numbers where those of the child lay."""

    def child(x: Tensor, go_on: int, answer: int) -> None:
        signal.alarm(100)
        torch.set_num_threads(1)  # those of the parent are not here
        os.read(go_on, 1)
        right = bool((x == torch.arange(COUNT)).all())
        more = [torch.full((COUNT,), 7.0) for _ in range(8)]  # too much for the parent
        right = right and bool((x == torch.arange(COUNT)).all()) and bool((more[0] == 7).all())
        os.write(answer, b"right" if right else b"wrong")

    def case(group: Group, go: Pass) -> Any:
        x = torch.arange(COUNT, dtype=torch.float32)
        go()
        (go_on, tell), (hear, answer) = os.pipe(), os.pipe()
        pid = os.fork() if group.rank == 0 else -1
        if pid == 0:
            try:
                child(x, go_on, answer)
            finally:
                os._exit(0)
        os.close(answer)
        x.zero_()
        go()
        del x
        y = [torch.full((COUNT,), 99.0 + group.rank) for _ in range(3)]
        go()
        said = b""
        if pid > 0:
            os.write(tell, b"x")
            said = os.read(hear, 9)
            os.waitpid(pid, 0)
        go()
        for one in (go_on, tell, hear):
            os.close(one)
        return said, [one.unique().tolist() for one in y]

    found = run(tmp_path, case, 64)
    assert found[0][0][0] == b"right"
    assert [one[0][1] for one in found] == [[[99.0 + rank]] * 3 for rank in range(SIZE)]


def test_memory_of_others_than_torch_is_seen_within_a_long_turn(tmp_path: Path):
    def case(group: Group, go: Pass) -> int:
        kept = [torch.ones(COUNT) for _ in range(6)]
        arrays = [np.ones(COUNT, np.float32) for _ in range(4)]
        for _ in range(2):
            float(sum(one.sum() for one in kept for _ in range(20)))
        return in_memory() if len(arrays) else 0

    most = in_memory() + 64 * MIB
    with Spill(tmp_path, most) as spill:

        def body(group: Group) -> int:
            with spill.following(group):
                return case(group, passing(group))

        (found,) = TurnGroup.run(1, body, between=[spill])
        assert spill.written_bytes > 0
    assert found < most + 8 * MIB


def publishes(group: Group) -> None:
    group.table.publish([torch.ones(2, 3)], "mean", 2 * group.rank, 2 * SIZE)  # type: ignore[union-attr]


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_rank_that_has_fewer_layers_than_others_is_told(odd: int):
    def case(group: Any) -> None:
        for _ in range(1 if group.rank == odd else 2):
            publishes(group)
        group.all_reduce(torch.ones(3))

    with pytest.raises(CommError, match=r"ranks call different things.*all_?reduce|sum of 3"):
        TurnGroup.run(SIZE, case, table=1 << 20)
