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
    model_of,
    predict_cut,
    prediction_lines,
    report_lines,
)
from sar.cli.pictures import check_pictures, plot_cut
from sar.config import parse_bytes
from sar.partition.cut import PartitionOptions
from sar.partition.load import add_digests
from sar.partition.methods.base import Given, Method
from sar.partition.run import Partitioned, partition
from sar.partition.transform import Transforms
from sar.words import DEFAULT_METHOD

WARNING = "sar partition: warning: "
_ENDS = (signal.SIGTERM, signal.SIGHUP)
_UNEVEN = 1.5  # largest / mean of edges from which balancing is worth a word


def run(args: argparse.Namespace) -> int:
    if args.add_digests:
        return _add_digests(args)
    start = time.perf_counter()
    options, model = _options(args), model_of(args)
    check_pictures(args)
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


def _add_digests(args: argparse.Namespace) -> int:
    with Bars() as bars:
        count = add_digests(args.input, bars.show)
    found = {"path": args.input, "files": count}
    print(json.dumps(found) if args.json else f"digests  of {count} files added to {args.input}")
    return 0


def _options(args: argparse.Namespace) -> PartitionOptions:
    method: str | Method = args.method or DEFAULT_METHOD
    if args.assignment is not None:
        method = Given(args.assignment)
    return PartitionOptions(
        args.parts,
        method,
        None if args.balance is None else frozenset(args.balance),
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
    """Progress bars on the terminal, one after another."""

    def __enter__(self) -> "Bars":
        self._of, self._done = ("", 0), 0
        self._bar: Any = None
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def show(self, what: str, done: int, total: int) -> None:
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
    """Inside, SIGTERM and SIGHUP end this process as an error does: the run's files are removed."""

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
    """Inside, warnings go above the bar, without the source line that gave them."""

    from tqdm import tqdm

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: tqdm.write(
            f"{WARNING}{message}", file=sys.stderr
        )
        yield
