"""The loop of one worker process: join a group when asked, run cases, answer through a pipe."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection


@dataclass(frozen=True)
class Membership:
    """The group a case runs in; workers that share ``store`` meet there."""

    store: str
    rank: int
    size: int
    timeout: float


def main(connection: Connection, log: str, environment: dict[str, str]) -> None:
    """Serve until the pipe closes. ``SIGUSR1`` writes all stacks to the file ``log``.
    ``SAR_TEST_BACKEND`` of the environment is gloo, ccl or what stands in for it."""
    gc.freeze()  # a collection would copy all pages of what was imported before the fork
    os.environ.update(environment)
    with open(log, "w", encoding="utf-8") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends its workers
        import torch

        torch.set_num_threads(1)
        joined: Membership | None = None
        while True:
            try:
                membership, work = pickle.loads(connection.recv_bytes())
            except EOFError:
                break
            try:
                if membership != joined:
                    _leave(joined)
                    joined = None  # stays so when joining fails
                    _join(membership)
                    joined = membership
                case, args = pickle.loads(work)
                from sar.comm import current_group

                answer = ("ok", case(current_group(), *args))
            except BaseException as error:  # noqa: BLE001 - told to the parent, with its stack
                text = traceback.format_exc()
                answer = ("error", time.monotonic(), type(error).__name__, text)
            connection.send_bytes(pickle.dumps(answer))
        _leave(joined)
    sys.exit(0)


def _join(membership: Membership) -> None:
    import torch.distributed as dist

    import sar
    from harness import blocking

    backend = os.environ.get("SAR_TEST_BACKEND", "gloo")
    if backend != "gloo":
        backend = blocking.install(backend)
    dist.init_process_group(
        backend,
        store=dist.FileStore(membership.store, membership.size),
        rank=membership.rank,
        world_size=membership.size,
        timeout=timedelta(seconds=membership.timeout),
    )
    sar.initialize_comms(
        membership.rank, membership.size, backend=backend, timeout=membership.timeout
    )


def _leave(membership: Membership | None) -> None:
    if membership is not None:
        import torch.distributed as dist

        import sar

        sar.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()
