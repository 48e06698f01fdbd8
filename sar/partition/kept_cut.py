"""A cut that is kept on disk until the partitions are written, for a run that is interrupted."""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from sar.files import write_whole
from sar.partition.cut import METHODS, assign
from sar.partition.digest import graph_digest
from sar.partition.options import KEEP, PartitionOptions
from sar.partition.progress import Progress
from sar.partition.quality import CutQuality, measure
from sar.partition.sources.inputs import Opened

_KEPT = re.compile(r"[0-9a-f]{32}\.npz(\.partial)?")
_VERSION = 1  # of what the same options give; another one makes no use of what is left


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
