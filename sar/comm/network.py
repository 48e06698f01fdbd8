"""The network of this host: which interface reaches the others, and what its sockets cost."""

from __future__ import annotations

import os
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sar.comm.legacy import with_old_names
from sar.errors import CommError
from sar.files import write_whole

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_RANKS, _EXCHANGES, _TIMEOUT = 8, 100, timedelta(seconds=60)  # whose messages are measured
_DOCUMENTATION_ADDRESS = "192.0.2.1"  # routed like any other, belongs to nobody


def choose_interface(master: str) -> list[str]:
    """Tell the backends which interface to listen on, unless the user has told them.

    The one that ``SAR_SOCKET_NAME`` names, for all backends. Without it, for gloo, the loopback
    interface where all ranks are on this host, else the one that faces ``master``: gloo by itself
    takes the address of the host's own name, which is loopback on some systems, where no other host
    reaches it, and on others an address that every host reaches.

    Returns the environment variables that were set; ``ValueError`` when there is no such interface.
    """
    name, known = os.environ.get("SAR_SOCKET_NAME"), socket.if_nameindex()
    if name is not None:
        if name not in [interface for _, interface in known]:
            names = ", ".join(interface for _, interface in known)
            raise ValueError(f"SAR_SOCKET_NAME: got {name!r}, expected one of {names}")
        libraries = ["GLOO", "NCCL", "CCL", "TP"]
    else:
        ranks = os.environ.get("WORLD_SIZE")
        are_own = ranks is not None and ranks == os.environ.get("LOCAL_WORLD_SIZE")
        name = "lo" if are_own else interface_of(address_towards(master))
        libraries = ["GLOO"]
    variables = [f"{library}_SOCKET_IFNAME" for library in libraries]
    mine = [one for one in variables if name is not None and one not in os.environ]
    os.environ.update(dict.fromkeys(mine, name or ""))
    return mine


def own_address(master: str) -> str:
    """This host's IPv4 address where rows travel; that of loopback where there is none other."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return address_of(chosen) or address_towards(master)


def address_towards(host: str) -> str:
    """This host's IPv4 address on the route to ``host``; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            name = os.environ.get("SAR_SOCKET_NAME")
            if name:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def interface_of(address: str) -> str | None:
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; ``None`` where there is no such, or it has none."""
    try:
        import fcntl
    except ImportError:  # not on this system
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface[:15].encode())
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


@with_old_names
def nfs_ip_init(rank: int, ip_file: str, *, timeout: float = 300.0) -> str:
    """Rank 0 writes its address to ``ip_file`` on a shared file system; the others wait and read.

    Returns the address of rank 0. Remove the file between runs: an old one is taken at its word.

    Raises ``CommError`` on a rank that found no address there for ``timeout`` seconds.
    """
    path = Path(ip_file)
    if rank == 0:
        address = address_towards(_DOCUMENTATION_ADDRESS)
        write_whole(path, lambda file: file.write(address.encode()))
        return address
    end = time.monotonic() + timeout
    while not (path.is_file() and path.read_text(encoding="utf-8").strip()):
        if time.monotonic() > end:
            raise CommError(
                f"ip_file: got no address in {str(path)!r} for {timeout:g} seconds, expected rank "
                "0 to write it: has it started, and does it see the same file?"
            )
        time.sleep(0.2)
    return path.read_text(encoding="utf-8").splitlines()[0].strip()


def byte_seconds() -> float:
    """Processor seconds that a byte costs both ends of a connection."""
    rows = torch.randn(1 << 15, 256)
    begin = time.process_time()
    _send(rows, torch.empty_like(rows))
    return (time.process_time() - begin) / rows.nbytes


def _send(rows: Tensor, into: Tensor) -> None:
    """Send ``rows`` to this process: the system's work of both ends."""
    sent, left = (one.numpy().data.cast("B") for one in (rows, into))
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as out, server.accept()[0] as peer:
            sender = Thread(target=out.sendall, args=(sent,))
            sender.start()
            while left:
                left = left[peer.recv_into(left) :]
            sender.join()


def message_seconds() -> float:
    """Processor seconds that an exchange over gloo costs a rank per other rank, rows or none. Ranks
    are threads of this process, each with a process group of its own."""
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
