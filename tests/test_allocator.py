"""Allocators: what ranks find in their environment, and that they run with it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import sar
from sar.__main__ import main
from sar.allocator import PRELOAD, allocator_environment, is_preloaded, set_soft_limit
from sar.cli.rank_environment import worker_environment

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 100


def has_tbb() -> bool:
    try:
        metadata.version("tbb")
    except metadata.PackageNotFoundError:
        return False
    return True


needs_tbb = pytest.mark.skipif(not has_tbb(), reason="no wheel of tbb for this platform")


@pytest.fixture(autouse=True)
def nothing_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PRELOAD, "SAR_SOFT_LIMIT", *allocator_environment(), "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run(*words: str, **more: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    done = subprocess.run(
        [sys.executable, *words],
        env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_tbb
@pytest.mark.system
def test_the_preloaded_library_serves_torch() -> None:
    """Freed buffers stay with oneTBB until it is told to clean up; glibc would have unmapped."""
    code = (
        "import ctypes, torch; torch.ones(1 << 22); own = ctypes.CDLL(None)\n"
        "clean = getattr(own, 'scalable_allocation_command', None)\n"
        "print('libtbbmalloc_proxy' in open('/proc/self/maps').read(), clean and clean(0, None))"
    )
    assert run("-c", code, **allocator_environment("tbb")).split() == ["True", "0"]
    assert run("-c", code, **allocator_environment("system")).split() == ["False", "None"]


@pytest.mark.parametrize("name", ["system", pytest.param("tbb", marks=needs_tbb)])
def test_the_printed_commands_set_it(name: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["environment", "--allocator", name]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert all(word == "export" for word, _ in lines)
    assert dict(setting.split("=", 1) for _, setting in lines) == allocator_environment(name)


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize("command", ["environment", "train none.json"])
def test_limits_are_gone(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert main([*command.split(), "--allocator", "tbb", "--soft-limit", "1GiB"]) == 2
    assert "--soft-limit: got '1GiB', but the option is gone" in capsys.readouterr().err
    with pytest.raises(sar.NotSupportedError, match="soft_limit: got 5, but soft limits are gone"):
        set_soft_limit(5)
    monkeypatch.setenv("SAR_SOFT_LIMIT", "1000")
    with pytest.raises(ValueError, match="SAR_SOFT_LIMIT: got '1000', but soft limits are"):
        sar.initialize_comms(0, 1)  # before anybody is met


def test_an_unknown_name(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ValueError, match="got 'jemalloc', expected one of system, tbb"):
        allocator_environment("jemalloc")
    assert main(["environment", "--allocator", "tcb"]) == 2
    assert "did you mean tbb?" in capsys.readouterr().err


@pytest.mark.parametrize("files", [None, []])
def test_a_missing_package(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        if files is None:
            raise metadata.PackageNotFoundError(name)
        return files

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(sar.MissingDependencyError, match=r"pip install 'sar-gnn\[tbb\]'"):
        allocator_environment("tbb")
    assert PRELOAD not in allocator_environment("system")


@needs_tbb
def test_another_preloaded_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv(PRELOAD, "libother.so")
    assert main(["train", "none.json", "--allocator", "tbb"]) == 2
    assert "allocator: got 'tbb', but LD_PRELOAD is 'libother.so'" in capsys.readouterr().err
    assert PRELOAD not in worker_environment(1, None), "the user's stays as it is"


@needs_tbb
def test_what_is_set_already_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ours = allocator_environment("tbb")[PRELOAD]
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "262144")
    monkeypatch.setenv(PRELOAD, "")
    assert not is_preloaded("tbb") and worker_environment(1, None, "tbb")[PRELOAD] == ours
    assert main(["environment", "--allocator", "tbb"]) == 0
    printed = capsys.readouterr().out
    assert f"export {PRELOAD}=" in printed and "MALLOC_MMAP_THRESHOLD_" not in printed
    for beside in (ours, f"{ours}:libother.so", f"libother.so {ours}"):
        monkeypatch.setenv(PRELOAD, beside)
        assert is_preloaded("tbb") and worker_environment(1, None, "tbb")[PRELOAD] == beside
    assert main(["environment", "--allocator", "tbb"]) == 0
    assert PRELOAD not in capsys.readouterr().out
