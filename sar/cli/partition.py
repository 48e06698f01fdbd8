"""`sar partition`: cut a graph and write its partitions."""

import argparse
import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sar.partition.arrays import GraphArrays
from sar.partition.cut import METHODS, assign
from sar.partition.sources.apart import open_apart
from sar.partition.sources.open import ACCEPTED
from sar.partition.write import check_output, write_partitions

WARNING = "sar partition: warning: "


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "partition",
        help="cut a graph into partitions",
        description="Cut a graph into partitions, one per rank, in DGL's partition_graph layout.",
        epilog=f"INPUT is one of: {ACCEPTED}.",
    )
    parser.add_argument("input", metavar="INPUT", help="the graph, see below")
    parser.add_argument(
        "--parts", type=positive, required=True, metavar="P", help="number of partitions"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write into")
    parser.add_argument("--method", choices=METHODS, default="metis", help="default: metis")
    parser.add_argument("--seed", type=int, default=0, help="of the cut, default 0")
    parser.add_argument(
        "--balance",
        choices=("nodes", "edges"),
        help="what METIS balances: nodes alone, or edges too (default with one node type)",
    )
    parser.add_argument("--name", help="name of the graph and of its JSON file")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace partitions that are in DIR"
    )
    return parser


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
    if args.seed < 0:
        raise ValueError(f"--seed is {args.seed}, expected 0 or more")
    check_output(Path(args.out), args.overwrite)
    with _warnings_in_a_line():
        graph = open_apart(args.input)
    balance_edges = None if args.balance is None else args.balance == "edges"
    with _quiet():
        parts = assign(graph, args.parts, args.method, args.seed, balance_edges=balance_edges)
    path = write_partitions(
        graph,
        parts,
        args.out,
        args.name,
        num_parts=args.parts,
        method=args.method,
        overwrite=args.overwrite,
    )
    for line in _summary(graph, parts, args.parts):
        print(line)
    print(f"written  {path} in {time.perf_counter() - start:.1f} s")
    return 0


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Warnings without the line of this program that gave them."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"{WARNING}{message}", file=sys.stderr)
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what compiled code writes to stderr: DGL's METIS reports every call there."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _summary(graph: GraphArrays, parts: np.ndarray, num_parts: int) -> list[str]:
    offsets = graph.node_offsets()
    nodes = np.bincount(parts, minlength=num_parts)
    edges = np.zeros(num_parts, dtype=np.int64)
    cut = 0
    for (src_type, _, dst_type), (src, dst) in graph.edges.items():
        home = parts[dst.numpy() + offsets[dst_type]]
        edges += np.bincount(home, minlength=num_parts)
        cut += int((parts[src.numpy() + offsets[src_type]] != home).sum())
    total = graph.total_edges
    share = f" ({100 * cut / total:.1f} %)" if total else ""
    empty = int((nodes == 0).sum())
    return [
        f"graph    {graph.name}: {graph.total_nodes:,} nodes, {total:,} edges, "
        f"{len(graph.num_nodes)} node and {len(graph.edges)} edge types",
        f"cut      {cut:,} edges{share} run between {num_parts} partitions",
        f"nodes    {_spread(nodes)}",
        f"edges    {_spread(edges)}",
        *([f"empty    {empty:,} of {num_parts:,} partitions have no node"] if empty else []),
    ]


def _spread(counts: np.ndarray) -> str:
    mean = counts.mean()
    balance = counts.max() / mean if mean else 1.0
    return f"{counts.min():,} to {counts.max():,} a partition, largest / mean {balance:.3f}"
