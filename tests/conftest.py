"""Fixtures of the whole suite, and the checks that run around every test."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the cores

import pytest
import torch
from harness.leaks import State, leaked
from harness.left_out import MISSING, LeftOut
from harness.nursery import Nursery
from harness.parts import Cutter
from harness.pool import WorkerPool

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-matrix",
        "--full",
        action="store_true",
        dest="full_matrix",
        help="run the whole product of layers, ranks, cuts, rounds and dtypes, not a covering",
    )


def pytest_configure(config: pytest.Config) -> None:
    if MISSING:
        config.pluginmanager.register(LeftOut())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if "device" in item.keywords]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    slow = [item for item in items if "slow" in item.keywords]
    if slow and not config.getoption("full_matrix"):  # a third of all, which cost as they are named
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if "slow" not in item.keywords]


def pytest_collection_finish() -> None:
    """Collections of garbage, and looks for tensors, pass by what modules hold."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """No process, thread, variable, process group or file outlives a test."""
    before = State.now()
    yield
    found = leaked(before)
    if found:
        pytest.fail(f"{request.node.name} left behind: " + "; ".join(found), pytrace=False)


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Workers on this host for the whole run: ``processes.run(size, case, *args)``."""
    pool = WorkerPool(tmp_path_factory.mktemp("workers"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """The same as if each were on a host of its own: rows travel over gloo."""
    pool = WorkerPool(tmp_path_factory.mktemp("workers"), {"SAR_HOST_MEMORY": "0"})
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Nursery:
    """Starts scripts in processes that have imported already: ``nursery.start(words, ..)``."""
    return Nursery(tmp_path_factory.mktemp("children"))


@pytest.fixture(params=["memory", "sockets"])
def either(request: pytest.FixtureRequest) -> WorkerPool:
    """Both of them in turn, for what the transport does itself."""
    name = {"memory": "processes", "sockets": "sockets"}[request.param]
    return request.getfixturevalue(name)


@pytest.fixture(scope="session")
def parts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session keeps the graphs that it has cut."""
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(scope="session")
def partitioned(parts_folder: Path) -> Cutter:
    """``partitioned(graph, num_parts, method)`` writes the parts once and returns the JSON."""
    return Cutter(parts_folder)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks without the libraries that this process has imported by chance; that takes seconds."""
    monkeypatch.setattr("sar.cli.ranks.modules_in_use", list)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and edges are read and written in several, of which most have no edge of some part."""
    monkeypatch.setattr("sar.partition.progress.BLOCK", 6)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of so many KiB, a new one with each call."""
    folder, mounted = tmp_path / "disk", []
    folder.mkdir()

    def make(size: int) -> Path:
        if mounted:
            subprocess.run(["umount", "-l", mounted.pop()], check=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting takes root")
        mounted.append(folder)
        return folder

    yield make
    for one in mounted:
        subprocess.run(["umount", "-l", one], check=True)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many threads of torch, and so of compiled loops."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
