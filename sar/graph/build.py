"""From partition files to structures: checked on every rank before anything is exchanged."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sar import registry
from sar.comm import Group, check_joined, current_group
from sar.config import CONSTANT_INPUTS, Policy, current_policy
from sar.edges import AnyRelation, build_relation
from sar.errors import PartitionError
from sar.graph.store import Structure
from sar.partition.book import EType
from sar.partition.load import PartitionData, load_partition

_READER_VERSION = 1
_DIGEST_BYTES = 32


def load_partition_data(
    path: str | os.PathLike,
    part_id: int | None = None,
    device: torch.device | str = "cpu",
    *,
    verify: bool = False,
) -> PartitionData:
    """Load this rank's part of a partitioned graph; collective.

    Args:
        path: the JSON of ``sar partition`` or of DGL's ``partition_graph``, or the folder that
            PyG's ``Partitioner`` or GraphLearn-for-PyTorch wrote.
        part_id: the part to load, which is the rank; by default that of the current group.
        device: where edges go; features stay in their files until they are read.
        verify: compare the features with the digests in the JSON now, not when they are first read.

    Raises:
        PartitionError: on every rank, when a file of any rank is missing, damaged or belongs to
            another graph, when there are not as many parts as ranks, or when a rank loads
            another part than its own.
        CommError: a launcher started several processes, and nobody called ``initialize_comms``.
    """
    group = current_group()
    data, error = None, None
    try:
        part_id = group.rank if part_id is None else part_id
        data = load_partition(path, part_id, device, verify=verify)
        _check_part(data, group)
    except Exception as caught:  # any, too little memory as well: the others would wait
        error = caught
    group.agree(error, "partition")
    if data is None:
        raise PartitionError(f"{path}: not loaded")
    _check_same_graph(data, group)
    return data


def _check_part(data: PartitionData, group: Group) -> None:
    """Halos are addressed by rank, so that rank r must hold part r."""
    check_joined()
    count = data.book.num_parts
    if count != group.size:
        hint = f"; start {count}: torchrun --nproc-per-node {count} train.py, or sar.launch"
        raise PartitionError(
            f"partitions: got a graph of {count} parts, expected {group.size}, one per rank"
            f"{hint if group.size == 1 else ''}"
        )
    if data.part_id != group.rank:
        raise PartitionError(f"part_id: got {data.part_id}, expected {group.rank}, the rank")


def _check_same_graph(data: PartitionData, group: Group) -> None:
    """All ranks must have the same graph, features and reader; one fixed-size digest decides."""
    digests = torch.stack(group.all_gather(_digest(data)))
    different = (digests != digests[0]).any(dim=1).nonzero().view(-1).tolist()
    if different:
        raise PartitionError(
            f"partitions: ranks {different} loaded another graph than rank 0, or features "
            "of other names, dtypes or widths"
        )


def _digest(data: PartitionData) -> Tensor:
    features = [
        (name, str(store.info(name)[0]), list(store.info(name)[1][1:]))
        for store in (data.node_features, data.edge_features)
        for name in sorted(store)
    ]
    text = json.dumps([data.book.digest(), features, _READER_VERSION])
    return torch.tensor(list(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]))


def structure_of(data: PartitionData, policy: Policy | None) -> Structure:
    """All nodes of this rank's part and the edges that end in them; collective.

    Front ends in use put their patches in place.

    Raises what ``construct_full_graph`` of a front end says.
    """
    registry.install()
    group = current_group()
    agree_data(data, group, policy)
    rows = {ntype: torch.arange(data.num_nodes(ntype)) for ntype in data.book.ntypes}
    relations: dict[EType, AnyRelation] = {}
    edge_ids: dict[EType, Callable[[], Tensor]] = {}
    for etype in data.book.canonical_etypes:
        shards = data.edges[etype].to("cpu")  # the plan is agreed there
        relations[etype] = build_relation(
            group,
            shards.src,
            shards.dst,
            shards.eid,
            shards.offsets,
            len(rows[etype[0]]),
            len(rows[etype[2]]),
            partial(data.keys.edges, etype),
        )
        first = int(data.book.edge_ranges[etype][data.part_id, 0])
        edge_ids[etype] = partial(torch.arange, first, first + len(shards.src))
    store = Structure(group, data.book, data.part_id, relations, edge_ids, rows, rows, data.keys)
    return on_device(store, data)


def on_device(store: Structure, data: PartitionData) -> Structure:
    """The structure on the device of the loaded edges."""
    device = torch.device(data.device)
    return store if store.device == device else store.to(device)


def agree_data(partition_data: PartitionData, group: Group, policy: Policy | None) -> None:
    """Check the arguments of a construction on every rank; collective."""
    error: Exception | None = None
    if not isinstance(partition_data, PartitionData):
        kind = type(partition_data).__name__
        error = TypeError(f"partition_data: got {kind}, expected load_partition_data's result")
    elif policy is not None and not isinstance(policy, Policy):
        error = TypeError(f"policy: got {type(policy).__name__}, expected a sar.Policy or None")
    else:
        try:
            _check_part(partition_data, group)
        except PartitionError as caught:
            error = caught
    group.agree(error, "graph")
    # Ranks that keep constant rows wait for each other where others would not come.
    mode = CONSTANT_INPUTS.index(current_policy(policy).constant_inputs)
    modes = [CONSTANT_INPUTS[int(one)] for one in group.all_gather(torch.tensor([mode]))]
    if len(set(modes)) > 1:
        raise ValueError(
            f"policy: ranks differ; constant_inputs of ranks 0, 1, .. are {modes[:16]}, "
            "expected one on all"
        )
