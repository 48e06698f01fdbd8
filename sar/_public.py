"""The public names of ``sar``, imported when the first of them is asked for."""
# ruff: noqa: F401

from sar import comm
from sar.comm import (
    comm_device,
    current_group,
    initialize_comms,
    manual_seed,
    nfs_ip_init,
    rank,
    shutdown,
    world_size,
)
from sar.compat.data_loading import load_dgl_partition_data, suffix_key_lookup
from sar.compat.dist_graph import convert_dist_graph
from sar.compat.graphs import (
    DistributedBlock,
    GraphShardManager,
    HeteroGraphShardManager,
    message_has_parameters,
    patch_dgl,
)
from sar.compat.logging_setup import logger, logging_setup
from sar.compat.sampling import DataLoader, DistNeighborSampler
from sar.config import Config, Lossy, Policy
from sar.errors import (
    CommError,
    DriftError,
    MissingDependencyError,
    MistakeWarning,
    NotSupportedError,
    PartitionError,
    SarError,
)
from sar.frontends.dgl import ShardedGraph, construct_full_graph, construct_mfgs
from sar.graph import load_partition_data
from sar.memory.parts import run_parts
from sar.models import (
    Explanation,
    Validation,
    explain,
    optimize,
    prepare,
    set_activations,
    trace,
    validate,
)
from sar.nn import (
    DistributedBN1D,
    binary_cross_entropy_with_logits,
    check,
    convert_batch_norm,
    convert_dropout,
    cross_entropy,
    fetch,
    gather_grads,
    global_mean,
    global_sum,
    halo,
    local_edges,
    mse_loss,
    overlap_gradients,
    sum_rounds,
    sync_params,
)
from sar.partition.cut import PartitionOptions
from sar.partition.homogeneous import to_homogeneous
from sar.partition.run import partition_graph
