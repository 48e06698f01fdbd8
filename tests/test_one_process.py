"""The same script alone, under torchrun, and on ranks that ``sar.launch`` starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.failures import misbehave
from harness.graphs import mixed
from harness.nursery import Nursery
from harness.parts import Cutter
from test_examples import start_ranks

import sar
from sar.cli import call_files, worker
from sar.cli.fork_server import REPORT

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "one_loop.py"
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def losses_of(*words: str) -> list[float]:
    """What ``python words...`` prints."""
    done = subprocess.run(
        [sys.executable, *words], env=environment(), capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return losses_in(done.stdout)


def losses_in(printed: str) -> list[float]:
    """The losses that a script has printed; those that it got back from its ranks are the same."""
    (line,) = [one for one in printed.splitlines() if one.startswith("losses ")]
    for other in printed.splitlines():
        assert not other.startswith("launched ") or other.split(" ", 1)[1] == line.split(" ", 1)[1]
    return json.loads(line.split(" ", 1)[1])


@pytest.mark.system
def test_alone_by_torchrun_and_launched_the_losses_are_the_same(
    partitioned: Cutter, nursery: Nursery
) -> None:
    one, two = partitioned(mixed(), 1), partitioned(mixed(), 2, "random")
    child = nursery.start([str(SCRIPT), one], environment())
    try:
        assert child.wait(100) == 0, child.text("err")[-3000:]
    finally:
        child.kill()
    launched = losses_of(str(SCRIPT), two, "2")
    ranks = start_ranks(nursery, 2, [str(SCRIPT), two], environment())
    alone, torchrun = (losses_in(one.text("out")) for one in (child, ranks[0]))
    assert launched == torchrun, "the same parts: bit for bit"
    assert launched == pytest.approx(alone, rel=1e-5) and alone[-1] < alone[0]


@pytest.mark.system
@pytest.mark.usefixtures("bare")
def test_the_error_of_the_rank_that_failed_is_raised() -> None:
    with pytest.raises(KeyError, match="no such feature") as caught:
        sar.launch(misbehave, 2, ("raise",), threads=1)
    cause = str(caught.value.__cause__)
    assert cause.startswith("rank 1:\n") and 'raise KeyError("no such feature")' in cause
    with pytest.raises(sar.SarError, match="rank 1: killed by SIGKILL; out of memory?"):
        sar.launch(misbehave, 2, ("die",), threads=1)


def test_an_error_that_cannot_be_pickled_comes_as_text(tmp_path: Path) -> None:
    class Own(Exception):
        pass

    call_files.write_error(tmp_path, 2, sar.CommError("a peer is gone"))
    assert call_files.first_error(tmp_path) is None
    call_files.write_error(tmp_path, 1, Own("why"))
    error = call_files.first_error(tmp_path)
    assert type(error) is sar.SarError and str(error) == "Own: why"
    with pytest.raises(TypeError, match="main: returned a function that cannot be handed"):
        call_files.write_result(tmp_path, lambda: 0)
    call_files.write_result(tmp_path, {"loss": torch.ones(2)})
    assert call_files.read_result(tmp_path)["loss"].tolist() == [1, 1]


def top_level(_: Any = None) -> None:
    return None


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((lambda: 0, 2), TypeError, "main: got what cannot be handed to a process .*lambda"),
        ((top_level, 2, (lambda: 0,)), TypeError, "args: got what cannot be handed to a process"),
        ((3, 2), TypeError, "main: got int, expected a function"),
        ((top_level, "2"), TypeError, "nproc: got str, expected an int"),
        ((top_level, 0), ValueError, "nproc: got 0, expected 1 or more"),
        ((top_level, 10**6), ValueError, "nproc: got 1000000, expected at most .* 64 for each"),
        ((top_level, 2, "abc"), TypeError, "args: got str, expected a tuple"),
        ({"threads": 0}, ValueError, "threads: got 0, expected 1 or more"),
        ({"threads": "a"}, TypeError, "threads: got str, expected an int or None"),
        ({"timeout": -1}, ValueError, "timeout: got -1, expected seconds, more than 0"),
        ({"timeout": float("nan")}, ValueError, "timeout: got nan, expected seconds"),
        ({"timeout": "5"}, TypeError, "timeout: got str, expected seconds"),
        ({"allocator": "x"}, ValueError, "allocator: got 'x', expected one of system"),
    ],
)
def test_bad_arguments(arguments: tuple | dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        if isinstance(arguments, dict):
            sar.launch(top_level, 1, **arguments)
        else:
            sar.launch(*arguments)


def test_what_a_notebook_defines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    session = types.ModuleType("__main__")
    function = types.FunctionType(top_level.__code__, {}, "cell")
    function.__module__, function.__qualname__ = "__main__", "cell"
    session.cell = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", session)
    for arguments in ((function, 2), (top_level, 2, (function,))):
        with pytest.raises(TypeError, match="a notebook or an interactive session.*%%writefile"):
            sar.launch(*arguments)


def test_a_main_that_leaves(tmp_path: Path) -> None:
    """With the status 0 it returned None; with another it failed, and a silent end is told."""
    assert worker._call(sys.exit, ()) is None and worker._call(sys.exit, (0,)) is None
    with pytest.raises(SystemExit, match="3"):
        worker._call(sys.exit, (3,))
    with pytest.raises(sar.SarError, match=r"rank 0: ended before main returned.*os\._exit"):
        call_files.read_result(tmp_path)


def test_what_ranks_do_not_find_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a function that is defined under the script's guard."""
    call_files.write_call(tmp_path, top_level, ())
    monkeypatch.delattr(sys.modules[__name__], "top_level")
    with pytest.raises(TypeError, match="main, args: got what a rank does not find .*top_level"):
        call_files.read_call(tmp_path)


def test_a_script_without_a_guard_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPORT, "7")
    with pytest.raises(sar.SarError, match='put the call under if __name__ == "__main__":'):
        sar.launch(top_level, 2)


def test_a_process_alone_is_a_group_of_one(
    partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for variable in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        with monkeypatch.context() as others:
            others.setenv(variable, "3")
            with pytest.raises(ValueError, match=f"{variable}=3 says that there are several"):
                sar.initialize_comms()
    try:
        group = sar.initialize_comms()
        assert sar.initialize_comms() is group, "a cell that runs again"
        assert (sar.rank(), sar.world_size()) == (0, 1)
        data = sar.load_partition_data(partitioned(mixed(), 1))
        assert data.part_id == 0
        with pytest.raises(sar.PartitionError, match="start 2: torchrun --nproc-per-node 2"):
            sar.load_partition_data(partitioned(mixed(), 2, "random"))
    finally:
        sar.shutdown()
