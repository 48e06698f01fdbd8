"""Exact full-batch training of graph neural networks over many hosts."""

from sar import comm
from sar.comm import (
    comm_device,
    current_group,
    initialize_comms,
    nfs_ip_init,
    rank,
    shutdown,
    world_size,
)
from sar.config import Config, Policy
from sar.errors import (
    CommError,
    MissingDependencyError,
    NotSupportedError,
    PartitionError,
    SarError,
)
from sar.graph import (
    ShardedGraph,
    construct_full_graph,
    construct_mfgs,
    load_dgl_partition_data,
)
from sar.nn import (
    DistributedBN1D,
    convert_batch_norm,
    gather_grads,
    global_mean,
    sync_params,
)

__version__ = "0.1.0"

__all__ = [
    "CommError",
    "Config",
    "DistributedBN1D",
    "MissingDependencyError",
    "NotSupportedError",
    "PartitionError",
    "Policy",
    "SarError",
    "ShardedGraph",
    "comm",
    "comm_device",
    "construct_full_graph",
    "construct_mfgs",
    "convert_batch_norm",
    "current_group",
    "gather_grads",
    "global_mean",
    "initialize_comms",
    "load_dgl_partition_data",
    "nfs_ip_init",
    "rank",
    "shutdown",
    "sync_params",
    "world_size",
]
