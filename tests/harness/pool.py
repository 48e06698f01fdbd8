"""Worker processes that live for the whole run and serve one case after another over gloo."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from harness import worker
from harness.failures import COLLECTIVE_TIMEOUT, DEADLINE, HarnessTimeout, RankFailed

_GRACE = 2.0  # seconds from a first error to the last answer, and from terminate to kill
OWNED: set[int] = set()  # the process that others are forked from, for the leak checks
# Processes are forks of one that has imported, which takes seconds, and done nothing else.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "dgl.nn", "torch_geometric.nn", "sar.cli.train", "sar.sampling",
     "torch._dynamo", "scipy.sparse.csgraph"]  # the first step of an optimizer, covers of edges
)  # fmt: skip


def start(process: BaseProcess) -> None:
    """Start a process of ``CONTEXT``."""
    process.start()
    OWNED.add(forkserver._forkserver._forkserver_pid or 0)


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    log: Path

    def end(self) -> None:
        """Terminate, wait, kill, join."""
        self.connection.close()
        self.process.terminate()
        self.process.join(_GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def stacks(self) -> str:
        if self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self.log.read_text(encoding="utf-8") if self.log.exists() else "no stack\n"


class WorkerPool:
    """Starts workers when first needed; a worker of an ended case is never used again.

    Args:
        folder: for rendezvous files and stacks; no ports are needed.
        environment: of the workers, beside this process'.
    """

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        named = {"SAR_TEST_BACKEND": name} if (name := os.environ.get("SAR_TEST_BACKEND")) else {}
        self.folder, self._environment = folder, {**named, **(environment or {})}
        folder.mkdir(parents=True, exist_ok=True)
        self._workers: list[_Worker] = []
        self._groups: dict[tuple[int, float], str] = {}
        self._numbers = itertools.count()

    def run(
        self,
        size: int,
        case: Callable[..., Any],
        *args: Any,
        timeout: float = COLLECTIVE_TIMEOUT,
        deadline: float = DEADLINE,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        """Results of ``case(group, *args)`` in rank order; None for a rank of ``may_die`` that did.

        All workers are ended after a death: gloo's threads may spin for as long as a group lives in
        which a message was left for a dead rank.

        ``case`` is a function at the top level of a module; it and its arguments are pickled.

        Raises:
            RankFailed: a rank raised, or died unexpectedly. All workers are ended.
            HarnessTimeout: the deadline passed. All workers are ended.
        """
        is_new = (size, timeout) not in self._groups
        if is_new and "SAR_TEST_BACKEND" in self._environment:
            self.close()  # of oneCCL a process has one group alone
        self._start(size)
        store = self._groups.get((size, timeout))
        if store is None:
            store = str(self.folder / f"store-{next(self._numbers)}")
            self._groups = {(size, timeout): store}  # a worker is in one group at a time
        work = pickle.dumps((case, args))
        for rank in range(size):
            membership = worker.Membership(store, rank, size, timeout)
            self._workers[rank].connection.send_bytes(pickle.dumps((membership, work)))
        name = getattr(case, "__name__", repr(case))
        finished = False
        try:
            answers = self._collect(name, size, deadline, set(may_die))
            results = _results(name, answers, set(may_die))
            finished = all(answer[0] != "died" for answer in answers.values())
            return results
        finally:
            if not finished:
                self.close()

    def close(self) -> None:
        """End all workers; the pool can be used again and then starts new ones."""
        for each in self._workers:
            each.end()
        self._workers.clear()
        self._groups.clear()

    def _start(self, size: int) -> None:
        for _ in range(len(self._workers), size):
            ours, theirs = CONTEXT.Pipe()
            log = self.folder / f"stacks-{next(self._numbers)}"
            given = theirs, str(log), self._environment
            process = CONTEXT.Process(target=worker.main, args=given, daemon=True)
            start(process)
            theirs.close()
            self._workers.append(_Worker(process, ours, log))

    def _collect(
        self, name: str, size: int, deadline: float, may_die: set[int]
    ) -> dict[int, tuple]:
        """Answers by rank, until all are there or, after an error, the grace has passed."""
        answers: dict[int, tuple] = {}
        end = time.monotonic() + deadline
        failing = False
        while len(answers) < size:
            waiting = {self._workers[r].connection: r for r in range(size) if r not in answers}
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready and failing:
                return answers
            if not ready:
                raise HarnessTimeout(self._late(name, sorted(waiting.values()), deadline))
            for connection in ready:
                rank = waiting[connection]
                answers[rank] = self._answer(rank)
                unexpected = answers[rank][0] == "died" and rank not in may_die
                if (answers[rank][0] == "error" or unexpected) and not failing:
                    failing, end = True, min(end, time.monotonic() + _GRACE)
        return answers

    def _answer(self, rank: int) -> tuple:
        each = self._workers[rank]
        try:
            return pickle.loads(each.connection.recv_bytes())
        except (EOFError, ConnectionError):
            noticed = time.monotonic()
            each.process.join(_GRACE)
            return ("died", noticed, "exit", f"process ended with code {each.process.exitcode}")

    def _late(self, name: str, ranks: list[int], deadline: float) -> str:
        text = f"{name}: ranks {ranks} still ran after {deadline} s\n"
        return text + "".join(f"--- rank {rank}\n{self._workers[rank].stacks()}" for rank in ranks)


def _results(name: str, answers: dict[int, tuple], may_die: set[int]) -> list[Any]:
    failed = {
        rank: answer
        for rank, answer in answers.items()
        if answer[0] != "ok" and not (answer[0] == "died" and rank in may_die)
    }
    if failed:
        # A broken connection is what follows; the cause is the earliest of the others.
        def order(rank: int) -> tuple[bool, float]:
            return failed[rank][2] == "CommError", failed[rank][1]

        first = min(failed, key=order)
        _, _, kind, text = failed[first]
        died = tuple(r for r, answer in answers.items() if answer[0] == "died")
        raise RankFailed(f"{name}: rank {first} failed first\n{text}", first, kind, died)
    return [answers[r][1] if answers[r][0] == "ok" else None for r in sorted(answers)]
