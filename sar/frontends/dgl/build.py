"""From partition files to graphs: checked on every rank before anything is exchanged."""

from __future__ import annotations

import hashlib
import json
import os
from functools import partial

import torch
from torch import Tensor

from sar.comm import Group, check_joined, current_group
from sar.config import CONSTANT_INPUTS, Policy, current_policy
from sar.edges import AnyRelation, build_relation
from sar.errors import PartitionError
from sar.frontends.dgl.sharded import ShardedGraph
from sar.graph.store import EType, GraphStore, edge_frame, node_frames
from sar.partition.load import PartitionData, load_partition

_READER_VERSION = 1
_DIGEST_BYTES = 32


def load_dgl_partition_data(
    partition_json_file: str | os.PathLike,
    own_partition_idx: int | None = None,
    device: torch.device | str = "cpu",
    *,
    verify: bool = False,
) -> PartitionData:
    """:func:`load_partition_data` under the original's name; collective."""
    return load_partition_data(partition_json_file, own_partition_idx, device, verify=verify)


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
    if data.book.num_parts != group.size:
        raise PartitionError(
            f"partitions: got a graph of {data.book.num_parts} parts, "
            f"expected {group.size}, one per rank{_more_ranks(data, group)}"
        )
    if data.part_id != group.rank:
        raise PartitionError(f"part_id: got {data.part_id}, expected {group.rank}, the rank")


def _more_ranks(data: PartitionData, group: Group) -> str:
    """How to start as many ranks as parts, for a process that is alone."""
    if group.size > 1:
        return ""
    count = data.book.num_parts
    return f"; start {count}: torchrun --nproc-per-node {count} train.py, or sar.launch"


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


def construct_full_graph(
    partition_data: PartitionData, policy: Policy | None = None
) -> ShardedGraph:
    """The graph over all nodes of this rank's part; collective.

    Args:
        policy: how halos stream; ``None`` follows :class:`sar.Config` at each call.

    Raises:
        PartitionError: on every rank, when there are not as many parts as ranks, or when a rank
            has another part than its own.
        TypeError: on every rank, for another ``partition_data`` or ``policy`` on any of them.
        CommError: a rank needs a row that its owner does not have.
    """
    group = current_group()
    agree_data(partition_data, group, policy)
    book, part_id = partition_data.book, partition_data.part_id
    rows = {ntype: torch.arange(partition_data.num_nodes(ntype)) for ntype in book.ntypes}
    relations: dict[EType, AnyRelation] = {}
    edge_frames = {}
    for type_id, etype in enumerate(book.canonical_etypes):
        shards = partition_data.edges[etype].to("cpu")  # the plan is agreed there
        num_src, num_dst = len(rows[etype[0]]), len(rows[etype[2]])
        relations[etype] = build_relation(
            group,
            shards.src,
            shards.dst,
            shards.eid,
            shards.offsets,
            num_src,
            num_dst,
            partial(partition_data.keys.edges, etype),
        )
        first = int(book.edge_ranges[etype][part_id, 0])
        num_edges = len(shards.src)
        eids = partial(torch.arange, first, first + num_edges)
        edge_frames[etype] = edge_frame(etype, type_id, eids, num_edges)
    frames = node_frames(book, part_id, rows)
    store = GraphStore(
        group,
        book,
        part_id,
        relations,
        rows,
        rows,
        frames,
        frames,
        edge_frames,
        partition_data.keys,
    )
    return on_device(store, partition_data, policy)


def on_device(
    store: GraphStore, partition_data: PartitionData, policy: Policy | None
) -> ShardedGraph:
    device = torch.device(partition_data.device)
    return ShardedGraph(store if store.device == device else store.to(device), None, policy)


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
    _check_same_mode(group, current_policy(policy).constant_inputs)


def _check_same_mode(group: Group, mode: str) -> None:
    """Ranks that keep constant rows wait for each other where others would not come."""
    numbers = group.all_gather(torch.tensor([CONSTANT_INPUTS.index(mode)]))
    modes = [CONSTANT_INPUTS[int(number)] for number in numbers]
    if len(set(modes)) > 1:
        raise ValueError(
            f"policy: ranks differ; constant_inputs of ranks 0, 1, .. are {modes[:16]}, "
            "expected one on all"
        )
