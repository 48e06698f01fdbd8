"""This rank's features, labels and splits: fields of its partition, found by their names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sar.comm import Group, current_group
from sar.options import closest
from sar.partition.arrays import NTYPE_HOMO
from sar.partition.book import PartitionBook
from sar.partition.column import RowFile
from sar.partition.features import FeatureStore
from sar.partition.load import PartitionData, read_book, read_node_features
from sar.sampling.features import column_name
from sar.train.options import DataOptions
from sar.words import SPLITS

_BLOCK_ROWS = 1 << 14


@dataclass
class NodeData:
    """Features, labels and splits of this rank's n inner nodes (of the target type).

    Attributes:
        features: float32 [n, F]; in a graph of several types a dict of them, by node type, for
            those types that have any: [nodes of that type, F of that type].
        labels: int64 [n], -1 where there is none; or float32 [n, C] of 0, 1 and NaN; or ``None``.
        rows: for train, val and test, int64 indices of the nodes of that split with a label.
        num_classes: equal on every rank; 0 without labels.
        multilabel: whether ``labels`` is a matrix.
        files: where the features lie, if not in memory.
        ntype: the node type that has the labels.
    """

    features: Tensor | dict[str, Tensor]
    labels: Tensor | None
    rows: dict[str, Tensor]
    num_classes: int
    multilabel: bool
    files: tuple[RowFile, ...] = ()
    ntype: str = NTYPE_HOMO

    @property
    def widths(self) -> int | dict[str, int]:
        """Columns of the features, by node type where there are several."""
        if isinstance(self.features, Tensor):
            return self.features.shape[1]
        return {ntype: rows.shape[1] for ntype, rows in self.features.items()}

    def release(self) -> None:
        """Let go of the pages of features that lie in a file; they come back when read."""
        for file in self.files:
            file.release()

    def to(self, device: torch.device | str) -> NodeData:
        """The same data on ``device``."""
        labels = None if self.labels is None else self.labels.to(device)
        rows = {split: idx.to(device) for split, idx in self.rows.items()}
        given = self.features
        x = {"": given} if isinstance(given, Tensor) else given
        moved = {ntype: one.to(device) for ntype, one in x.items()}
        files = self.files if all(moved[ntype] is one for ntype, one in x.items()) else ()
        features = moved[""] if isinstance(given, Tensor) else moved
        return replace(self, features=features, labels=labels, rows=rows, files=files)


def load_node_data(
    partition: PartitionData,
    options: DataOptions,
    *,
    need_labels: bool = True,
    map_features: str | os.PathLike | bool = False,
    group: Group | None = None,
) -> NodeData:
    """Read and convert this rank's features, labels and splits; collective.

    Args:
        map_features: leave the features in a temporary file, in the folder that this names or
            (``True``) in the system's; see :class:`sar.partition.column.RowFile`.

    Labels may be integers, or floats with NaN for none; splits are the fields ``train_mask``,
    ``val_mask`` and ``test_mask``, of which only the first is needed to train.

    Raises, on every rank, ``ValueError`` for a field that is missing (naming those there are) or of
    the wrong shape, labels that are not classes, or a target type that there is not; and what any
    rank's reading raises, such as ``OSError`` or too little memory.
    """
    group = group or current_group()
    with group.agreed():
        data = _local(partition, options, need_labels, map_features)
    data.num_classes = int(group.all_reduce(torch.tensor(data.num_classes), "max"))
    return data


def _local(
    partition: PartitionData,
    options: DataOptions,
    need_labels: bool,
    map_features: str | os.PathLike | bool,
) -> NodeData:
    book, store = partition.book, partition.node_features
    ntype = target_type(book, store, options)
    kinds = {t: Fields(book, partition.part_id, store, t) for t in book.ntypes}
    fields, features, files = kinds[ntype], {}, []
    for t in [t for t, one in kinds.items() if one.has(options.features)] or [ntype]:
        features[t], file = _features(kinds[t], options, map_features)
        files += [file] if file is not None else []
    given = features[ntype] if book.is_homogeneous else features
    data = NodeData(given, None, {}, 0, options.multilabel, tuple(files), ntype)
    if not need_labels and not fields.has(options.labels):
        return data
    labels = _labels(fields.store[fields.find(options.labels, "labels")], options)
    known = ~labels.isnan().all(1) if options.multilabel else labels >= 0
    needed = ["train_mask"] if need_labels else []
    masks = {split: fields.mask(f"{split}_mask", needed) for split in SPLITS}
    rows = {split: (mask & known).nonzero()[:, 0] for split, mask in masks.items()}
    count = book.num_nodes(ntype)
    classes = labels.shape[1] if options.multilabel else _num_classes(labels, count)
    return replace(data, labels=labels, rows=rows, num_classes=classes)


def _features(
    fields: Fields, options: DataOptions, map_features: str | os.PathLike | bool
) -> tuple[Tensor, RowFile | None]:
    """float32 [n, F] of one node type, and the file that they lie in, if any."""
    store, full = fields.store, fields.check_matrix(options.features, "features")
    change = normalize_rows_ if options.normalize_features else None
    if map_features is False:
        features = store.get_as(full, torch.float32)
        return features if change is None else change(features), None
    folder = None if map_features is True else map_features
    try:
        file = store.to_file(full, torch.float32, folder, change)
    except OSError as error:
        where = folder or "the folder for temporary files"
        raise OSError(f"map_features: no room or no access in {where}: {error}") from error
    return file.tensor, file


def _num_classes(labels: Tensor, num_nodes: int) -> int:
    classes = int(labels.max()) + 1 if len(labels) else 0
    if classes > max(num_nodes, 2):
        raise ValueError(f"labels: got a class {classes - 1} in a graph of {num_nodes} nodes")
    return classes


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


def target_type(book: PartitionBook, store: FeatureStore, options: DataOptions) -> str:
    """The node type with labels; ``ValueError`` if it is unknown, or not exactly one has them."""
    name = options.target_type
    if name is not None:
        if name not in book.ntypes:
            hint = closest(name, book.ntypes, quoted=True)
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
    """Raise now what :func:`sar.train.load_node_data` would about names and types, all that is
    wrong. Local: reads the headers of the first part. ``needed`` are masks. Returns the partitions'
    book, and the node types that have features."""
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

    def find(self, name: str, what: str) -> str:
        """The full name of a field; ``ValueError`` if it is missing."""
        return column_name(self.store, self.prefix, name, f"{what}: got {name!r}")

    def check_matrix(self, name: str, what: str) -> str:
        """The full name of a field; ``ValueError`` unless it has two dimensions."""
        full = self.find(name, what)
        shape = self.store.info(full)[1]
        if len(shape) != 2:
            raise ValueError(f"{what}: {name!r} has shape {shape}, expected [n, F]")
        return full

    def mask(self, name: str, needed: list[str]) -> Tensor:
        """A bool [n] field; all False where it is missing and not needed."""
        if not self.has(name) and name not in needed:
            return torch.zeros(self.num_nodes, dtype=torch.bool)
        values = self.store[self.find(name, "mask")]
        if values.dim() != 1:
            raise ValueError(f"{name}: got shape {tuple(values.shape)}, expected [n]")
        return values != 0
