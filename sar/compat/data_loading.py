"""Loading a part, and looking its features up by the end of their name."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from sar.graph import load_partition_data
from sar.partition.load import PartitionData

NODE_TYPE = "_TYPE"  # the name under which DGL keeps node types


def load_dgl_partition_data(
    partition_json_file: str | os.PathLike,
    own_partition_idx: int | None = None,
    device: torch.device | str = "cpu",
    *,
    verify: bool = False,
) -> PartitionData:
    """:func:`sar.load_partition_data` under the original's name; collective.

    Imports DGL's layers where DGL is installed: those that are imported after the first use of a
    graph run their own code in their first call.
    """
    with suppress(ImportError):
        importlib.import_module("dgl.nn")
    return load_partition_data(partition_json_file, own_partition_idx, device, verify=verify)


def suffix_key_lookup(
    feature_dict: Mapping[str, Tensor],
    key: str,
    expand_to_all: bool = False,
    type_list: Sequence[str] | None = None,
) -> Tensor:
    """The feature whose name is ``key``, with or without its ``"<type>/"`` in front.

    Without such a feature, one whose name ends in ``key`` is taken.

    Args:
        feature_dict: ``PartitionData.node_features`` or ``edge_features``.
        key: ``"feat"`` or ``"paper/feat"``.
        expand_to_all: give every inner node of the part a row, zero where its type lacks the
            feature. Does nothing in a graph with one node type.
        type_list: all node types by id, needed by ``expand_to_all``.

    Returns:
        The feature, [rows of its type, ...] or, expanded, [inner nodes, ...]; an empty int64 tensor
        when no name fits.

    Raises:
        ValueError: several names fit equally well, or ``type_list`` is missing or foreign.
    """
    name = _find(feature_dict, key)
    if name is None:
        return torch.empty(0, dtype=torch.int64)
    if not expand_to_all:
        return feature_dict[name]
    if type_list is None:
        raise ValueError("type_list: got None, expected the node types by id for expand_to_all")
    if len(type_list) < 2 or NODE_TYPE not in feature_dict:
        return feature_dict[name]
    return _expand(feature_dict, name, list(type_list))


def _find(names: Mapping[str, Tensor], key: str) -> str | None:
    """The one best match: the whole name, then the name behind the type, then any ending."""
    tests = (
        lambda name: name == key,
        lambda name: name.rpartition("/")[2] == key,
        lambda name: name.endswith(key),
    )
    for test in tests:
        found = [name for name in names if test(name)]
        if len(found) > 1:
            raise ValueError(
                f"key: {key!r} fits {', '.join(sorted(found))}; expected the whole name of one"
            )
        if found:
            return found[0]
    return None


def _expand(features: Mapping[str, Tensor], name: str, types: list[str]) -> Tensor:
    owner = name.rpartition("/")[0]
    if owner not in types:
        raise ValueError(f"type_list: got {types}, expected it to hold {owner!r}, type of {name!r}")
    values = features[name]
    type_ids = features[NODE_TYPE].to(values.device)
    expanded = values.new_zeros((len(type_ids), *values.shape[1:]))
    expanded[type_ids == types.index(owner)] = values
    return expanded
