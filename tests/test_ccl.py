"""`backend="ccl"`: the suite's cases over oneCCL's binding where it is installed, and over a
stand-in with its faults everywhere; how a rank that dies is told; what the build script refuses.

`SAR_TEST_BACKEND=ccl` has the workers of any other test use the binding, too.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import runpy
import socket
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dgl.nn
import pytest
import test_comm
import test_faults
import test_overlap
import test_sampling
import torch
import torch.distributed as dist
from harness import WorkerPool, run_threads
from harness.blocking import NAME
from harness.graphs import mixed, to_dgl
from harness.nursery import Nursery
from harness.parts import Cutter
from harness.rows import Part, assert_share, results, whole
from harness.sage import Then

import sar
from sar.partition.arrays import GraphArrays

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples/deploy/build_oneccl.py"
IS_THERE = importlib.util.find_spec(NAME) is not None
BACKENDS = [
    "stand-in",
    pytest.param(
        "ccl",
        marks=pytest.mark.skipif(not IS_THERE, reason=f"needs {NAME}; {SCRIPT.name} builds it"),
    ),
]
LIMIT = 30.0  # seconds of a collective; the machine may be busy


@pytest.fixture(scope="module", params=BACKENDS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[WorkerPool]:
    """Workers over the binding, or over what blocks as it does."""
    pool = WorkerPool(tmp_path_factory.mktemp("ccl"), {"SAR_TEST_BACKEND": request.param})
    yield pool
    pool.close()


@pytest.mark.parametrize("size", [2, 4])
def test_collectives(size: int, ranks: WorkerPool) -> None:
    expected = run_threads(size, test_comm.case_collectives)
    assert ranks.run(size, test_comm.case_collectives, timeout=LIMIT) == expected
    errors = [None] * (size - 1) + [ValueError("bad width 7")]
    found = ranks.run(size, test_comm.case_agree, errors, timeout=LIMIT)
    told = "ValueError", f"rank {size - 1}: loading: bad width 7"
    assert [one[:2] for one in found] == [told] * size


def test_rounds_of_rows(ranks: WorkerPool) -> None:
    for num_rounds in (1, 3):
        case = test_comm.case_rotation, "mixed", num_rounds, False
        test_comm.check_rotation(4, "mixed", ranks.run(4, *case, timeout=LIMIT))


def case_layers(group: Any, path: str, model: Any, rows: Any, factor: Any, want: Any) -> None:
    assert group.backend == "ccl"
    part = Part(group, path)
    got = results(part.graph, sar.optimize(model), rows[part.nodes], factor[part.nodes])
    assert_share(group, got, want, part.nodes)


def test_layers_are_those_of_dgl(ranks: WorkerPool, partitioned: Cutter) -> None:
    """On two ranks, and on four of which one has no node."""
    arrays = mixed()
    torch.manual_seed(0)
    gat = dgl.nn.GATConv(4, 3, 2, allow_zero_in_degree=True)
    model = Then(dgl.nn.SAGEConv(4, 4, "mean"), torch.tanh, gat).double()
    rows = whole(arrays.total_nodes, (4,), seed=1)
    factor = whole(arrays.total_nodes, (2, 3), seed=2)
    want = results(to_dgl(arrays), copy.deepcopy(model), rows, factor)
    for size, method in ((2, "random"), (4, [node % 3 for node in range(arrays.total_nodes)])):
        given = partitioned(arrays, size, method), model, rows, factor, want
        ranks.run(size, case_layers, *given, timeout=LIMIT)


def case_orders(group: Any) -> list[list[float]]:
    """Sums, rows, and collectives of a user's own group, begun in another order on each rank."""
    group.prepare_sums()
    users = group.torch_group()
    total, ones, rows = torch.ones(2), torch.ones(2), torch.empty(2)
    counts = [1] * group.size

    def begin(which: int) -> Any:
        if which == 0:
            return group.begin_sum(total)
        if which == 1:
            return dist.all_reduce(ones, group=users, async_op=True)
        return group.exchange(rows, torch.full((2,), float(group.rank)), counts, counts)

    begun = {which % 3: begin(which % 3) for which in range(group.rank, group.rank + 3)}
    for which in range(3):
        begun[which].wait()
    return [total.tolist(), ones.tolist(), rows.tolist()]


def test_no_order_of_groups_deadlocks(ranks: WorkerPool, partitioned: Cutter) -> None:
    """Nor does a thread that draws batches, or a sum of gradients inside of backward."""
    assert ranks.run(2, case_orders, timeout=LIMIT) == [[[2.0, 2.0], [2.0, 2.0], [0.0, 1.0]]] * 2
    ranks.run(3, test_overlap.beside_the_stream, partitioned(mixed(), 3), timeout=LIMIT)
    columns = mixed().node_data["_N"]
    twice = GraphArrays(
        "twice", mixed().num_nodes, mixed().edges, {"_N": columns | {"copy": columns["feat"]}}
    )
    path = partitioned(twice.with_orig_ids(), 3)
    want = run_threads(3, test_sampling.case_beside, path)
    assert ranks.run(3, test_sampling.case_beside, path, timeout=LIMIT) == want


def case_join_again(group: Any) -> tuple[str, str, float, str]:
    """The backend is that of the default group, which the user has made; further groups are not."""
    sar.shutdown()
    with pytest.raises(ValueError, match="got 'gloo', but the process group says 'ccl'"):
        sar.initialize_comms(group.rank, group.size, backend="gloo")
    again = sar.initialize_comms(group.rank, group.size, timeout=LIMIT)
    total, beside = float(again.all_reduce(torch.ones(1))), again.beside()
    beside.all_reduce(torch.ones(1))
    return again.backend, beside.backend, total, str(again.device)


def test_a_process_joins_again(ranks: WorkerPool) -> None:
    assert ranks.run(2, case_join_again, timeout=LIMIT) == [("ccl", "gloo", 2.0, "cpu")] * 2
    ranks.close()  # the pool knows nothing of it


@pytest.mark.parametrize("when", ["backward", "reduction"])
def test_a_killed_rank_is_named(when: str, ranks: WorkerPool, partitioned: Cutter) -> None:
    """Though the binding waits for ever: well before the timeout."""
    path = partitioned(mixed(), 3, "random")
    case = test_faults.case_killed, path, when
    results = ranks.run(3, *case, timeout=LIMIT, may_die={1})
    for rank in (0, 2):
        words, seconds = results[rank]
        assert words.startswith(f"rank {rank}: ") and "rank 1: died or left early" in words
        assert seconds < 20


def case_late(group: Any) -> tuple[str, float]:
    """Rank 1 comes when the others have given up."""
    if group.rank == 1:
        time.sleep(8)
    begun = time.monotonic()
    try:
        group.all_to_all(torch.ones(group.size), [1] * group.size, [1] * group.size)
    except sar.CommError as error:
        return str(error), time.monotonic() - begun
    return "nothing", 0.0


def test_a_silent_rank_ends_the_others_after_the_timeout(ranks: WorkerPool) -> None:
    results = ranks.run(3, case_late, timeout=5.0)
    for rank in (0, 2):  # they have no store in which it could be named
        words, seconds = results[rank]
        assert f"rank {rank}: a collective failed: another rank left or did not answer" in words
        assert 5 <= seconds < 15
    ranks.close()  # what they wait in does not end


SCRIPT_OF_A_RANK = """
import os, sys, torch
from harness import blocking
blocking.install(sys.argv[1])
import sar
group = sar.initialize_comms(backend="ccl", timeout=20)
group.all_reduce(torch.ones(1))
if group.rank == 1:
    if sys.argv[2] == "raises":
        raise ValueError("bad width 7")
    os.kill(os.getpid(), 9)
try:
    group.all_reduce(torch.ones(1))
except sar.CommError as error:
    print(error, flush=True)
    if sys.argv[2] == "raises":
        raise
sar.shutdown()
try:
    sar.initialize_comms(backend="ccl")
except sar.CommError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize("which", BACKENDS)
@pytest.mark.parametrize(
    ("end", "cause"), [("raises", "rank 1: ValueError: bad width 7"), ("dies", "rank 1: died")]
)
def test_processes_end(which: str, end: str, cause: str, nursery: Nursery, tmp_path: Path) -> None:
    """Also the one that goes on after the error: nothing waits for what the binding holds."""
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT_OF_A_RANK)
    common = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "WORLD_SIZE": "3"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    words = [str(script), which, end]
    children = [nursery.start(words, common | {"RANK": str(rank)}) for rank in range(3)]
    try:
        statuses = [child.wait(60) for child in children]
        assert statuses == [1, 1 if end == "raises" else -9, 1]
        for child in (children[0], children[2]):
            assert cause in child.text("out"), child.text("err")
            assert end == "raises" or "start a new process" in child.text("out")
    finally:
        for child in children:
            child.kill()


def test_a_missing_binding_names_what_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAME, None)
    with pytest.raises(sar.MissingDependencyError, match="build_oneccl.py .docs/oneccl.md.*gloo"):
        sar.initialize_comms(0, 1, backend="ccl")


def test_a_binding_of_another_torch_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / f"{NAME}.py").write_text("raise ImportError('undefined symbol: c10')")
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(sar.MissingDependencyError, match="does not load with torch .*symbol: c10"):
        sar.initialize_comms(0, 1, backend="ccl")


# ---------------------------------------------------------------- the script that builds it


def sources(folder: Path) -> Path:
    """What the script takes for a copy of the sources, but of another commit."""
    (folder / "src/cpu").mkdir(parents=True)
    for name in ("CMakeLists.txt", "src/cpu/cpu_ccl.cpp"):
        (folder / name).write_text("cmake_minimum_required(VERSION 3.13)\n")
    return folder


@pytest.mark.parametrize(
    ("words", "change", "told"),
    [
        (["--jobs", "0"], {}, "--jobs: got 0, expected at least 1"),
        ([], {"PATH": ""}, "cmake, make, c++, git: not found"),
        (["--source", "{tmp}"], {"PATH": ""}, "cmake, make, c++: not found"),
        ([], {"version": "2.7.1+cpu"}, "torch: got 2.7.1+cpu, expected 2.8 or later"),
        ([], {"cuda": "12.6"}, "expected a build for CPUs alone"),
        ([], {"machine": "aarch64"}, "got Linux aarch64, expected Linux x86_64"),
        (["--source", "{tmp}"], {}, "expected a checkout of https://github.com/intel/torch-ccl"),
        (["--source", "{tmp}/other"], {}, "the sources are not those of commit 1fc0c38"),
    ],
)
def test_the_script_refuses(
    words: list[str],
    change: dict[str, str],
    told: str,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
) -> None:
    sources(tmp_path / "other")
    script = runpy.run_path(str(SCRIPT))
    monkeypatch.setattr(script["sys"], "prefix", str(tmp_path))
    changed = script["build"].__globals__
    changed["run"] = lambda *command, **options: None  # nothing is installed
    changed["sysconfig"] = types.SimpleNamespace(
        get_path=lambda name: str(tmp_path) if name == "platlib" else str(header(tmp_path))
    )
    if "PATH" in change:
        monkeypatch.setenv("PATH", change["PATH"])
    else:
        monkeypatch.setattr(script["shutil"], "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(torch, "__version__", change.get("version", "2.13.0+cpu"))
    monkeypatch.setattr(torch.version, "cuda", change.get("cuda"))
    if "machine" in change:
        monkeypatch.setattr(script["platform"], "machine", lambda: change["machine"])
    with pytest.raises(SystemExit, match=re.escape(told)):
        script["main"]([word.replace("{tmp}", str(tmp_path)) for word in words])
    assert not (tmp_path / NAME).exists(), "nothing is written"


def header(folder: Path) -> Path:
    (folder / "Python.h").touch()
    return folder
