"""From a graph, wherever it lies, to partitions on disk.

The cut is kept beside them until they are written, for a run that is interrupted.
"""

from __future__ import annotations

import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from sar.partition.sources.open import IDS, Opened, open_input
from sar.partition.transform import transform
from sar.partition.write import (
    check_output,
    output_folder,
    write_partitions,
)
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
    """Cut ``source`` and write its partitions to ``out_dir``, which appears whole or not at all.

    A run that is interrupted leaves its cut in ``<out_dir>.cut``; the next one with the same graph
    and options uses it. Files that are larger than memory lie beside ``out_dir`` meanwhile.

    Args:
        source: text as of ``sar partition INPUT``, a path, a DGL graph, a ``Data`` or
            ``HeteroData`` of PyG, or `GraphArrays`.
        progress: called with what is done, how much of it, and of how much (see
            `sar.partition.progress`).

    Raises ``ValueError``, ``TypeError``, ``SarError`` for bad input and options, ``OSError`` that
    names what could not be written.
    """
    options.check()
    out = output_folder(out_dir)
    _tidy(out)
    check_output(out, options.overwrite)
    with parents_of(out), _reserved(out) as kept, scratch_folder(out.parent) as scratch:
        opened = _open(source, scratch, options.allow_nan, progress)
        graph = transform(opened.graph, options.transforms, scratch / "edges", progress)
        _check_train(graph, options.balance)
        check_memory(graph, options)
        cut = KeptCut(opened._replace(graph=graph), options, kept, scratch, progress)
        parts = cut.parts()
        quality = measure(graph, parts, options.num_parts, progress=progress)
        path = write_partitions(
            graph,
            parts,
            out,
            options.name,
            num_parts=options.num_parts,
            method=cut.name,
            overwrite=options.overwrite,
            format=options.format,
            progress=progress,
            beside=[scratch / IDS] if (scratch / IDS).is_dir() else [],
            last=cut.forget,
        )
    return Partitioned(path, graph, quality, cut.before, cut.resumed)


def _kept_beside(out: Path) -> Path:
    return out.parent / f"{out.name}.cut"  # also of the root, which check_output refuses


def _tidy(out: Path) -> None:
    """Remove what killed runs left, all but a cut."""
    remove_left_over(out.parent)
    if _kept_beside(out).is_dir():
        with suppress(OSError), locked_folder(_kept_beside(out)):
            pass  # it goes if it is empty, and nobody has it


@contextmanager
def _reserved(out: Path) -> Iterator[Path]:
    """``<out>.cut``, while no other run has it. Raises ``FileExistsError``."""
    with ExitStack() as held:
        try:
            kept = held.enter_context(locked_folder(_kept_beside(out)))
        except BlockingIOError as error:
            raise FileExistsError(
                f"output folder {str(out)!r}: another run, which goes on, writes it"
            ) from error
        yield kept


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


def _open(source: Any, scratch: Path, allow_nan: bool, progress: Progress) -> Opened:
    if isinstance(source, GraphArrays):
        return Opened(source.with_orig_ids().validate(progress))
    if isinstance(source, (str, os.PathLike)):
        return open_input(os.fspath(source), scratch, allow_nan=allow_nan, progress=progress)
    if hasattr(source, "canonical_etypes"):
        return Opened(from_dgl(source, "graph"))
    if hasattr(source, "to_dict"):
        from sar.partition.sources.pyg import from_pyg

        return Opened(from_pyg(source, "graph"))
    raise TypeError(
        f"source is {type(source).__name__}, expected text, a path, a DGL graph, PyG's Data or "
        "HeteroData, or GraphArrays"
    )


def _check_train(graph: GraphArrays, balance: frozenset[str] | None) -> None:
    has_mask = any("train_mask" in data for data in graph.node_data.values())
    if balance and "train" in balance and not has_mask:
        raise ValueError("balance: got 'train', but no node type has a 'train_mask'")


class KeptCut:
    """Who owns which node, kept on disk until the partitions are written."""

    def __init__(
        self,
        opened: Opened,
        options: PartitionOptions,
        folder: Path,
        scratch: Path,
        progress: Progress,
    ) -> None:
        self._graph, self._given, self._num_given = opened
        self._options, self._scratch, self._progress = options, scratch, progress
        self._folder = folder
        method = options.method
        self.name = method if isinstance(method, str) else method.name
        self.resumed = False
        self.before: CutQuality | None = None

    def parts(self) -> np.ndarray:
        """int [N]; sets ``before`` where the cut was balanced."""
        if self._options.method == KEEP:
            return self._given_parts()
        if self._options.method not in METHODS:  # the user's own may depend on anything
            return self._assign({})
        kept = self._folder / f"{self._key()}.npz"
        arrays = _read_arrays(kept, (self._graph.total_nodes,))
        self.resumed = "parts" in arrays
        if not self.resumed:
            arrays["parts"] = self._assign(arrays)
            _write_arrays(kept, arrays)
        if "unbalanced" in arrays:
            self.before = measure(
                self._graph,
                arrays["unbalanced"],
                self._options.num_parts,
                progress=self._progress,
            )
        return arrays["parts"]

    def _assign(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Also puts the parts without balance into ``arrays``."""
        options = self._options

        def keep(parts: np.ndarray) -> None:
            arrays["unbalanced"] = parts

        return assign(
            self._graph, options.num_parts, options.method, options.seed,
            balance=options.balance, scratch=self._scratch, unbalanced=keep,
            progress=self._progress,
        )  # fmt: skip

    def forget(self) -> None:
        """Of the files that interrupted runs left."""
        for path in self._folder.iterdir():
            if _KEPT.fullmatch(path.name):
                path.unlink()

    def _given_parts(self) -> np.ndarray:
        if self._given is None:
            raise ValueError(f"method {KEEP!r} keeps the parts of partitions; the input has none")
        if self._num_given != self._options.num_parts:
            raise ValueError(
                f"method {KEEP!r}: the input has {self._num_given} parts, got num_parts "
                f"{self._options.num_parts}"
            )
        return self._given

    def _key(self) -> str:
        """Of all that the cut depends on."""
        options = self._options
        balance = None if options.balance is None else sorted(options.balance)
        digest = graph_digest(self._graph, self._progress)
        about = [_VERSION, digest, options.num_parts, self.name]
        return xxhash.xxh3_128_hexdigest(repr([*about, balance, options.seed]))


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    named: dict[str, Any] = dict(arrays)
    write_whole(path, lambda file: np.savez(file, **named))


def _read_arrays(path: Path, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """What is there; nothing for what is damaged, or not there."""
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
