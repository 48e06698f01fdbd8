"""Options of every command that runs on ranks: how many, where, and how rows are streamed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from sar.cli.parser import Parser
from sar.cli.values import above_zero, add_gone, positive, size
from sar.words import ALLOCATORS, CONSTANT_INPUTS


def add_rank_arguments(parser: Parser) -> None:
    """Of ``sar.cli.launch``."""
    group = parser.add_argument_group("ranks")
    group.add_argument(
        "--nproc", type=positive, metavar="P", help="ranks to start; default: one for each part"
    )
    group.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where ranks compute"
    )
    more = parser.add_argument_group("ranks, more")
    more.add_argument(
        "--backend", metavar="WORD", type=_backend,
        help="gloo, nccl, ccl, mpi; default: gloo on the CPU, nccl on CUDA",
    )  # fmt: skip
    more.add_argument("--threads", type=positive, help="of a rank; default: its share of the cores")
    add_timeout(more)
    add_allocator_arguments(more)
    _add_policy_arguments(parser.add_argument_group("streaming"))
    _add_lossy_arguments(parser.add_argument_group("lossy"))
    parser.for_experts("ranks, more", "streaming", "lossy")


def add_timeout(group: Any) -> None:
    """How long a collective waits."""
    group.add_argument(
        "--timeout", type=above_zero, default=300.0, metavar="S", help="seconds to wait for a rank"
    )


def _backend(text: str) -> str:
    known = ("gloo", "nccl", "ccl", "mpi")
    if text not in known:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected one of {', '.join(known)}")
    return text


def add_allocator_arguments(group: Any) -> None:
    """Which allocator ranks start with."""
    group.add_argument(
        "--allocator", choices=ALLOCATORS, default="system",
        help="of the ranks' memory; tbb is faster, and larger where buffers differ",
    )  # fmt: skip
    add_gone(group, "--soft-limit", "system keeps nothing, tbb all that it likes")


def _add_policy_arguments(group: Any) -> None:
    """Fields of :class:`sar.Policy` that change no result beyond rounding."""
    group.add_argument(
        "--rounds",
        type=positive,
        help="rounds a layer's halo is fetched in; default: P - 1, strict",
    )
    group.add_argument(
        "--memory-budget", type=size, help="bytes of halo in flight, like 4GiB, not --rounds"
    )
    group.add_argument(
        "--block-bytes", type=size,
        help="bytes of edge values computed at once by messages without a kernel of their own; "
        "default: 8MiB, 1GiB on cuda",
    )  # fmt: skip
    group.add_argument(
        "--no-rematerialize", action="store_true", help="keep fetched rows for the backward pass"
    )
    group.add_argument(
        "--constant-inputs", choices=CONSTANT_INPUTS, default="memory",
        help="where sums of rows that stay the same are kept instead of sent again; mapped (files) "
        "also keeps what an attention layer reads of others",
    )  # fmt: skip
    group.add_argument(
        "--structure", choices=("both", "one"), default="both",
        help="orientations of the edges kept, 12 bytes an edge or 8",
    )  # fmt: skip
    group.add_argument(
        "--map-features", nargs="?", const=True, default=False, metavar="DIR",
        help="leave features in a temporary file (in DIR) instead of in memory",
    )  # fmt: skip
    group.add_argument(
        "--exchange", choices=("auto", "pull"), default="auto",
        help="what is least for sums and attention, or all source rows",
    )  # fmt: skip
    group.add_argument(
        "--zeros", choices=("send", "skip"), default="send",
        help="whether zeros of relu and dropout travel with rows that are summed",
    )  # fmt: skip


def _add_lossy_arguments(group: Any) -> None:
    whole = "rows travel whole; --zeros skip sends fewer bytes"
    add_gone(group, "--lossy-wire", whole)
    add_gone(group, "--lossy-gradient-wire", whole)
    add_gone(group, "--lossy-boundary-rate", whole, was="1.0")


def check_ranks(args: argparse.Namespace) -> Iterator[str]:
    """What these options say together."""
    if args.rounds is not None and args.memory_budget is not None:
        yield "--rounds and --memory-budget: got both, expected at most one of them"
    if args.backend == "nccl" and args.device == "cpu":
        yield "--backend: got nccl, which needs --device cuda"
