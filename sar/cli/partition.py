"""`sar partition`: cut a graph and write its partitions."""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

from sar.cli.cut_report import (
    add_model_arguments,
    model_of,
    predict_cut,
    prediction_lines,
    report_lines,
)
from sar.cli.pictures import add_plot_arguments, check_plot, plot_cut
from sar.config import parse_bytes
from sar.partition.cut import DEFAULT_METHOD, METHODS
from sar.partition.methods.base import BALANCES, Method
from sar.partition.methods.given import Given
from sar.partition.options import KEEP, PartitionOptions
from sar.partition.run import Partitioned, partition
from sar.partition.sources.open import ACCEPTED
from sar.partition.transform import SELF_LOOPS, Transforms
from sar.partition.write import FORMATS

WARNING = "sar partition: warning: "
_ENDS = (signal.SIGTERM, signal.SIGHUP)
_UNEVEN = 1.5  # largest / mean of edges from which balancing is worth a word


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "partition",
        help="cut a graph into partitions",
        description="Cut a graph into partitions, one per rank, in DGL's partition_graph layout. "
        "The graph may be larger than memory. An interrupted run goes on from its cut.",
        epilog=f"INPUT is one of: {ACCEPTED}.",
    )
    parser.add_argument("input", metavar="INPUT", help="the graph, see below")
    parser.add_argument(
        "--parts", type=positive, required=True, metavar="P", help="number of partitions"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write into")
    _add_cut(parser)
    _add_edges(parser)
    parser.add_argument("--name", help="name of the graph and of its JSON file")
    parser.add_argument("--format", choices=FORMATS, default="dgl", help="layout, default: dgl")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace partitions that are in DIR"
    )
    report = parser.add_argument_group("report")
    report.add_argument("--json", action="store_true", help="print it as one JSON object")
    add_plot_arguments(report, "sizes of parts and rows between them")
    add_model_arguments(parser)
    return parser


def _add_cut(parser: argparse.ArgumentParser) -> None:
    cut = parser.add_argument_group("cut")
    cut.add_argument(
        "--method",
        choices=(*METHODS, KEEP),
        help=f"default: {DEFAULT_METHOD}; {KEEP}: the parts of partitions that are read",
    )
    cut.add_argument(
        "--assignment",
        metavar="FILE",
        help="the part of each node instead: .npy, a text file, or a folder of one for each type",
    )
    cut.add_argument(
        "--balance",
        metavar="WHAT",
        help=f"what parts share equally beside nodes: some of {','.join(BALANCES)}; "
        "nodes: nothing else",
    )
    cut.add_argument("--seed", type=int, default=0, help="of the cut, default 0")
    cut.add_argument(
        "--memory", metavar="SIZE", help="that the run may use, like 8GiB; default: no bound"
    )


def _add_edges(parser: argparse.ArgumentParser) -> None:
    edges = parser.add_argument_group("edges and data")
    edges.add_argument(
        "--symmetrise", action="store_true", help="every edge in both directions, once"
    )
    edges.add_argument(
        "--drop-duplicates", action="store_true", help="of equal edges keep the first"
    )
    edges.add_argument("--self-loops", choices=SELF_LOOPS, default="keep", help="default: keep")
    edges.add_argument(
        "--allow-nan", action="store_true", help="take features that are no finite numbers"
    )


def positive(text: str) -> int:
    """argparse type: an integer of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of 1 or more")
    return value


def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    options, model = _options(args), model_of(args)
    check_plot(args)
    with _tidy_ends(), Bars() as bars, _warnings_in_a_line():
        done = partition(args.input, args.out, options, bars.show)
    predicted = None if model is None else predict_cut(done.graph, done.quality, model)
    if model is not None and predicted is None:
        print(
            f"{WARNING}nothing is predicted for a graph of several types, or without 'feat'",
            file=sys.stderr,
        )
    plot_cut(args, done.quality.to_dict())
    seconds = time.perf_counter() - start
    if args.json:
        found = done.quality.to_dict() | {"path": done.path, "seconds": seconds}
        if done.before is not None:
            found["without_balance"] = done.before.to_dict()
        if predicted is not None:
            found["predicted"] = predicted.to_dict()
        print(json.dumps(found, indent=2))
        return 0
    lines = _report(done, args)
    lines += [] if predicted is None else prediction_lines(predicted)
    print("\n".join([*lines, f"written  {done.path} in {seconds:.1f} s"]))
    return 0


def _options(args: argparse.Namespace) -> PartitionOptions:
    if args.seed < 0:
        raise ValueError(f"--seed is {args.seed}, expected 0 or more")
    method: str | Method = args.method or DEFAULT_METHOD
    if args.assignment is not None:
        if args.method is not None:
            raise ValueError(f"--method {args.method} and --assignment: expected one of them")
        method = Given(args.assignment)
    balance = None if args.balance is None else args.balance.split(",")
    for one in balance or ():
        if one not in ("nodes", *BALANCES):
            raise ValueError(
                f"--balance: got {one!r}, expected some of nodes,{','.join(BALANCES)}"
            )
    return PartitionOptions(
        args.parts,
        method,
        None if balance is None else frozenset(balance),
        args.seed,
        Transforms(args.symmetrise, args.drop_duplicates, args.self_loops),
        args.allow_nan,
        None if args.memory is None else parse_bytes(args.memory, "--memory"),
        args.name,
        args.format,
        args.overwrite,
    )


def _report(done: Partitioned, args: argparse.Namespace) -> list[str]:
    lines = report_lines(done.quality, done.before)
    if done.resumed:
        lines.insert(1, "resumed  the cut of a run that was interrupted")
    is_plain = args.method in (None, DEFAULT_METHOD) and args.assignment is None
    if is_plain and done.before is None and done.quality.edge_balance > _UNEVEN:
        lines.append(
            "hint     one part has many more edges than the mean: --balance edges,halo evens them"
        )
    return lines


class Bars:
    """A bar on the terminal for each thing that takes time, one after another."""

    def __enter__(self) -> "Bars":
        self._of, self._done = ("", 0), 0
        self._bar: Any = None
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def show(self, what: str, done: int, total: int) -> None:
        """That much of it is done; the bar of what was done before goes."""
        from tqdm import tqdm

        if (what, total) != self._of or done < self._done:
            self._close()
            self._of, self._done = (what, total), 0
            self._bar = tqdm(
                total=total or None, desc=what, unit="", unit_scale=True, miniters=1, leave=False,
                dynamic_ncols=True, disable=None,
            )  # fmt: skip
        self._bar.update(done - self._done)
        self._done = done

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


@contextlib.contextmanager
def _tidy_ends() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process as an error does: files of the run are removed."""

    taken: list[signal.Signals] = []

    def end(number: int, _: object) -> None:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)  # a second one ends it at once
        # No print: it may be in the middle of one.
        os.write(2, f"sar partition: ended by {signal.Signals(number).name}\n".encode())
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        taken = [one for one in _ENDS if signal.getsignal(one) == signal.SIG_DFL]  # not of nohup
    for one in taken:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Warnings without the line of this program that gave them, above the bar."""

    from tqdm import tqdm

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: tqdm.write(
            f"{WARNING}{message}", file=sys.stderr
        )
        yield
