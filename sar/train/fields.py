"""Fields of nodes by name: which there are, whether they fit, and their rows."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sar.partition.book import PartitionBook
from sar.partition.column import RowFile
from sar.partition.features import FeatureStore
from sar.partition.load import read_book, read_node_features
from sar.train.options import DataOptions


def target_type(book: PartitionBook, store: FeatureStore, options: DataOptions) -> str:
    """The node type that labels are of.

    Raises ``ValueError`` for one that there is not, and where none is named and not exactly one
    has labels.
    """
    name = options.target_type
    if name is not None:
        if name not in book.ntypes:
            near = difflib.get_close_matches(name, book.ntypes, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"target_type: got {name!r}, expected one of {', '.join(book.ntypes)}{hint}"
            )
        return name
    if len(book.ntypes) == 1:
        return book.ntypes[0]
    having = [ntype for ntype in book.ntypes if f"{ntype}/{options.labels}" in store]
    if len(having) != 1:
        why = f"{', '.join(having)} have" if having else "none has"
        raise ValueError(
            f"target_type: got nothing and node types {', '.join(book.ntypes)}, of which {why} "
            f"{options.labels!r}; expected --target-type TYPE"
        )
    return having[0]


def check_fields(
    json_path: str | os.PathLike,
    options: DataOptions,
    needed: Sequence[str] = (),
) -> tuple[PartitionBook, list[str]]:
    """Raise now what :func:`sar.train.load_node_data` would about names and types; local.

    Reads the headers of the first part. Args: ``needed`` are masks.

    Returns what the partitions are, and the node types that have features. The error tells all
    that is wrong.
    """
    book = read_book(json_path)
    store = read_node_features(book, 0)
    ntype = target_type(book, store, options)
    kinds = {t: Fields(book, 0, store, t) for t in book.ntypes}
    having = [t for t, fields in kinds.items() if fields.has(options.features)]
    looked_at = [(kinds[t].check_matrix, options.features, "features") for t in having or [ntype]]
    looked_at.append((kinds[ntype].find, options.labels, "labels"))
    looked_at += [(kinds[ntype].find, name, "mask") for name in needed]
    problems = []
    for check, name, what in looked_at:
        try:
            check(name, what)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
    return book, having


def check_names(json_path: str | os.PathLike, names: dict[str, str | None]) -> None:
    """Raise ``ValueError`` for a field that no node type has; ``None`` is not looked at."""
    book = read_book(json_path)
    store = read_node_features(book, 0)
    kinds = [Fields(book, 0, store, ntype) for ntype in book.ntypes]
    for what, name in names.items():
        if name is not None and not any(fields.has(name) for fields in kinds):
            kinds[0].find(name, what)


class Fields:
    """The fields of one node type, without its prefix."""

    def __init__(self, book: PartitionBook, part_id: int, store: FeatureStore, ntype: str) -> None:
        self.store = store
        self.prefix = ntype + "/"
        self.num_nodes = book.part_nodes(ntype, part_id)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.store

    def read(self, name: str, what: str, dtype: torch.dtype | None = None) -> Tensor:
        """A field; converted to ``dtype`` block by block where one is given."""
        full = self.find(name, what)
        return self.store[full] if dtype is None else self.store.get_as(full, dtype)

    def matrix(self, name: str, what: str) -> Tensor:
        """A float32 [n, F] field."""
        return self.store.get_as(self.check_matrix(name, what), torch.float32)

    def matrix_file(
        self,
        name: str,
        change: Callable[[Tensor], Tensor] | None,
        folder: str | os.PathLike | None,
    ) -> RowFile:
        """A float32 [n, F] field in a file, after ``change`` of its rows."""
        full = self.check_matrix(name, "features")
        try:
            return self.store.to_file(full, torch.float32, folder, change)
        except OSError as error:
            where = folder or "the folder for temporary files"
            raise OSError(f"map_features: no room or no access in {where}: {error}") from error

    def find(self, name: str, what: str) -> str:
        """The full name of a field that is there."""
        if not self.has(name):
            there = sorted(
                key[len(self.prefix) :] for key in self.store if key.startswith(self.prefix)
            )
            near = difflib.get_close_matches(name, there, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(there) or "none"
            raise ValueError(f"{what}: got {name!r}, expected one of {known}{hint}")
        return self.prefix + name

    def check_matrix(self, name: str, what: str) -> str:
        """The full name of a field that is there with two dimensions."""
        full = self.find(name, what)
        shape = self.store.info(full)[1]
        if len(shape) != 2:
            raise ValueError(f"{what}: {name!r} has shape {shape}, expected [n, F]")
        return full

    def mask(self, name: str, needed: list[str]) -> Tensor:
        """A bool [n] field; all False where it is missing and not needed."""
        if not self.has(name) and name not in needed:
            return torch.zeros(self.num_nodes, dtype=torch.bool)
        values = self.read(name, "mask")
        if values.dim() != 1:
            raise ValueError(f"{name}: got shape {tuple(values.shape)}, expected [n]")
        return values != 0
