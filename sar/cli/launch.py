"""Starting the ranks of a command on this machine, or joining those that ``torchrun`` started."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sar.allocator import ALLOCATORS, allocator_environment, is_preloaded, set_soft_limit
from sar.cli.ranks import LOOPBACK, report_failure, run_ranks
from sar.comm import Group, join_others, shutdown
from sar.comm.setup import leave_after
from sar.config import CONSTANT_INPUTS, WIRE_DTYPES, Lossy, Policy, parse_bytes
from sar.files import remove_left_over

Work = Callable[[argparse.Namespace, Group, torch.device], None]

USER_ERROR = 2  # a status, argparse's own
MOST_RANKS_A_CORE = 4  # that start without being asked for


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


def set_allocator_arguments(parser: argparse.ArgumentParser) -> None:
    """What ranks start with where the command does not ask."""
    parser.set_defaults(device="cpu", backend="gloo", allocator="system", soft_limit=None)


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
        "--block-bytes",
        metavar="SIZE",
        help="bytes of edge values computed at once by messages without a kernel of their own, "
        "default 8MiB, 1GiB on cuda",
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
        args.block_bytes,
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
    try:
        others = vars(args).get("trainers", 0)  # of a server
        group = join_others(after=others, backend=backend_of(args), timeout=args.timeout)
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        limit = soft_limit_of(args)
        if limit is not None:
            set_soft_limit(limit)
        if check is not None:
            group.agree(_error_of(check, args))
        work(args, group, device)
    except (Exception, KeyboardInterrupt) as error:
        report_failure(error)
        leave_after(error, USER_ERROR)  # at once: that is what ends the others' waiting
        raise
    shutdown()


def _error_of(check: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> Any:
    try:
        check(args)
    except Exception as error:  # any, too little memory as well: the others would wait
        return error
    return None


def launch(
    command: str,
    args: argparse.Namespace,
    nproc: int,
    address: tuple[str, int] = LOOPBACK,
    others: int = 0,
    tell: Callable[[str, int], None] | None = None,
) -> None:
    """Run ``sar.cli.<command>.work(args, ...)`` on ``nproc`` new processes of this machine.

    Args:
        address: where they meet, port 0 for any, and are met by ``others``, who start elsewhere.
        tell: is called with the address when they can.

    Raises ``ValueError`` for many more ranks than cores that nobody asked for, and ``SarError``
    naming the first failing rank and its error; all ranks have ended then, as they have after an
    interrupt, which is raised again.
    """
    if args.nproc is None:
        _check_ranks_a_core(nproc)
    remove_left_over(Path(tempfile.gettempdir()))
    words = ["sar.cli.worker", command, _as_json(args)]
    environment = worker_environment(nproc, args.threads, args.allocator)
    run_ranks(words, nproc, environment, args.timeout, address, others, tell)


def _check_ranks_a_core(nproc: int) -> None:
    cores = len(os.sched_getaffinity(0))
    if nproc > MOST_RANKS_A_CORE * cores:
        raise ValueError(
            f"--nproc: got nothing and a graph of {nproc} parts, so as many ranks would start on "
            f"{cores} cores, expected at most {MOST_RANKS_A_CORE} a core; give --nproc {nproc} to "
            "start them all the same, or cut the graph into fewer parts"
        )


def threads_of(args: argparse.Namespace, nproc: int) -> int:
    """How many threads each rank will have, as :func:`worker_environment` says it."""
    return int(worker_environment(nproc, args.threads)["OMP_NUM_THREADS"])


def share_of_cores(nproc: int) -> int:
    """Threads of a rank where nobody says."""
    return max(1, len(os.sched_getaffinity(0)) // nproc)


def worker_environment(
    nproc: int, threads: int | None, allocator: str = "system"
) -> dict[str, str]:
    """What ranks find in their environment; what the user has set there stays."""
    own = {"OMP_NUM_THREADS": str(threads or share_of_cores(nproc)), "SAR_KEEP_THREADS": "1"}
    wanted = {**allocator_environment(allocator), **own}
    kept = {name: os.environ[name] for name in wanted if os.environ.get(name)}
    if threads is not None:
        kept.pop("OMP_NUM_THREADS", None)
    return {**wanted, **kept}


def _as_json(args: argparse.Namespace) -> str:
    """The arguments without the parser's functions."""
    plain = {name: value for name, value in vars(args).items() if not callable(value)}
    return json.dumps(plain)
