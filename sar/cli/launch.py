"""Starting the ranks of a command on this machine, or joining those that ``torchrun`` started."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sar.allocator import ALLOCATORS, allocator_environment, is_preloaded, set_soft_limit
from sar.comm import Group, initialize_comms, shutdown
from sar.comm.setup import leave_after
from sar.config import CONSTANT_INPUTS, WIRE_DTYPES, Lossy, Policy, parse_bytes
from sar.errors import SarError

Work = Callable[[argparse.Namespace, Group, torch.device], None]

USER_ERROR = 2  # a status, argparse's own
LAUNCHER_PID = "SAR_LAUNCHER_PID"
FAILED_FIRST = "another rank failed first: "  # how a rank names the cause of its own failure
_SHUTDOWN_SECONDS = 5


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every command that runs on ranks."""
    group = parser.add_argument_group("ranks")
    group.add_argument(
        "--nproc", type=int, metavar="P", help="ranks to start here, default one for each part"
    )
    group.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    group.add_argument(
        "--backend",
        choices=("gloo", "nccl", "ccl", "mpi"),
        help="default: gloo on the CPU, nccl on CUDA",
    )
    group.add_argument("--threads", type=int, help="threads a rank, default its share of the cores")
    add_allocator_arguments(group)
    group.add_argument(
        "--timeout", type=float, default=300.0, help="seconds to wait for a rank, default 300"
    )
    _add_policy_arguments(parser.add_argument_group("streaming"))
    _add_lossy_arguments(parser)


def add_allocator_arguments(group: Any) -> None:
    """Which allocator ranks start with, and what it may keep."""
    group.add_argument(
        "--allocator",
        choices=ALLOCATORS,
        default="system",
        help="of the ranks' memory: tbb is faster, and larger where buffers differ; default system",
    )
    group.add_argument(
        "--soft-limit",
        metavar="SIZE",
        help="memory of a rank above which tbb keeps no freed buffers, like 20GiB; default none",
    )


def soft_limit_of(args: argparse.Namespace) -> int | None:
    """Bytes; raises ``ValueError`` for no size, or with an allocator that knows no limit."""
    if args.soft_limit is None:
        return None
    size = parse_bytes(args.soft_limit, "--soft-limit")
    if args.allocator != "tbb":
        raise ValueError(
            f"--soft-limit: got {args.soft_limit} with --allocator {args.allocator}, expected tbb"
        )
    return size


def _add_policy_arguments(group: Any) -> None:
    """Fields of :class:`sar.Policy` that change no result beyond rounding."""
    group.add_argument(
        "--rounds", type=int, help="rounds a layer's halo is fetched in, default P - 1 (strict)"
    )
    group.add_argument(
        "--memory-budget", metavar="SIZE", help="bytes of halo in flight, like 4GiB, not --rounds"
    )
    group.add_argument(
        "--no-rematerialize", action="store_true", help="keep fetched rows for the backward pass"
    )
    group.add_argument(
        "--constant-inputs",
        choices=CONSTANT_INPUTS,
        default="memory",
        help="where sums of rows that stay the same are kept instead of sent again, default "
        "memory; mapped (files) also keeps what an attention layer reads of others",
    )
    group.add_argument(
        "--structure",
        metavar="both|one",
        default="both",
        help="orientations of the edges kept: both, 12 bytes an edge (default), or one, 8 bytes",
    )
    group.add_argument(
        "--map-features",
        nargs="?",
        const=True,
        default=False,
        metavar="DIR",
        help="leave features in a temporary file (in DIR) instead of in memory",
    )
    group.add_argument(
        "--exchange",
        choices=("auto", "pull"),
        default="auto",
        help="auto (the default) sends what is least for sums and attention, pull all source rows",
    )
    group.add_argument(
        "--zeros",
        choices=("send", "skip"),
        default="send",
        help="skip: rows are summed without sending the zeros of relu and dropout; default send",
    )


def _add_lossy_arguments(parser: argparse.ArgumentParser) -> None:
    lossy = parser.add_argument_group("lossy", "Fewer bytes on the wire for a result that differs.")
    lossy.add_argument("--lossy-wire", choices=WIRE_DTYPES, help="what feature rows travel as")
    lossy.add_argument("--lossy-gradient-wire", choices=WIRE_DTYPES, help="the same for gradients")
    lossy.add_argument(
        "--lossy-boundary-rate",
        type=float,
        default=1.0,
        metavar="R",
        help="share of remote rows that training reads, default 1",
    )


def check_rank_arguments(args: argparse.Namespace) -> None:
    """Raise ``ValueError`` or ``TypeError`` for what :func:`add_rank_arguments` took."""
    for name in ("nproc", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: got {value}, expected at least 1")
    if not 0 < args.timeout < math.inf:
        raise ValueError(f"--timeout: got {args.timeout}, expected more than 0 seconds")
    policy_of(args)
    soft_limit_of(args)
    _check_allocator(args.allocator)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: got cuda, but this torch finds no CUDA device; use cpu")
    if backend_of(args) == "nccl" and args.device == "cpu":
        raise ValueError("--backend: got nccl, which needs --device cuda")


def _check_allocator(name: str) -> None:
    """It has to be there when a rank's Python starts."""
    if not is_preloaded(name) and joined():
        raise ValueError(
            f"--allocator: got {name}, but this rank was started without it; run "
            f'eval "$(sar environment --allocator {name})" before torchrun'
        )


def policy_of(args: argparse.Namespace) -> Policy:
    """How halos are streamed."""
    lossy = Lossy(args.lossy_wire, args.lossy_gradient_wire, args.lossy_boundary_rate)
    return Policy(
        args.rounds,
        args.memory_budget,
        not args.no_rematerialize,
        lossy=lossy,
        constant_inputs=args.constant_inputs,
        structure=args.structure,
        exchange=args.exchange,
        zeros=args.zeros,
    )


def backend_of(args: argparse.Namespace) -> str:
    """The transport's name with the default filled in."""
    return args.backend or ("nccl" if args.device == "cuda" else "gloo")


def joined() -> bool:
    """Whether something else (``torchrun``, Slurm) already started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_rank(
    args: argparse.Namespace, work: Work, check: Callable[[argparse.Namespace], None] | None = None
) -> None:
    """Be one rank: join the others, do ``work``, leave. An error is left for them to name.

    Args:
        check: of what may differ between hosts, such as folders; its error is raised by all ranks.
    """
    device = torch.device("cpu")
    if args.device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    group = initialize_comms(backend=backend_of(args), timeout=args.timeout)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    limit = soft_limit_of(args)
    try:
        if limit is not None:
            set_soft_limit(limit)
        if check is not None:
            group.agree(_error_of(check, args))
        work(args, group, device)
    except (Exception, KeyboardInterrupt) as error:
        leave_after(error, USER_ERROR)  # at once: that is what ends the others' waiting
        raise
    shutdown()


def _error_of(check: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> Any:
    try:
        check(args)
    except Exception as error:  # any, too little memory as well: the others would wait
        return error
    return None


def launch(command: str, args: argparse.Namespace, nproc: int) -> None:
    """Run ``sar.cli.<command>.work(args, ...)`` on ``nproc`` new processes of this machine.

    Raises ``SarError`` naming the first failing rank and its error; all ranks have ended then, as
    they have after an interrupt, which is raised again.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    words = ["-m", "sar.cli.worker", command, _as_json(args)]
    with tempfile.TemporaryDirectory(prefix="sar-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # a free port
            local_addr="127.0.0.1",
            max_restarts=0,
            shutdown_timeout=_SHUTDOWN_SECONDS,
        )
        with _environment(worker_environment(nproc, args.threads, args.allocator)), _quiet_logs():
            try:
                elastic_launch(config, sys.executable)(*words)
            except ChildFailedError as error:
                raise SarError(first_cause(error.failures)) from None
            except SignalException as stop:
                if stop.sigval == signal.SIGINT:
                    raise KeyboardInterrupt from None
                raise SarError(f"stopped by {stop.sigval.name}; all ranks were ended") from None


def worker_environment(
    nproc: int, threads: int | None, allocator: str = "system"
) -> dict[str, str]:
    """What ranks find in their environment; what the user has set there stays."""
    share = max(1, len(os.sched_getaffinity(0)) // nproc)
    own = {"OMP_NUM_THREADS": str(threads or share), "SAR_KEEP_THREADS": "1"}
    wanted = {**allocator_environment(allocator), **own}
    kept = {name: os.environ[name] for name in wanted if os.environ.get(name)}
    if threads is not None:
        kept.pop("OMP_NUM_THREADS", None)
    return {**wanted, **kept, LAUNCHER_PID: str(os.getpid())}


def first_cause(failures: dict[int, Any]) -> str:
    """One line on the rank that failed first, not on those that lost their peer or were ended.

    Args:
        failures: torch's ``ProcessFailure`` of each failed rank.
    """
    # Stable, and torch lists those that had failed before those that it ended.
    reports = [f.error_file_data for f in failures.values()]
    first = min((report["when"] for report in reports if "kind" in report), default=math.inf)
    rank, failure = min(failures.items(), key=lambda item: _suspicion(item[1], first))
    report = failure.error_file_data
    if "kind" in report:
        text = " ".join(str(report["message"]).split()).rpartition(FAILED_FIRST)[2]
        return text if text.startswith("rank ") else f"rank {rank}: {report['kind']}: {text}"
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = "; out of memory?" if failure.exitcode == -signal.SIGKILL else ""
        return f"rank {rank}: killed by {name}{hint}"
    return f"rank {rank}: left with status {failure.exitcode}"


def _suspicion(failure: Any, first_report: float) -> tuple[int, float]:
    """Sorts failures: an error of its own, a signal, a status, a lost peer, ended by the launcher;
    among equals the earliest.

    Args:
        first_report: when the first rank reported an error. The launcher ends the others, at last
            by SIGKILL, some seconds later.
    """
    report = failure.error_file_data
    if "kind" in report:
        return 3 if report["kind"] == "CommError" else 0, report["when"]
    if failure.exitcode < 0:
        by_launcher = failure.timestamp > first_report + _SHUTDOWN_SECONDS - 2
        return 4 if failure.exitcode == -signal.SIGTERM or by_launcher else 1, 0.0
    return 2, 0.0


def _as_json(args: argparse.Namespace) -> str:
    """The arguments without the parser's functions."""
    plain = {name: value for name, value in vars(args).items() if not callable(value)}
    return json.dumps(plain)


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """Set variables for the processes started inside, and put back what was there."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """The launcher's own log tells of every rank at length; one line of ours does."""
    logger = logging.getLogger("torch.distributed.elastic")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
