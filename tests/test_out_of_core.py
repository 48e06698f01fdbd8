"""Training whose tensors do not fit into memory: the bits of training that does, and errors."""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import os
import re
import resource
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import pool
from harness.graphs import bibliography, community, homogeneous
from harness.threads import run_threads
from torch import nn
from torch_geometric import nn as layers

import sar
import sar.pyg
from sar.comm import TurnGroup
from sar.errors import SarError
from sar.memory.spill import Spill

JOB = Path(__file__).parent / "harness" / "out_of_core.py"
NODES, PARTS = 24_000, 6
ROWS, ROOM = 1 << 23, 64 << 20  # float32 that a rank keeps; bytes of all, above what there is


@pytest.fixture(scope="module")
def parts(partitioned: Any) -> str:
    return partitioned(community(NODES, 3 * NODES, 8, classes=8, features=32), PARTS)


@pytest.mark.timeout(300)
def test_models_have_the_bits_of_training_in_memory(parts: str, tmp_path: Path):
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "OMP_NUM_THREADS": "1"}
    path = [str(JOB.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    done = subprocess.run(
        [sys.executable, str(JOB), parts, str(tmp_path)],
        capture_output=True, text=True, env=environment, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 2
    for one in found:
        assert one["same"], one
        assert one["out_of_core_mb"] < one["in_memory_mb"] * 0.75, one
        assert one["written"] > 0 and one["read"] > 0, one
    assert not list(tmp_path.iterdir()), "something is left"


def in_memory() -> int:
    """Bytes of this process that no file backs; those that the allocator keeps go first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(one.split()[1]) for one in lines if one.startswith("RssAnon"))


def train_typed(part: Any, model: nn.Module) -> list[torch.Tensor]:
    """Results and gradients of a second step on edges of several types."""
    data, model = sar.pyg.construct_full_graph(part), copy.deepcopy(model)
    ids = {name: part.node_features[f"{name}/orig_id"].float() for name in part.book.ntypes}
    rows = {name: torch.sin(one.view(-1, 1) * torch.arange(1, 7)) for name, one in ids.items()}
    if len(rows) > 1:
        args: tuple = rows, data.edge_index_dict
    else:
        args = rows["_N"], data.edge_index, data.type
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        out = model(*args)
        out = {"_N": out} if isinstance(out, torch.Tensor) else out
        optimizer.zero_grad()
        sum(sar.global_mean(out[name].square()) for name in sorted(out)).backward()
        sar.gather_grads(model)
        optimizer.step()
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    return [*(out[name].detach() for name in sorted(out)), *grads]


@pytest.mark.parametrize("name, parts, room", [("hgt", 4, 80), ("rgcn", 6, 30)])
def test_several_types_have_the_bits_of_training_in_memory(
    name: str,
    parts: int,
    room: int,
    partitioned: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    """And the numbers of ranks side by side."""
    caplog.set_level("INFO", "sar")
    torch.manual_seed(0)
    if name == "hgt":
        graph = bibliography(12_000)
        metadata = list(graph.num_nodes), list(graph.edges)
        model: nn.Module = layers.HGTConv(6, 64, metadata, heads=4)
    else:
        graph = homogeneous("typed", 66_000, *torch.randint(66_000, (2, 88_000)))
        model = layers.FastRGCNConv(6, 64, 4)
    path = partitioned(graph, parts)
    beside = run_threads(parts, lambda group: train_typed(sar.load_partition_data(path), model))
    want = sar.run_parts(path, train_typed, (model,))
    torch.testing.assert_close(want, beside, rtol=1e-4, atol=1e-6)
    most = in_memory() + (room << 20)
    got = sar.run_parts(path, train_typed, (model,), directory=tmp_path, memory=most)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    read, written = re.findall(r"([\d,]+) MB (?:read|written)", caplog.text)
    assert read != "0" != written


def grow(group: Any, keep: list[torch.Tensor]) -> float:
    """Keep 32 MiB, let the others have their turns, and read them."""
    keep.append(torch.full((ROWS,), float(group.rank)))
    group.turn()
    return float(keep[group.rank].sum())


def run_grow(folder: Path, more: int = ROOM) -> tuple[list[float], Spill]:
    """Six ranks that keep 192 MiB, with room for 64."""
    keep: list[torch.Tensor] = []
    gc.collect()
    spill = Spill(folder, in_memory() + more)

    def body(group: Any) -> float:
        with spill.following(group):
            return grow(group, keep)

    with spill:
        return TurnGroup.run(PARTS, body, between=[spill]), spill


def test_what_asks_nobody_reads_and_writes_the_right_numbers(tmp_path: Path):
    """Arrays of numpy's on memory that left and came back meanwhile."""
    keep: list[Any] = []

    def body(group: Any) -> bool:
        with spill.following(group):
            rows = torch.full((ROWS,), float(group.rank))
            keep.append(array := rows.numpy())
            for step in range(3):
                group.turn()
                right = array[step] == group.rank and (array[5:] == group.rank).all()
                if not right:
                    return False
                array[3] = 7.0  # while it is in the file
                group.turn()
                if rows[3] != 7.0 or rows.sum() != 7.0 + group.rank * (ROWS - 1):
                    return False
                rows[3] = float(group.rank)
        return True

    with Spill(tmp_path, in_memory() + ROOM) as spill:
        assert all(TurnGroup.run(PARTS, body, between=[spill]))
        assert spill.written_bytes > 0
    for rank, array in enumerate(keep):
        assert (array == rank).all()


def test_results_are_in_memory_again_and_nothing_is_left(tmp_path: Path):
    found, spill = run_grow(tmp_path / "made")
    assert found == [rank * float(ROWS) for rank in range(PARTS)]
    assert spill.written_bytes >= 32 << 22
    assert list((tmp_path / "made").iterdir()) == []


def test_rows_that_are_not_written_again_are_written_once(tmp_path: Path):
    kept: dict[int, torch.Tensor] = {}

    def body(group: Any) -> None:
        with spill.following(group):
            kept[group.rank] = torch.ones(ROWS)
            for _ in range(4):
                group.turn()
                kept[group.rank].sum()

    with Spill(tmp_path, in_memory() + ROOM) as spill:
        TurnGroup.run(PARTS, body, between=[spill])
        assert spill.written_bytes <= PARTS * 4 * ROWS < 2 * spill.read_bytes


def test_large_tensors_that_come_where_small_ones_were_leave_memory(tmp_path: Path):
    """They take no place of the small ones for good: as many of these come again all the time."""

    def body(group: Any) -> float:
        with spill.following(group):
            rows, walls = list[torch.Tensor](), list[torch.Tensor]()
            for step in range(40):
                small = [torch.ones(50_000) for _ in range(6)]
                walls.append(torch.zeros(64))
                del small
                rows.append(torch.full((1 << 18,), float(step)))
                group.turn()
            return sum(one.mean().item() for one in rows)

    before = in_memory()
    with Spill(tmp_path, before + (48 << 20)) as spill:
        assert TurnGroup.run(4, body, between=[spill]) == [780.0] * 4
        assert 4 * 39 << 20 < spill.kept.total() < 2 * spill.written_bytes
    assert in_memory() - before < 4 << 20


@pytest.mark.parametrize("more", [-1 << 20, 4 << 20])
def test_too_little_memory_says_what_is_short(more: int, tmp_path: Path):
    """And who knows the least, which it does not."""
    words = r"memory: got [\d,]+ bytes, part 0 needs [\d,]+ at this point, .*sar plan"
    with pytest.raises(SarError, match=words):
        run_grow(tmp_path, more)
    assert list(tmp_path.iterdir()) == []


def aggregated(group: Any) -> tuple[float, int]:
    """Two sums over a table of 32 MiB of whole rows, and an operator of 22 MiB, of which no sum
    knows; what comes of it, and columns at a time."""
    x = torch.full((2048, 256), float(group.rank))
    place = group.rank * len(x), group.size * len(x)
    for _ in range(2):
        at_once = group.table.columns(place[1], x.shape[1], x.dtype)
        blocks = []
        for low in range(0, x.shape[1], at_once):
            (rows,) = group.table.publish([x[:, low : low + at_once]], "rows", *place)
            blocks.append(rows.view(group.size, len(x), -1).sum(0))
        y = torch.cat(blocks, 1)
        z = torch.cat([x, y] * 4 + [x], 1)
    return z.mean().item(), at_once


def run_aggregated(folder: Path, memory: int) -> int:
    """Columns at a time at the end."""
    with Spill(folder, memory) as spill:

        def body(group: Any) -> tuple[float, int]:
            with spill.following(group):
                return aggregated(group)

        found = TurnGroup.run(16, body, between=[spill], table=spill)
    assert [one for one, _ in found] == pytest.approx([(480 + 5 * rank) / 9 for rank in range(16)])
    return found[0][1]


def columns_or_needed(folder: Path, room: int, answer: Connection) -> None:
    """Send the columns at a time in so many bytes, or the bytes that were said to be needed."""
    before = in_memory()
    try:
        answer.send(("ended", run_aggregated(folder, before + room)))
    except SarError as error:
        needed = str(error).partition(" needs ")[2].partition(" at this point")[0]
        answer.send(("needed", int(needed.replace(",", "")) - before))


def in_a_new_process(folder: Path, room: int) -> tuple[str, int]:
    """What it sends: this one's allocator keeps another room for itself after each run."""
    receiving, sending = pool.CONTEXT.Pipe(duplex=False)
    process = pool.CONTEXT.Process(target=columns_or_needed, args=(folder, room, sending))
    pool.start(process)
    sending.close()
    try:
        return receiving.recv()
    finally:
        process.join()
        process.close()
        receiving.close()


@pytest.mark.timeout(120)
def test_more_memory_never_fails_where_less_is_enough(tmp_path: Path):
    """And no run says that it needs more than is enough."""
    rooms = (48, 60, 84, 120)
    kinds, found = zip(*(in_a_new_process(tmp_path, room << 20) for room in rooms), strict=True)
    failed = kinds.count("needed")
    assert kinds == ("needed",) * failed + ("ended",) * (len(rooms) - failed), (rooms, found)
    assert failed, "all memories do"
    assert len({*found[failed:]}) > 1, "all tables are the same"
    for room, needed in zip(rooms, found[:failed], strict=False):
        assert room << 20 < needed < rooms[failed] << 20, (rooms, found)


def test_a_folder_in_memory_is_refused():
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no file system in memory here")
    with pytest.raises(ValueError, match=r"directory: '/dev/shm' is in memory \(tmpfs\)"):
        run_grow(Path("/dev/shm"))


def test_two_runs_in_one_folder(tmp_path: Path):
    with Spill(tmp_path), pytest.raises(SarError, match="in use by another run"):
        run_grow(tmp_path)
    run_grow(tmp_path)


def test_a_disk_that_fills_ends_all_ranks(tmp_path: Path):
    """The limit of a file's size stands for the disk: both refuse bytes in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12 << 20, before[1]))
    try:
        with pytest.raises(SarError, match=rf"directory: '{tmp_path}.*room for .* failed"):
            run_grow(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    run_grow(tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"memory": "20 Gbit"}, ValueError, "memory: got '20 Gbit'"),
        ({"memory": 0}, ValueError, "memory: got 0, expected more than 0"),
        ({"memory": 1.5}, TypeError, "memory: got float"),
        ({"directory": None, "memory": "1GiB"}, ValueError, "memory: got some, expected a dir"),
        ({"directory": 3}, TypeError, "directory: got int"),
    ],
)
def test_run_parts_names_a_wrong_option(
    options: dict, error: type, words: str, parts: str, tmp_path: Path
):
    with pytest.raises(error, match=words):
        sar.run_parts(parts, print, **{"directory": tmp_path, **options})
