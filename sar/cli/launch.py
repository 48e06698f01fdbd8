"""Starting the ranks of a command on this machine, or joining those of ``torchrun``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from sar import expect
from sar.allocator import allocator_environment, is_preloaded
from sar.cli.parser import USER_ERROR
from sar.cli.rank_environment import joined, start_server, worker_environment
from sar.cli.ranks import LOOPBACK, report_failure, run_ranks
from sar.cli.turns import work_in_turns
from sar.comm import Group, join_others, shutdown
from sar.comm.setup import leave_after
from sar.files import remove_left_over

Work = Callable[[argparse.Namespace, Group, torch.device], None]

MOST_RANKS_A_CORE = 4  # that start without being asked for


def check_rank_arguments(args: argparse.Namespace) -> None:
    """Raise ``ValueError`` for options of ranks that this machine does not serve."""
    if not is_preloaded(args.allocator) and joined():
        raise ValueError(
            f"--allocator: got {args.allocator}, but this rank was started without it; run "
            f'eval "$(sar environment --allocator {args.allocator})" before torchrun'
        )
    if vars(args).get("out_of_core") is not None and joined():
        raise ValueError(
            "--out-of-core: got it on a rank that something else started; expected sar "
            f"{args.command} without torchrun, as all parts train in one process"
        )
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: got cuda, but this torch finds no CUDA device; use cpu")


def backend_of(args: argparse.Namespace) -> str:
    if vars(args).get("out_of_core") is not None:
        return "turns"
    return args.backend or ("nccl" if args.device == "cuda" else "gloo")


def run_rank(
    args: argparse.Namespace, work: Work, check: Callable[[argparse.Namespace], None] | None = None
) -> None:
    """Be one rank: join the others, do ``work``, leave. An error is left for them to name.

    ``check`` looks at what may differ between hosts, such as folders; its error is raised by all
    ranks.
    """
    device = torch.device("cpu")
    if args.device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    try:
        if vars(args).get("out_of_core") is not None:
            work_in_turns(args, work)
            return
        others = vars(args).get("trainers", 0)  # of a server
        group = join_others(trainers=others, backend=backend_of(args), timeout=args.timeout)
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        if check is not None:
            group.agree(expect.problem(check, args))
        work(args, group, device)
    except (Exception, KeyboardInterrupt) as error:
        report_failure(error)
        leave_after(error, USER_ERROR)  # at once: that is what ends the others' waiting
        raise
    shutdown()


def launch(
    command: str,
    args: argparse.Namespace,
    nproc: int,
    address: tuple[str, int] = LOOPBACK,
    others: int = 0,
    tell: Callable[[str, int], None] | None = None,
) -> None:
    """Run ``sar.cli.<command>.work(args, ...)`` on ``nproc`` new processes of this machine, or in
    turns in one.

    They meet at ``address`` (port 0: any), as do ``others``, who start elsewhere; ``tell`` is
    called with it when they can. Raises ``ValueError`` for many more ranks than cores that nobody
    asked for, and ``SarError`` naming the first failing rank and its error; all ranks have ended
    then, as they have after an interrupt, which is raised again.
    """
    if vars(args).get("out_of_core") is not None:
        nproc = 1
    elif args.nproc is None:
        _check_ranks_a_core(nproc)
    remove_left_over(Path(tempfile.gettempdir()))
    server = vars(args).pop("server", None) or start_server(args, nproc)
    words = ["sar.cli.worker", command, json.dumps(vars(args))]
    run_ranks(words, server, args.timeout, address, others, tell)


def _check_ranks_a_core(nproc: int) -> None:
    cores = len(os.sched_getaffinity(0))
    if nproc > MOST_RANKS_A_CORE * cores:
        raise ValueError(
            f"--nproc: got nothing and a graph of {nproc} parts, so as many ranks would start on "
            f"{cores} cores, expected at most {MOST_RANKS_A_CORE} a core; give --nproc {nproc} to "
            "start them all the same, or cut the graph into fewer parts"
        )


def threads_of(args: argparse.Namespace, nproc: int) -> int:
    nproc = nproc if vars(args).get("out_of_core") is None else 1
    return int(worker_environment(nproc, args.threads)["OMP_NUM_THREADS"])


def print_environment(args: argparse.Namespace) -> int:
    """`sar environment`: print what to set for ranks that something else starts."""
    is_preloaded(args.allocator)  # raises where something else is
    for name, value in allocator_environment(args.allocator).items():
        if not os.environ.get(name):
            print(f"export {name}={shlex.quote(value)}")
    return 0
