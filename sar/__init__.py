"""Exact full-batch training of graph neural networks over many hosts."""

from sar import comm
from sar.comm import comm_device, initialize_comms, nfs_ip_init, rank, shutdown, world_size
from sar.config import Config, Policy
from sar.errors import CommError, PartitionError, SarError

__version__ = "0.1.0"

__all__ = [
    "CommError",
    "Config",
    "PartitionError",
    "Policy",
    "SarError",
    "comm",
    "comm_device",
    "initialize_comms",
    "nfs_ip_init",
    "rank",
    "shutdown",
    "world_size",
]
