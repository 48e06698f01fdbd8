"""Ranks that are forked by a process that has imported once are like ranks that were executed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_launch import ROOT, environment, wait_for

from benchmarks.processes import children, is_alive
from sar.cli.fork_server import ForkServer
from sar.cli.ranks import run_ranks
from sar.errors import SarError

pytestmark = pytest.mark.system


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """``run(code, size)`` runs ``code`` as ranks; gives what each wrote into ``found``."""

    def start(code: str, size: int = 2, before: str = "", modules: tuple = (), **more: str) -> list:
        (tmp_path / "first.py").write_text(before)
        (tmp_path / "code_of_ranks.py").write_text(
            "import json, os, sys, time\nfrom pathlib import Path\nfound = {}\n"
            f"rank, folder = int(os.environ['RANK']), Path({str(tmp_path)!r})\n"
            f"{code}\n(folder / f'found-{{rank}}').write_text(json.dumps(found))\n"
        )
        given = {"PYTHONPATH": f"{tmp_path}:{ROOT}", **more}
        run_ranks(["code_of_ranks", "word"], ForkServer(size, given, ("first", *modules)), 5.0)
        return [json.loads((tmp_path / f"found-{rank}").read_text()) for rank in range(size)]

    return start


STATE = """
import gc, random, signal, threading
import numpy
found["random"] = [random.random(), float(numpy.random.rand())]
found["argv"], found["main"] = sys.argv[1:], sys.modules["__main__"].__file__
found["parent"], found["group"] = os.getppid(), os.getsid(0) == os.getpgrp() == os.getpid()
found["stdin"] = sys.stdin.read()
found["threads"] = [len(os.listdir("/proc/self/task")), threading.active_count()]
found["gc"] = gc.isenabled()
found["signals"] = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
opened = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd") if int(one) > 2]
found["files"] = [os.readlink(one).split(":")[0] for one in opened if os.path.exists(one)]
found["blas"] = os.environ["OPENBLAS_NUM_THREADS"]
found["given"], found["world"] = os.environ["GIVEN"], os.environ["WORLD_SIZE"]
found["first"] = sys.modules.get("first") is not None and sys.modules["first"].pid
"""


def test_the_state_of_a_rank(run: Any) -> None:
    ranks = run(STATE, 3, "import os, numpy.random\npid = os.getpid()", GIVEN="1")
    first = ranks[0]
    for one in ranks:
        assert one["argv"] == ["word"] and one["main"].endswith("code_of_ranks.py")
        assert one["parent"] == first["parent"] != os.getpid() and one["group"]
        assert one["first"] == one["parent"], "imported once, by the parent"
        assert one["stdin"] == "" and one["threads"] == [1, 1] and one["gc"] and one["signals"]
        files = [name for name in one["files"] if "libxsmm" not in name]  # a library of DGL's
        assert files == ["pipe"], "its report's alone"
        assert (one["given"], one["world"], one["blas"]) == ("1", "3", "1")
    drawn = [number for one in ranks for number in one["random"]]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("sys.exit(rank and 3)", "rank 1: left with status 3"),
        ("sys.exit('text' if rank else None)", "rank 1: left with status 1"),
        ("assert not rank", "rank 1: left with status 1"),
        ("rank and os._exit(5)", "rank 1: left with status 5"),
        ("rank and os.kill(os.getpid(), 9)", "rank 1: killed by SIGKILL; out of memory"),
        ("rank and os.kill(os.getpid(), 11)", "rank 1: killed by SIGSEGV"),
        ("os.kill(os.getppid(), 9); time.sleep(60)", "the parent of the ranks: killed by SIGKILL"),
    ],
)
def test_how_a_rank_ends(code: str, error: str, run: Any) -> None:
    begin = time.monotonic()
    with pytest.raises(SarError, match=error):
        run(code + "\nif not rank: time.sleep(1)")
    assert time.monotonic() - begin < 40  # not when the one that sleeps has ended


LEAVING = """
import atexit, threading, weakref
kept = open(folder / f"kept-{rank}", "w")
kept.write("not closed")
sys.kept = kept  # as a library's module may hold it
print("a line without an end", end="")
class Node: pass
node = Node()
weakref.finalize(node, (folder / f"finalized-{rank}").touch)
atexit.register((folder / f"handler-{rank}").touch)
threading.Thread(target=lambda: (time.sleep(0.3), (folder / f"thread-{rank}").touch())).start()
"""


@pytest.mark.usefixtures("bare")
def test_what_a_rank_does_when_it_leaves(run: Any, tmp_path: Path, capfd: Any) -> None:
    """As an interpreter that is taken down."""
    run(LEAVING, 2, "print('imported', end=';')", PYTHONUNBUFFERED="")
    for rank in range(2):
        assert (tmp_path / f"kept-{rank}").read_text() == "not closed"
        for name in ("finalized", "handler", "thread"):
            assert (tmp_path / f"{name}-{rank}").exists(), name
    printed = capfd.readouterr().out
    assert printed.count("imported;") == 1 and printed.count("a line without an end") == 2


THREAD = (
    "import threading, time\nthreading.Thread(target=time.sleep, args=(5,), daemon=True).start()"
)


@pytest.mark.usefixtures("bare")
def test_after_imports_that_start_threads_ranks_are_spawned(run: Any, capfd: Any) -> None:
    code = "found['parent'] = os.getppid()\nfound['first'] = 'first' in sys.modules\nprint(rank)"
    ranks = run(code, 2, THREAD)
    assert ranks[0]["parent"] == ranks[1]["parent"] != os.getpid()
    assert not any(one["first"] for one in ranks)
    told = capfd.readouterr().err
    assert told.count("ranks are spawned, not forked: after the imports there are 2 threads") == 1
    with pytest.raises(SarError, match="rank 1: left with status 3"):
        run("sys.exit(rank and 3)", 2, THREAD)


@pytest.mark.usefixtures("bare")
def test_what_cannot_be_imported_is_left_to_the_ranks(run: Any) -> None:
    assert run("found['ran'] = True", 2, "raise OSError", ("absent_module",))[1]["ran"]


LAUNCHER = """
import sys
from sar.cli.fork_server import ForkServer
from sar.cli.ranks import run_ranks
run_ranks(["sleeping"], ForkServer(2, {}, ("slow",) * (sys.argv[1] == "importing")), 5.0)
"""


@pytest.mark.parametrize("when", ["importing", "running"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda one: one.name)
def test_all_end_with_the_launcher(when: str, number: signal.Signals, tmp_path: Path) -> None:
    count = {"importing": 1, "running": 3}[when]
    for name in ("sleeping", "slow"):
        (tmp_path / f"{name}.py").write_text("import time; time.sleep(60)")
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, when],
        env=environment(PYTHONPATH=f"{tmp_path}:{ROOT}"), stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    wait_for(lambda: len(children(launcher.pid)) == count)
    started = children(launcher.pid)
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=20)
    assert launcher.returncode != 0 and (number == signal.SIGKILL or "KeyboardInterrupt" in errors)
    wait_for(lambda: not any(map(is_alive, started)))


def test_imports_of_all_front_ends_start_no_thread() -> None:
    """Else ranks of their models would be spawned."""
    code = (
        "import importlib, os\nfrom sar import registry\nfrom sar.cli import rank_environment\n"
        "for name in filter(registry.is_installed, registry.front_ends()):\n"
        "    registry.front_end(name)\n"
        "for name in rank_environment.MODULES['train'] + ('sar._public',):\n"
        "    importlib.import_module(name.partition(':')[0])\n"
        "print(len(os.listdir('/proc/self/task')), 'torch' in os.sys.modules)"
    )
    given = environment(OMP_NUM_THREADS="2", OPENBLAS_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.split() == ["1", "True"], done.stderr
