"""Exact full-batch training of graph neural networks over many hosts."""
# ruff: noqa: F405

import importlib
import sys
from typing import TYPE_CHECKING, Any

from sar import registry
from sar.compat import install_modules, lazy_name

if TYPE_CHECKING:
    from sar._public import *  # noqa: F403

__version__ = "0.1.0"

__all__ = [
    "CommError",
    "Config",
    "DataLoader",
    "DistNeighborSampler",
    "DistributedBN1D",
    "DistributedBlock",
    "DriftError",
    "Explanation",
    "GraphShardManager",
    "HeteroGraphShardManager",
    "Lossy",
    "MissingDependencyError",
    "MistakeWarning",
    "NotSupportedError",
    "PartitionError",
    "PartitionOptions",
    "Policy",
    "SarError",
    "ShardedGraph",
    "Validation",
    "binary_cross_entropy_with_logits",
    "check",
    "comm",
    "comm_device",
    "construct_full_graph",
    "construct_mfgs",
    "convert_batch_norm",
    "convert_dist_graph",
    "convert_dropout",
    "cross_entropy",
    "current_group",
    "explain",
    "fetch",
    "gather_grads",
    "global_mean",
    "global_sum",
    "halo",
    "initialize_comms",
    "launch",
    "load_dgl_partition_data",
    "load_partition_data",
    "local_edges",
    "logger",
    "logging_setup",
    "manual_seed",
    "message_has_parameters",
    "mse_loss",
    "nfs_ip_init",
    "optimize",
    "overlap_gradients",
    "partition_graph",
    "patch_dgl",
    "prepare",
    "rank",
    "run_parts",
    "set_activations",
    "shutdown",
    "suffix_key_lookup",
    "sum_rounds",
    "sync_params",
    "to_homogeneous",
    "trace",
    "validate",
    "world_size",
]


def __getattr__(name: str) -> Any:
    """Import all public names when the first is asked for: an unknown word on the command line is
    told without torch. ``plan``, ``train``, ``pyg``, ``expect`` and ``launch`` come alone;
    `lazy_name` has DGL's ``RelGraphConv``, ``edge_softmax`` and ``patched_edge_softmax``."""
    if name.startswith("__"):
        raise AttributeError(f"module 'sar' has no attribute {name!r}")
    if name == "launch":
        return importlib.import_module(f"{__name__}.cli.functions").launch
    if name in ("expect", "plan", "pyg", "train"):
        return importlib.import_module(f"{__name__}.{name}")
    public = importlib.import_module(f"{__name__}._public")
    mine = globals()
    mine.update({one: getattr(public, one) for one in __all__ if hasattr(public, one)})
    return mine[name] if name in mine else lazy_name(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


install_modules(sys.modules[__name__])
registry.register("dgl", "sar.frontends.dgl.front_end", "dgl")
registry.register("pyg", "sar.frontends.pyg.front_end", "torch_geometric")
registry.register("sar", "sar.models.front_end")
