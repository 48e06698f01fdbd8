"""This rank's features, labels and splits, taken from its partition."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sar.comm import Group, current_group
from sar.partition.book import PartitionBook
from sar.partition.book_file import read_book
from sar.partition.features import FeatureStore
from sar.partition.load import PartitionData, read_node_features
from sar.partition.row_file import RowFile
from sar.train.options import DataOptions

SPLITS = ("train", "val", "test")
_BLOCK_ROWS = 1 << 14


@dataclass
class NodeData:
    """What training needs of this rank's n inner nodes.

    Attributes:
        features: float32 [n, F].
        labels: int64 [n], -1 where there is none; or float32 [n, C] of 0, 1 and NaN; or ``None``.
        rows: for train, val and test, int64 indices of the nodes of that split with a label.
        num_classes: equal on every rank; 0 without labels.
        multilabel: whether ``labels`` is a matrix.
        file: where the features lie, if not in memory.
    """

    features: Tensor
    labels: Tensor | None
    rows: dict[str, Tensor]
    num_classes: int
    multilabel: bool
    file: RowFile | None = None

    def release(self) -> None:
        """Let go of the pages of features that lie in a file; they come back when read."""
        if self.file is not None:
            self.file.release()

    def to(self, device: torch.device | str) -> NodeData:
        """The same data on ``device``."""
        labels = None if self.labels is None else self.labels.to(device)
        rows = {split: idx.to(device) for split, idx in self.rows.items()}
        features = self.features.to(device)
        file = self.file if features is self.features else None
        return NodeData(features, labels, rows, self.num_classes, self.multilabel, file)


def load_node_data(
    partition: PartitionData,
    options: DataOptions,
    *,
    need_labels: bool = True,
    map_features: str | os.PathLike | bool = False,
    group: Group | None = None,
) -> NodeData:
    """Read and convert this rank's rows; collective.

    Args:
        map_features: leave the features in a temporary file, in the folder that this names or
            (``True``) in the system's; see :class:`sar.partition.row_file.RowFile`.

    Labels may be integers, or floats with NaN for none; splits are the fields ``train_mask``,
    ``val_mask`` and ``test_mask``, of which only the first is needed to train.

    Raises, on every rank, ``ValueError`` for a graph with several node types, a field that is
    missing (naming those there are) or of the wrong shape, or labels that are not classes; and
    what any rank's reading raises, such as ``OSError`` or too little memory.
    """
    group = group or current_group()
    error: Exception | None = None
    data = None
    try:
        data = _local(partition, options, need_labels, map_features)
    except Exception as problem:  # any, too little memory as well: the others would wait
        error = problem
    group.agree(error)
    if data is None:
        raise RuntimeError("unreachable: agree raises where loading failed")
    data.num_classes = int(group.all_reduce(torch.tensor(data.num_classes), "max"))
    return data


def _local(
    partition: PartitionData,
    options: DataOptions,
    need_labels: bool,
    map_features: str | os.PathLike | bool,
) -> NodeData:
    book = partition.book
    fields = _Fields(book, partition.part_id, partition.node_features)
    file = None
    if map_features is False:
        features = fields.matrix(options.features, "features")
        if options.normalize_features:
            normalize_rows_(features)
    else:
        folder = None if map_features is True else map_features
        file = fields.matrix_file(options.features, options.normalize_features, folder)
        features = file.tensor
    if not need_labels and not fields.has(options.labels):
        return NodeData(features, None, {}, 0, options.multilabel, file)
    labels = _labels(fields.read(options.labels, "labels"), options)
    known = ~labels.isnan().all(1) if options.multilabel else labels >= 0
    needed = ["train_mask"] if need_labels else []
    masks = {split: fields.mask(f"{split}_mask", needed) for split in SPLITS}
    rows = {split: (mask & known).nonzero()[:, 0] for split, mask in masks.items()}
    classes = labels.shape[1] if options.multilabel else _num_classes(labels, book.num_nodes())
    return NodeData(features, labels, rows, classes, options.multilabel, file)


def check_fields(
    json_path: str | os.PathLike,
    features: str | None,
    labels: str | None,
    needed: Sequence[str] = (),
) -> None:
    """Raise now what :func:`load_node_data` would about names and types; local.

    Reads the headers of the first part. Args: ``needed`` are masks; ``None`` is not looked at.
    """
    book = read_book(json_path)
    fields = _Fields(book, 0, read_node_features(book, 0))
    if features is not None:
        fields.check_matrix(features, "features")
    if labels is not None:
        fields.find(labels, "labels")
    for name in needed:
        fields.find(name, "mask")


def _num_classes(labels: Tensor, num_nodes: int) -> int:
    classes = int(labels.max()) + 1 if len(labels) else 0
    if classes > max(num_nodes, 2):
        raise ValueError(f"labels: got a class {classes - 1} in a graph of {num_nodes} nodes")
    return classes


class _Fields:
    """The fields of the only node type, without its prefix.

    Raises ``ValueError`` for a graph of several types.
    """

    def __init__(self, book: PartitionBook, part_id: int, store: FeatureStore) -> None:
        if not book.is_homogeneous:
            raise ValueError(
                f"graph: got node types {book.ntypes} and {len(book.canonical_etypes)} edge types, "
                "expected one of each; write a training loop for a heterogeneous graph"
            )
        self.store = store
        self.prefix = book.ntypes[0] + "/"
        self.num_nodes = book.part_nodes(book.ntypes[0], part_id)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.store

    def read(self, name: str, what: str, dtype: torch.dtype | None = None) -> Tensor:
        """A field; converted to ``dtype`` block by block where one is given."""
        full = self.find(name, what)
        return self.store[full] if dtype is None else self.store.get_as(full, dtype)

    def matrix(self, name: str, what: str) -> Tensor:
        """A float32 [n, F] field."""
        return self.store.get_as(self.check_matrix(name, what), torch.float32)

    def matrix_file(self, name: str, normalize: bool, folder: str | os.PathLike | None) -> RowFile:
        """A float32 [n, F] field in a file, with :func:`normalize_rows_` if asked for."""
        full = self.check_matrix(name, "features")
        change = normalize_rows_ if normalize else None
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


def normalize_rows_(x: Tensor) -> Tensor:
    """Divide each row of [n, F] by the sum of its magnitudes, in place; zero rows stay zero."""
    for block in x.split(_BLOCK_ROWS):
        total = block.abs().sum(1, keepdim=True)
        block.div_(torch.where(total > 0, total, 1.0))
    return x


def _labels(values: Tensor, options: DataOptions) -> Tensor:
    """int64 [n] with -1 for none, or float32 [n, C] with NaN for none."""
    if options.multilabel:
        return _label_matrix(values, options.labels)
    if values.dim() == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.dim() != 1:
        raise ValueError(
            f"labels: {options.labels!r} has shape {tuple(values.shape)}, expected [n] or [n, 1]; "
            "a matrix of 0 and 1 needs multilabel"
        )
    if values.is_floating_point():
        values = values.nan_to_num(nan=-1.0)
        if not bool((values == values.round()).all()):
            raise ValueError(f"labels: {options.labels!r} has fractions, expected class numbers")
    values = values.long()
    if bool((values < -1).any()):
        raise ValueError(
            f"labels: {options.labels!r} holds {int(values.min())}, expected classes from 0, "
            "or -1 for none"
        )
    return values


def _label_matrix(values: Tensor, name: str) -> Tensor:
    if values.dim() != 2:
        raise ValueError(f"labels: {name!r} has shape {tuple(values.shape)}, expected [n, C]")
    values = values.float()
    if not bool((values.isnan() | (values == 0) | (values == 1)).all()):
        raise ValueError(f"labels: {name!r} holds other values than 0, 1 and NaN")
    return values
