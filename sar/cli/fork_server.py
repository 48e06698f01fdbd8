"""A process that imports once and forks the ranks of this machine; the launcher's hold of it.

It spawns them where forking is not safe, as when importing a library has started threads.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PARENT = "SAR_PARENT_PID"  # the process that started this one; set in ranks and in their parent
REPORT = "SAR_REPORT_DESCRIPTOR"  # where a rank writes its error
_MOST_A_CORE = 64  # ranks
_BLAS = "OPENBLAS_NUM_THREADS"
_DIES_WITH_PARENT = 1, int(signal.SIGKILL), 0, 0, 0  # of prctl: PR_SET_PDEATHSIG
# What runs before the imports that take seconds: the kernel ends this process when its parent
# dies, also by SIGKILL, which it may have done before that line.
_FIRST = f"""
import ctypes, os, runpy, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(*{_DIES_WITH_PARENT})
if os.getppid() != int(os.environ["{PARENT}"]):
    os._exit(1)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""

_status = [1]  # with which this process leaves, unless it says so

# Note [Forked ranks]
# Libraries take a rank seconds to import, and hundreds of megabytes. So one process imports them
# and forks; what it has imported is shared until it is written. It does nothing else, as a child
# has no thread but the one that forked, and waits for ever for locks that others held. Pools of
# OpenMP, numba and torch begin with the first loop; OpenBLAS starts one when numpy is imported,
# unless it shall have one thread. Linux counts the threads, and where there are several, ranks are
# spawned. Allocator and OpenMP read the environment when they are loaded, so the process is
# executed with a rank's.
#
# Taking an interpreter down writes to all that it has imported: a third of a second, and 200 MB
# for each rank that were shared. So a rank runs its exit handlers, flushes files that nobody has
# closed, and leaves.


class ForkServer:
    """What the launcher knows of that process; it imports at once, and forks when it is told to.

    ``environment`` is what ranks need when they are executed. ``modules`` are imported; of one that
    is followed by a colon and the name of a function, that is called.

    Attributes:
        reports: of each rank, the pipe that its report comes through.
        pids: of ranks that have started.
        statuses: of ranks that have ended; negative for a signal.
        status: of the process itself, if it has ended before the ranks.
    """

    def __init__(self, size: int, environment: dict[str, str], modules: Sequence[str] = ()) -> None:
        """Raises ``ValueError`` for more ranks than a machine bears."""
        cores = len(os.sched_getaffinity(0))
        if size > _MOST_A_CORE * cores:  # a slip of the pen would take the machine down with it
            raise ValueError(
                f"nproc: got {size}, expected at most {_MOST_A_CORE * cores}, {_MOST_A_CORE} for "
                f"each of {cores} cores"
            )
        self.size = size
        self.pids, self.statuses = dict[int, int](), dict[int, int]()
        self.status: int | None = None
        self._rest = b""
        pairs = [os.pipe() for _ in range(size + 1)]
        self._news, *self.reports = [ours for ours, _ in pairs]
        theirs = [end for _, end in pairs]
        orders, self._orders = os.pipe()
        self._ends = [self._orders, self._news, *self.reports]
        words = [__name__, json.dumps(theirs), json.dumps([*modules])]
        given = {_BLAS: os.environ.get(_BLAS) or "1", **environment}
        try:
            self._process = _spawn(words, given, theirs, orders)
        except BaseException:
            self._close()
            raise
        finally:
            for end in (orders, *theirs):
                os.close(end)
        os.set_blocking(self._news, False)
        self._poll = select.poll()  # unlike select, for files of any number
        self._poll.register(self._news, select.POLLIN)

    def fork(
        self, words: Sequence[str], environment: dict[str, str], modules: Sequence[str] = ()
    ) -> None:
        """Let all ranks run ``words``, a module and its arguments, after imports of ``modules``."""
        order = {"words": words, "environment": environment, "modules": modules}
        with suppress(BrokenPipeError), open(self._orders, "wb", closefd=False) as pipe:
            pipe.write(json.dumps(order).encode() + b"\n")  # `look` sees who died

    def look(self, seconds: float = 0.0) -> None:
        """Learn who has started and who has ended; wait for such news at most so long."""
        self._poll.poll(1000 * seconds)
        status = self._process.poll()
        with suppress(BlockingIOError):
            while text := os.read(self._news, 1 << 16):
                *lines, self._rest = (self._rest + text).split(b"\n")
                for line in lines:
                    what, rank, value = line.decode().split()
                    (self.pids if what == "started" else self.statuses)[int(rank)] = int(value)
        if status is not None and len(self.statuses) < self.size:
            self.status = status
            for lost in set(range(self.size)) - set(self.statuses):
                self.send(lost, signal.SIGKILL)
                self.statuses[lost] = -signal.SIGKILL

    def send(self, rank: int, number: signal.Signals) -> None:
        """Signal a rank and what it has started."""
        if rank in self.pids:
            with suppress(ProcessLookupError):
                os.killpg(self.pids[rank], number)
                os.killpg(self.pids[rank], signal.SIGCONT)  # what is stopped handles no other

    def end(self) -> None:
        """End the process, and ranks that it was about to start, without a word."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process and let go of it; a no-op the second time."""
        self.end()
        self._close()

    def _close(self) -> None:
        while self._ends:
            os.close(self._ends.pop())


def _spawn(
    words: Sequence[str], environment: dict[str, str], ends: Sequence[int], stdin: int
) -> subprocess.Popen:
    """A Python that runs ``words`` and ends with this process; an interrupt is not for it."""
    return subprocess.Popen(
        [sys.executable, "-c", _FIRST, *words],
        env={**os.environ, **environment, PARENT: str(os.getpid())},
        stdin=stdin,
        pass_fds=ends,
        start_new_session=True,
    )


# ---------------------------------------------------------------- in the process itself


def main(ends: str, modules: str) -> None:
    """Import, wait for the order, start the ranks, tell of their ends."""
    atexit.register(_leave)  # the first, so that it is called last
    news, *reports = json.loads(ends)
    forks = sys.platform == "linux"
    if forks:
        gc.disable()
        _import(json.loads(modules))
    line = sys.stdin.readline()
    if not line:
        os._exit(0)  # nobody needs ranks
    order = json.loads(line)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if forks:
        _import(order["modules"])
        problem = _problem()
        if problem is not None:
            forks = False
            print(f"sar: ranks are spawned, not forked: {problem}", file=sys.stderr, flush=True)
    gc.freeze()
    running, processes = {}, []  # one that is let go is waited for by subprocess
    for rank, report in enumerate(reports):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), REPORT: str(report)}
        given = {**order["environment"], **own}
        if not forks:
            processes.append(_spawn(order["words"], given, [report], subprocess.DEVNULL))
            pid = processes[-1].pid
            _tell(news, "started", rank, pid)
        elif (pid := _fork(given)) == 0:
            _tell(news, "started", rank, os.getpid())
            for end in {news, *reports} - {report}:
                os.close(end)
            _run(order["words"])
        running[pid] = rank
    for report in reports:
        os.close(report)
    while running:
        pid, status = os.waitpid(-1, 0)
        if pid in running:
            _tell(news, "ended", running.pop(pid), os.waitstatus_to_exitcode(status))
    os._exit(0)


def _tell(news: int, what: str, rank: int, value: int) -> None:
    os.write(news, f"{what} {rank} {value}\n".encode())


def _import(modules: Sequence[str]) -> None:
    """What cannot be imported is left to the rank that needs it, whose error has its context."""
    for name in modules:
        module, _, function = name.partition(":")
        with suppress(Exception):
            found = importlib.import_module(module)
            if function:
                getattr(found, function)()


def _problem() -> str | None:
    """Why this process must not fork; ``None`` where it may."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"after the imports there are {threads} threads ({_BLAS}={os.environ[_BLAS]})"
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        return "imports have initialised CUDA"
    return None


def _fork(environment: dict[str, str]) -> int:
    """Like ``os.fork``; the child is a rank as one that was executed. Its session is its own: Linux
    divides processors among sessions."""
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(*_DIES_WITH_PARENT)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    os.environ.update({**environment, PARENT: str(parent)})
    gc.enable()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    return 0


def _run(words: Sequence[str]) -> NoReturn:
    """Run a module as a rank, in place of this one."""
    sys.argv[1:] = words
    try:
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        known = leaving.code is None or isinstance(leaving.code, int)
        _status[0] = int(leaving.code or 0) if known else 1
        raise
    _status[0] = 0
    sys.exit()


def _leave() -> NoReturn:
    """End this process, see Note [Forked ranks]."""
    for one in (sys.stdout, sys.stderr, *gc.get_objects()):
        if issubclass(type(one), io.IOBase):
            with suppress(Exception):  # full, closed, or an error of a class of the user's
                one.flush()
    os._exit(_status[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
