"""The original's ``sar.core``."""

from sar.compat.core.full_partition_block import DistributedBlock
from sar.compat.core.graphshard import GraphShardManager, HeteroGraphShardManager
from sar.compat.core.sampling import DataLoader, DistNeighborSampler
from sar.compat.core.sar_aggregation import message_has_parameters

__all__ = [
    "DataLoader",
    "DistNeighborSampler",
    "DistributedBlock",
    "GraphShardManager",
    "HeteroGraphShardManager",
    "message_has_parameters",
]
