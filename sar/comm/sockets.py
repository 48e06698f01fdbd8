"""Processor seconds of this machine for what goes through sockets: bytes, and messages of gloo."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from threading import Barrier, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_RANKS, _EXCHANGES, _TIMEOUT = 8, 100, timedelta(seconds=60)


def byte_seconds() -> float:
    """What a byte costs both ends of a connection; copied in memory before, so no page is new."""
    rows = torch.randn(1 << 15, 256)
    begin = time.process_time()
    _send(rows, torch.empty_like(rows))
    return (time.process_time() - begin) / rows.nbytes


def _send(rows: Tensor, into: Tensor) -> None:
    """Send ``rows`` to this process: what the system spends on both ends."""
    sent, left = (one.numpy().data.cast("B") for one in (rows, into))
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as out, server.accept()[0] as peer:
            sender = Thread(target=out.sendall, args=(sent,))
            sender.start()
            while left:
                left = left[peer.recv_into(left) :]
            sender.join()


def message_seconds() -> float:
    """What an exchange over gloo costs a rank for each other rank, whether rows go there or not.

    Ranks are threads of this process, each with a process group of its own.
    """
    store, together, spent = dist.HashStore(), Barrier(_RANKS, timeout=60), []

    def body(rank: int) -> None:
        group: Any = dist.ProcessGroupGloo(store, rank, _RANKS, _TIMEOUT)
        ones, numbers = [1] * _RANKS, torch.zeros(2, _RANKS)
        for _ in range(2):  # the first to connect and to warm up
            together.wait()
            begin = time.process_time()
            for _ in range(_EXCHANGES):
                group.alltoall_base(numbers[0], numbers[1], ones, ones).wait()
            together.wait()
            spent.append(time.process_time() - begin)

    ranks = [Thread(target=body, args=(rank,)) for rank in range(_RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return min(spent) / (_EXCHANGES * _RANKS * (_RANKS - 1))
