"""From a graph, wherever it lies, to partitions on disk.

The cut is kept beside them until they are written, for a run that is interrupted.
"""

from __future__ import annotations

import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from sar.files import (
    locked_folder,
    parents_of,
    remove_left_over,
    scratch_folder,
    write_whole,
)
from sar.partition.arrays import GraphArrays
from sar.partition.book import graph_digest
from sar.partition.cut import KEEP, METHODS, PartitionOptions, assign, check_memory
from sar.partition.methods.base import Method
from sar.partition.progress import Progress, silent
from sar.partition.quality import CutQuality, measure
from sar.partition.sources.datasets import from_dgl
from sar.partition.sources.open import IDS, Opened, check_finite, open_input
from sar.partition.transform import transform
from sar.partition.write import check_output, output_folder, write_partitions
from sar.words import DEFAULT_METHOD

_KEPT = re.compile(r"[0-9a-f]{32}\.npz(\.partial)?")
_VERSION = 1  # of what the same options give; another one makes no use of what is left


@dataclass(frozen=True)
class Partitioned:
    """What was written.

    Attributes:
        path: of the JSON, or of the folder in PyG's format.
        quality: of the cut. before: of the same cut without ``balance``, where that was asked for.
        resumed: whether the cut of an interrupted run was used.
    """

    path: str
    graph: GraphArrays
    quality: CutQuality
    before: CutQuality | None
    resumed: bool


def partition(
    source: Any,
    out_dir: str | os.PathLike,
    options: PartitionOptions,
    progress: Progress = silent,
) -> Partitioned:
    """As :func:`partition_graph`; returns what was written and how good the cut is.

    A run that is interrupted leaves its cut in ``<out_dir>.cut``; the next one with the same graph
    and options uses it. Files that are larger than memory lie beside ``out_dir`` meanwhile.

    Args:
        progress: called with what is done, how much of it, and of how much (see
            `sar.partition.progress`).
    """
    options.check()
    out = output_folder(out_dir)
    kept = out.parent / f"{out.name}.cut"  # also of the root, which check_output refuses
    remove_left_over(out.parent)
    if kept.is_dir():
        with suppress(OSError), locked_folder(kept):
            pass  # it goes if it is empty, and nobody has it
    check_output(out, options.overwrite)
    with ExitStack() as held:
        held.enter_context(parents_of(out))
        try:
            held.enter_context(locked_folder(kept))
        except BlockingIOError as error:
            raise FileExistsError(
                f"output folder {str(out)!r}: another run, which goes on, writes it"
            ) from error
        scratch = held.enter_context(scratch_folder(out.parent))
        opened = open_graph(source, scratch, options.allow_nan, progress)
        graph = transform(opened.graph, options.transforms, scratch / "edges", progress)
        has_mask = any("train_mask" in data for data in graph.node_data.values())
        if options.balance and "train" in options.balance and not has_mask:
            raise ValueError("balance: got 'train', but no node type has a 'train_mask'")
        check_memory(graph, options)
        cut = _cut(opened._replace(graph=graph), options, kept, scratch, progress)
        quality = measure(graph, cut.parts, options.num_parts, progress=progress)
        path = write_partitions(
            graph,
            cut.parts,
            out,
            options.name,
            num_parts=options.num_parts,
            method=getattr(options.method, "name", str(options.method)),
            overwrite=options.overwrite,
            format=options.format,
            progress=progress,
            beside=[scratch / IDS] if (scratch / IDS).is_dir() else [],
            last=lambda: _forget(kept),
        )
    return Partitioned(path, graph, quality, cut.before, cut.resumed)


def partition_graph(
    source: Any,
    out_dir: str | os.PathLike,
    num_parts: int,
    *,
    method: str | Method = DEFAULT_METHOD,
    balance: Iterable[str] | None = None,
    **options: Any,
) -> str:
    """Cut ``source`` into ``num_parts`` and write them to ``out_dir``.

    Returns what to load: the path of the JSON, or of the folder in PyG's format.

    ``out_dir`` appears whole or not at all. An interrupted run goes on from its cut when it is
    called again with the same graph and options.

    Args:
        source: text as of ``sar partition INPUT``, a path, a DGL graph, a ``Data`` or
            ``HeteroData`` of PyG, or `GraphArrays`.
        method: a name of `sar.partition.cut.METHODS`, "keep" or a `Method`.
        balance: of "edges", "halo" and "train", what parts share equally beside nodes.
        options: the other fields of :class:`PartitionOptions`: ``seed``, ``transforms``,
            ``allow_nan``, ``memory``, ``name``, ``format``, ``overwrite``.

    Raises:
        ValueError, TypeError: bad input or options.
        SarError: damaged files, or what the method needs is missing.
        FileExistsError: partitions are there, or another run writes them.
        OSError: what could not be written, by name.
    """
    wanted = None if balance is None else frozenset(balance)
    return partition(source, out_dir, PartitionOptions(num_parts, method, wanted, **options)).path


def open_graph(source: Any, scratch: Path, allow_nan: bool, progress: Progress = silent) -> Opened:
    """The graph of any ``source`` of :func:`partition_graph`; files lie in ``scratch``."""
    if isinstance(source, (str, os.PathLike)):
        return open_input(os.fspath(source), scratch, allow_nan=allow_nan, progress=progress)
    if isinstance(source, GraphArrays):
        graph = source.with_orig_ids().validate(progress)
    elif hasattr(source, "canonical_etypes"):
        graph = from_dgl(source, "graph")
    elif hasattr(source, "to_dict"):
        from sar.partition.sources.pyg import from_pyg

        graph = from_pyg(source, "graph")
    else:
        raise TypeError(
            f"source is {type(source).__name__}, expected text, a path, a DGL graph, PyG's Data or "
            "HeteroData, or GraphArrays"
        )
    if not allow_nan:
        check_finite(graph, "source", progress)
    return Opened(graph)


class _Cut(NamedTuple):
    """Int [N] parts of the nodes, and the fields of `Partitioned` that tell of the cut."""

    parts: np.ndarray
    before: CutQuality | None = None
    resumed: bool = False


def _cut(
    opened: Opened, options: PartitionOptions, kept: Path, scratch: Path, progress: Progress
) -> _Cut:
    """A new cut, or the one that an interrupted run left in the folder ``kept``."""
    graph, num_parts = opened.graph, options.num_parts
    if options.method == KEEP:
        if opened.parts is None:
            raise ValueError(f"method {KEEP!r} keeps the parts of partitions; the input has none")
        if opened.num_parts != num_parts:
            given = f"the input has {opened.num_parts} parts"
            raise ValueError(f"method {KEEP!r}: {given}, got num_parts {num_parts}")
        return _Cut(opened.parts)
    is_named = options.method in METHODS  # the user's own may depend on anything
    arrays: dict[str, np.ndarray] = {}
    if is_named:
        file = kept / f"{_key(graph, options, progress)}.npz"
        arrays = _read_arrays(file, (graph.total_nodes,))
    resumed = "parts" in arrays
    if not resumed:
        arrays["parts"] = assign(
            graph, num_parts, options.method, options.seed,
            balance=options.balance, scratch=scratch, progress=progress,
            unbalanced=lambda parts: arrays.update(unbalanced=parts),
        )  # fmt: skip
    if not is_named:
        return _Cut(arrays["parts"])
    if not resumed:
        named: dict[str, Any] = dict(arrays)
        write_whole(file, lambda opened: np.savez(opened, **named))
    before = None
    if "unbalanced" in arrays:
        before = measure(graph, arrays["unbalanced"], num_parts, progress=progress)
    return _Cut(arrays["parts"], before, resumed)


def _key(graph: GraphArrays, options: PartitionOptions, progress: Progress) -> str:
    """A digest of all that the cut depends on."""
    balance = None if options.balance is None else sorted(options.balance)
    about = [_VERSION, graph_digest(graph, progress), options.num_parts, options.method]
    return xxhash.xxh3_128_hexdigest(repr([*about, balance, options.seed]))


def _forget(kept: Path) -> None:
    for path in kept.iterdir():
        if _KEPT.fullmatch(path.name):
            path.unlink()


def _read_arrays(path: Path, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Integer arrays of ``shape`` from an ``.npz``; none where it is damaged or not there."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            if archive.zip.testzip() is not None:
                return {}
            arrays = dict(archive)
    except (
        OSError, ValueError, EOFError, KeyError, RuntimeError, struct.error, zipfile.BadZipFile,
        zlib.error,
    ):  # fmt: skip
        return {}
    is_whole = all(one.shape == shape and one.dtype.kind in "iu" for one in arrays.values())
    return arrays if is_whole else {}
