"""The driver's side of the measured processes: start, ask, end."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.hosts import Hosts
from sar.allocator import PRELOAD, allocator_environment
from sar.comm.one_host import SWITCH

ROOT = Path(__file__).resolve().parent.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def launch_environment(allocator: str = "system") -> dict[str, str]:
    """What docs/launching tells users to set for the ranks; see there for why."""
    return {**ONE_THREAD, **allocator_environment(allocator)}


LAUNCH = launch_environment()
APART = {**LAUNCH, SWITCH: "0"}  # ranks that talk as if each were on a host of its own
_OURS = (*APART, PRELOAD, "BENCH_FIRST")
_DEADLINE = 900.0
_TAIL = 4000  # characters of a failed process' error output


class WorkerError(RuntimeError):
    """A measured process failed; the message holds its traceback."""


class Cluster:
    """``size`` long-lived processes that hold one task object each and are called together.

    Between calls the processes sleep, so several clusters can take turns on the same cores.

    Args:
        task: "module:Class"; made with ``arguments``, in the environment of a rank.
        size: number of processes.
        environment: variables set for them; the ones of :data:`APART` are removed otherwise.
        first: folder that comes first on their import path.
        hosts: where each of them runs; on this machine's own network otherwise.
        deadline: seconds that one call may take.
    """

    def __init__(
        self,
        task: str,
        size: int = 1,
        *,
        environment: dict[str, str] | None = None,
        first: Path | None = None,
        hosts: Hosts | None = None,
        deadline: float = _DEADLINE,
        **arguments: Any,
    ) -> None:
        self.size, self._deadline = size, deadline
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")
        inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
        inherited.update(ONE_THREAD if environment is None else environment)
        if first is not None:
            inherited["BENCH_FIRST"] = str(first)
        inherited.update({"MASTER_ADDR": "127.0.0.1"} if hosts is None else hosts.environment())
        command = [sys.executable, "-m", "benchmarks.worker", task]
        inherited.update({"WORLD_SIZE": str(size), "MASTER_PORT": str(free_port())})
        self._processes = [
            subprocess.Popen(
                [*(hosts.command(rank) if hosts else []), *command],
                cwd=ROOT,
                env={**inherited, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            for rank in range(size):
                self._send(rank, "", arguments)
            self._collect()
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method on every process at once; the results in rank order.

        Raises WorkerError with the first failing process' traceback, after ending the others.
        """
        for rank in range(self.size):
            self._send(rank, method, arguments)
        return self._collect()

    def close(self) -> None:
        """End the processes; harmless when they have ended."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None and not pipe.closed:
                    _close(pipe)
        self._log.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _pipe(self, rank: int, name: str) -> IO[str]:
        pipe: IO[str] = getattr(self._processes[rank], name)
        return pipe

    def _send(self, rank: int, method: str, arguments: dict[str, Any]) -> None:
        pipe = self._pipe(rank, "stdin")
        try:
            pipe.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._failed(rank, "it has ended") from None

    def _collect(self) -> list[Any]:
        answers: dict[int, Any] = {}
        limit = time.monotonic() + self._deadline
        with selectors.DefaultSelector() as selector:
            for rank in range(self.size):
                selector.register(self._pipe(rank, "stdout"), selectors.EVENT_READ, rank)
            while len(answers) < self.size:
                ready = selector.select(limit - time.monotonic())
                if not ready:
                    missing = sorted(set(range(self.size)) - set(answers))
                    raise self._failed(missing[0], f"no answer within {self._deadline:.0f} s")
                for key, _ in ready:
                    answers[key.data] = self._receive(key.data)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.size)]

    def _receive(self, rank: int) -> Any:
        line = self._pipe(rank, "stdout").readline()
        if not line:
            raise self._failed(rank, "it ended without an answer")
        answer = json.loads(line)
        if "error" in answer:
            raise self._failed(rank, answer["error"])
        return answer["result"]

    def _failed(self, rank: int, what: str) -> WorkerError:
        self._log.seek(0)
        output = self._log.read()[-_TAIL:]
        self.close()
        return WorkerError(f"rank {rank} of {self.size}: {what}\n{output}")


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except BrokenPipeError:  # unsent bytes for a process that is gone
        pass


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
