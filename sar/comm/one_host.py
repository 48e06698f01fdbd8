"""Whether all ranks run on one host and may read each other's memory; connects them then."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from sar.comm.host_memory import HostMemory, read_memory

SWITCH = "SAR_HOST_MEMORY"
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_SET_PTRACER, _ANY = 0x59616D61, -1  # of prctl
_HELLO = struct.Struct("<qq")  # the name of who is called, the caller's rank
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_MEET_SECONDS = 20.0  # at most, before ranks keep to the network
_STRANGERS = 64  # who may call as well without keeping ranks out

Gather = Callable[[Tensor], list[Tensor]]  # equal tensors of all ranks, in rank order


def is_wanted() -> bool:
    """What ``SAR_HOST_MEMORY`` says: ``0`` or ``1``, the default. Raises ``ValueError`` else."""
    text = os.environ.get(SWITCH) or "1"
    if text not in ("0", "1"):
        raise ValueError(f"{SWITCH}: got {text!r}, expected 0 or 1")
    return text == "1"


def connect(
    rank: int, size: int, gather: Gather, timeout: float, is_able: bool = True
) -> HostMemory | None:
    """Connect the ranks through memory; ``None`` on all of them when one cannot or does not want.

    Collective. Ranks are on one host when they share the running kernel, the user and the
    namespaces of processes and of the network, so that containers, and hosts that are tried as
    network namespaces, keep to their network. ``is_able``: tensors lie on the CPU.
    """
    with ExitStack() as opened:
        word, probe = secrets.randbits(63), torch.tensor([secrets.randbits(63)])
        listener, host = None, 0
        if is_able and _is_possible():
            listener, host = _listen(opened, word, size, min(timeout / 2, _MEET_SECONDS))
        about = [one.tolist() for one in gather(torch.tensor([host, word, probe.data_ptr()]))]
        if listener is None or any(other[0] != host for other in about):
            return None
        peers: dict[int, tuple[socket.socket, int]] = {}
        with suppress(OSError):  # then some are missing
            _meet(peers, listener, rank, [other[1] for other in about], opened)
        found = torch.zeros(size, dtype=torch.int64)
        found[rank] = probe
        with suppress(OSError):  # then numbers are missing
            for peer, (_, pid) in peers.items():
                read_memory(pid, about[peer][2], found[peer].data_ptr(), probe.nbytes)
        whole = gather(torch.cat([probe, found]))
        truth = torch.stack([one[0] for one in whole])
        if not all(torch.equal(one[1:], truth) for one in whole):
            return None
        opened.pop_all()
        listener.close()
        for one, _ in peers.values():
            _make_ready(one, timeout)
        return HostMemory(rank, peers, timeout)


def _is_possible() -> bool:
    return (
        sys.platform == "linux" and is_wanted() and hasattr(ctypes.CDLL(None), "process_vm_readv")
    )


def _listen(
    opened: ExitStack, word: int, size: int, timeout: float
) -> tuple[socket.socket | None, int]:
    """A socket for others to call, and the host's number; never raises: others wait for both."""
    try:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.settimeout(timeout)
        listener.bind(_address(word))
        listener.listen(size + _STRANGERS)
        _permit_reading()
        return listener, _host()
    except OSError:
        return None, 0


def _permit_reading() -> None:
    """Let any process of this user read this one, where Yama lets only a parent."""
    if _YAMA.is_file() and _YAMA.read_text(encoding="ascii").strip() == "1":
        ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_long(_ANY), 0, 0, 0)


def _host() -> int:
    """A number that ranks of one host have alike, and no others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    text = " ".join([boot, *spaces, str(os.geteuid())])
    return 1 + int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")


def _address(word: int) -> bytes:
    """An abstract Unix address: no file, it ends with the socket."""
    return b"\0sar-%016x" % word


def _meet(
    peers: dict[int, tuple[socket.socket, int]],
    listener: socket.socket,
    rank: int,
    words: list[int],
    opened: ExitStack,
) -> None:
    """Call the ranks before this one, answer those after it."""
    for peer in range(rank):
        one = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        one.settimeout(listener.gettimeout())
        one.connect(_address(words[peer]))
        one.send(_HELLO.pack(words[peer], rank))
        peers[peer] = one, _credentials(one)[0]
    while len(peers) < len(words) - 1:
        one = opened.enter_context(listener.accept()[0])
        one.settimeout(listener.gettimeout())
        pid, user, _ = _credentials(one)
        if user == os.geteuid():  # a stranger of another user is not waited for
            word, peer = _HELLO.unpack(one.recv(_HELLO.size).ljust(_HELLO.size, b"\0"))
            if word == words[rank] and rank < peer < len(words):
                peers[peer] = one, pid


def _make_ready(one: socket.socket, timeout: float) -> None:
    """Let the socket block, but not for ever: a full queue means that the peer is stuck."""
    one.settimeout(None)
    seconds = struct.pack("ll", max(1, int(timeout)), 0)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)


def _credentials(one: socket.socket) -> tuple[int, ...]:
    data = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(data)
