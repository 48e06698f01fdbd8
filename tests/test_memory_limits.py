"""Too little memory is an error that says what was wanted, and ends no process by a signal."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from sar.__main__ import main

ROOT = Path(__file__).resolve().parent.parent

# Children that have imported all, one for each limit, compile a kernel that is new to them.
COMPILE = """
    import os, resource
    import numpy as np
    from sar.kernels.jit import kernel
    from sar.partition.compiled import compiled

    def add(rows, others):
        for i in range(len(rows)):
            for j in range(len(others)):
                rows[i] += np.sqrt(others[j]) * rows[i] if rows[i] > j else others[j]

    def tiny(x):
        return x

    kernel(tiny)(1)
    for decorate in (kernel, compiled):
        for mib in (0, 1, 2, 3, 8, 40, 4096):
            child = os.fork()
            if child:
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                print(mib, "ended with", status, flush=True)
                continue
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (used + (mib << 20),) * 2)
            try:
                decorate(add)(np.ones(3), np.ones(3))
                os.write(1, b"compiled\\n")
            except MemoryError as error:
                os.write(1, str(error).encode() + b"\\n")
            os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of addresses are Linux'")
def test_a_kernel_is_not_compiled_where_there_is_no_room(tmp_path: Path) -> None:
    """LLVM would end the process."""
    (tmp_path / "compile.py").write_text(textwrap.dedent(COMPILE))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "compile.py")], timeout=110, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if "ended with" in line] == [
        f"{mib} ended with 0" for _ in range(2) for mib in (0, 1, 2, 3, 8, 40, 4096)
    ], done.stdout
    told = [line for line in lines if "ended with" not in line]
    assert told[6] == told[13] == "compiled"
    for line in told[:6] + told[7:13]:
        assert line.startswith("add: ") and "expected 64 MiB" in line and "ulimit -v" in line


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: torch.empty(1 << 60, dtype=torch.uint8), "tried to allocate 1152921504606846976"),
        (lambda: np.empty(1 << 59, np.uint8), "Unable to allocate 512. PiB"),
        (lambda: bytearray(1 << 60), "not enough memory"),
    ],
    ids=["torch", "numpy", "Python"],
)
def test_commands_say_it_in_a_line(
    ask: object, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("sar.cli.partition.partition", lambda *_: ask())
    assert main(["partition", "g.npz", "--parts", "2", "--out", "out"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sar partition: error: not enough memory") and words in line
    assert "enforce fail" not in line
