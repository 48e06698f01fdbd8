"""Joining the other ranks, and leaving them: at the end, or after an error."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import math
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from sar import expect
from sar.comm import environment
from sar.comm.failure import stuck_threads
from sar.comm.group import Group
from sar.comm.legacy import with_old_names
from sar.comm.local import (
    LocalGroup,
    current_group,
    has_group,
    process_group,
    set_process_group,
)
from sar.comm.network import choose_interface
from sar.comm.process import ProcessGroup
from sar.comm.rendezvous import Rendezvous
from sar.comm.seeds import signed
from sar.errors import CommError, MissingDependencyError, MistakeWarning

BACKENDS = ("gloo", "nccl", "ccl", "mpi")
_CCL = "oneccl_bindings_for_pytorch"
_NEEDS = {
    "nccl": "a CUDA build of torch and a CUDA device; install torch's CUDA wheel or use "
    "backend='gloo'",
    "ccl": f"the package {_CCL}, which no package index has; build it for your torch with "
    "examples/deploy/build_oneccl.py (docs/oneccl.md), or use backend='gloo'",
    "mpi": "a torch built from source with MPI; use backend='gloo'",
}
DEFAULT_TIMEOUT = 300.0  # seconds
_LOWEST_SEED, _HIGHEST_SEED = -(2**63), 2**64 - 1  # what torch.manual_seed takes
_INTERRUPTED = 130  # as shells call it
_made: dict[str, Any] = {}  # torch's default group and variables, where initialize_comms made them
_ending: dict[str, int] = {}  # the status to end with, after an error


@with_old_names
def initialize_comms(
    rank: int | None = None,
    world_size: int | None = None,
    master_ip_address: str | None = None,
    backend: str | None = None,
    comm_device: torch.device | str | None = None,
    master_port_number: int | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> Group:
    """Join the other ranks; without arguments, as ``torchrun``'s environment says.

    Where neither arguments nor a launcher say how many ranks there are, this process is the only
    one. Called again, it then gives the same group, so that a cell of a notebook can run twice.

    Args:
        rank, world_size: this process' index and the number of ranks (``RANK``, ``WORLD_SIZE``).
        master_ip_address, master_port_number: where rank 0 listens (``MASTER_ADDR``,
            ``MASTER_PORT``, else port 12345; a rank alone may give 0 for any that is free).
        backend: ``gloo`` (default on CPU), ``nccl`` (default with CUDA), ``ccl`` or ``mpi``; that
            of torch's default process group where there is one.
        comm_device: where tensors must lie to be sent; CUDA for nccl, else the CPU. Tensors that
            lie elsewhere are staged.
        timeout: seconds that all ranks have to meet, and that a collective waits for each of them.

    In the environment, ``SAR_HOST_MEMORY=0`` has ranks of one host send rows over gloo, too.

    Returns:
        The group, also what :func:`sar.comm.current_group` returns from now on.

    Raises:
        ValueError: an argument is out of range or unknown, missing in the environment as well, or
            not what torch's default process group says.
        MissingDependencyError: the backend's package is not installed, or does not load.
        CommError: the port is taken, the ranks did not meet within ``timeout`` (all phases of
            meeting together), or this process has joined already and not called :func:`shutdown`.
            A process whose network went away meanwhile may keep a thread that waits in torch; it
            ends at once when its program does, with status 1 after no other error.
    """
    place = rank, world_size, master_ip_address
    return _joined(*place, backend, comm_device, master_port_number, timeout)


def _joined(
    rank: int | None,
    world_size: int | None,
    master_ip_address: str | None,
    backend: str | None,
    comm_device: torch.device | str | None,
    master_port_number: int | None,
    timeout: float,
    names: Sequence[str] = (),
) -> Group:
    known = process_group()
    if (rank, world_size) == (None, None) and environment.is_alone():
        if known is not None and known.size == 1:
            return known
        rank, world_size, master_ip_address, master_port_number = 0, 1, "127.0.0.1", 0
    rank = environment.number("rank", rank, "RANK")
    size = environment.number("world_size", world_size, "WORLD_SIZE")
    _check_place(rank, size)
    backend = _checked_backend(backend)
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout: got {timeout}, expected seconds > 0")
    device = torch.device(comm_device or ("cuda" if backend == "nccl" else "cpu"))
    environment.tune_process()
    environment.take_device(device)
    address = master_ip_address or os.environ.get("MASTER_ADDR") or "127.0.0.1"
    port = environment.port(master_port_number, size)
    is_users = dist.is_initialized()
    if not is_users:
        _made["variables"] = choose_interface(address)
    if not isinstance(sys.excepthook, _ReportingHook):
        sys.excepthook = _ReportingHook()
    where = address, port, timedelta(seconds=timeout), names
    try:
        group = Rendezvous(rank, size, backend, device, *where).group()
    except CommError:
        if not stuck_threads:
            _forget_joining(is_users)
        raise
    if not is_users:
        _made["default"] = dist.group.WORLD
    set_process_group(group)
    atexit.unregister(shutdown)  # a process that keeps its group to the end may abort there
    atexit.register(shutdown)
    return group


def join_others(
    servers: int = 0,
    trainers: int = 0,
    address: str | None = None,
    port: int | None = None,
    *,
    backend: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Group:
    """Join ranks that are started elsewhere: servers before this launch's, or trainers after them.

    ``RANK`` and ``WORLD_SIZE`` count those of this launch alone; without a launcher this process
    is the only one. For the rest it is :func:`initialize_comms`.
    """
    rank, size = 0, 1
    if "RANK" in os.environ:
        rank = environment.number("RANK", None, "RANK")
        size = environment.number("WORLD_SIZE", None, "WORLD_SIZE")
    place, names = (servers + rank, servers + size + trainers), list[str]()
    if servers or trainers:
        names += [f"server {one}" for one in range(servers or size)]
        names += [f"trainer {one}" for one in range(trainers or size)]
    return _joined(*place, address, backend, None, port, timeout, names)


def shutdown() -> None:
    """Leave the group that :func:`initialize_comms` made; a no-op when there is none.

    torch's default process group ends as well, unless it was there before ``initialize_comms``.
    Graphs of the group raise ``CommError`` from now on.

    Models that were trained are compared over the ranks once more, and rank 0 warns where they
    differ: it waits a second at most for the others, so that this is no collective and no error.
    """
    group, ending = process_group(), current_group()
    problem = ending.compare_at_end() if isinstance(ending, ProcessGroup) else None
    set_process_group(None)
    atexit.unregister(shutdown)
    if isinstance(group, ProcessGroup):
        group.close()
    default = _made.pop("default", None)
    is_stuck = isinstance(group, ProcessGroup) and group.is_stuck
    if is_stuck:
        _made["stuck"] = group
        _ending.setdefault("status", 1)
    _forget_joining(is_stuck or default is None or default is not dist.group.WORLD)
    if problem is not None:
        warnings.warn(problem, MistakeWarning, stacklevel=2)


def manual_seed(seed: int, *, group: Group | None = None) -> None:
    """Seed torch's generators and restart the group's stream of dropout seeds; collective.

    Args:
        seed: int, the same on every rank.

    Raises:
        TypeError, ValueError: on every rank, when a seed is no int, out of torch's range
            [-2**63, 2**64) or not the one of the other ranks.
    """
    group = group or current_group()
    with group.agreed("manual_seed", {"seed": seed}):
        expect.integer(seed, "seed", at_least=_LOWEST_SEED, at_most=_HIGHEST_SEED)
    torch.manual_seed(seed)
    group.seeds.restart(signed(seed))


def check_joined() -> None:
    """Raise ``CommError`` where a launcher started several processes and this one joined nobody."""
    count = None if has_group() else environment.several_processes()
    if count is not None:
        raise CommError(
            f"nobody called sar.initialize_comms(), and {count} says that several processes were "
            "started: each would train alone; call it before a graph is loaded"
        )


def _check_place(rank: int, size: int) -> None:
    """Raise for a rank out of range, or of a process that has joined before."""
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank and world_size: got {rank} of {size}, expected 0 <= rank < size")
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (rank, size):
        got = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        raise ValueError(f"rank: got {rank} of {size}, but the process group says {got}")
    if "stuck" in _made:
        raise CommError(
            "initialize_comms: a collective that failed still waits inside of oneCCL, expected a "
            "process of its own for each try; start a new process"
        )
    if isinstance(process_group(), ProcessGroup):  # its threads and store would stay behind
        raise CommError("initialize_comms: called a second time, expected sar.shutdown() before")


def _forget_joining(is_users: bool) -> None:
    """Undo what joining did to this process; torch's default group may be the user's."""
    if isinstance(sys.excepthook, _ReportingHook):
        sys.excepthook = sys.excepthook.before
    if dist.is_initialized() and not is_users:
        dist.destroy_process_group()
    for variable in _made.pop("variables", ()):
        os.environ.pop(variable, None)


def _checked_backend(backend: str | None) -> str:
    """The backend, known and installed; importing oneCCL's binding registers it with torch."""
    made = dist.get_backend() if dist.is_initialized() else None
    known = made if made in BACKENDS else None  # torch has others, and one for each device
    backend = backend or known or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
    if known not in (None, backend):
        raise ValueError(f"backend: got {backend!r}, but the process group says {known!r}")
    is_there = {
        "gloo": lambda: True,
        "nccl": lambda: dist.is_nccl_available() and torch.cuda.is_available(),
        "ccl": _import_ccl,
        "mpi": dist.is_mpi_available,
    }
    if not is_there[backend]():
        raise MissingDependencyError(f"backend: got {backend!r}, which needs {_NEEDS[backend]}")
    return backend


def _import_ccl() -> bool:
    """Whether oneCCL's binding is installed. Raises ``MissingDependencyError`` where it does not
    load, as when it was built for another torch."""
    if importlib.util.find_spec(_CCL) is None:
        return False
    try:
        importlib.import_module(_CCL)
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependencyError(
            f"backend: got 'ccl', but {_CCL} does not load with torch {torch.__version__} "
            f"({error}); build it anew with examples/deploy/build_oneccl.py (docs/oneccl.md)"
        ) from error
    return True


class _ReportingHook:
    """An excepthook that leaves the error for the other ranks before the usual traceback."""

    def __init__(self) -> None:
        self.before = sys.excepthook

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        leave_after(error)
        self.before(kind, error, trace)


def leave_after(error: BaseException, status: int = 1) -> None:
    """Leave ``error`` for the other ranks, and make this process end at once, beginning no more.

    A collective may be in flight, and its peer may be stuck. So :func:`shutdown`, which waits for
    it, is not called at exit. Nor is the interpreter taken down: that waits too, and a transport
    that calls back meanwhile aborts the process. It ends with ``status`` after its exit handlers,
    those that were registered since ``sar`` was imported; with 130 after an interrupt.
    """
    atexit.unregister(shutdown)
    _tell_torchrun(error)
    group = process_group()
    if isinstance(group, ProcessGroup):
        group.leave(error)
    if isinstance(group, ProcessGroup) or stuck_threads:
        _ending["status"] = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else status


def _tell_torchrun(error: BaseException) -> None:
    """Leave ``error`` where torchrun looks for it: the end of what it prints names it then."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    try:
        raise error  # the handler writes the traceback of what is handled
    except BaseException:
        with suppress(OSError):
            get_error_handler().record_exception(error)


@atexit.register
def _end_at_once() -> None:
    if not _ending and not stuck_threads:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # absent, full, closed
            stream.flush()
    os._exit(_ending.get("status", 1))


def rank() -> int:
    """This process' index among the ranks; raises ``CommError`` before ``initialize_comms``."""
    return _initialized().rank


def world_size() -> int:
    """The number of ranks; raises ``CommError`` before ``initialize_comms``."""
    return _initialized().size


def comm_device() -> torch.device:
    """Where tensors must lie to be sent; raises ``CommError`` before ``initialize_comms``."""
    return _initialized().device


def backend() -> str:
    """Name of the transport; raises ``CommError`` before ``initialize_comms``."""
    return _initialized().backend


def is_initialized() -> bool:
    """True between ``initialize_comms`` and ``shutdown``."""
    return not isinstance(current_group(), LocalGroup)


def _initialized() -> Group:
    if not is_initialized():
        raise CommError("call sar.initialize_comms first")
    return current_group()
