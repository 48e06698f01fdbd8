"""Process group and portable collectives: other ranks."""

import importlib
from typing import Any

from sar.comm.collectives import exchange_counts
from sar.comm.group import Group
from sar.comm.legacy import all_reduce, all_to_all, exchange_single_tensor, exchange_tensors
from sar.comm.local import (
    LocalGroup,
    ThreadGroup,
    current_group,
    has_group,
    set_process_group,
    use_group,
)
from sar.comm.meter import Counters
from sar.comm.network import nfs_ip_init
from sar.comm.process import ProcessGroup
from sar.comm.rendezvous import serve_store, tell_failure
from sar.comm.seeds import SeedStream
from sar.comm.setup import (
    DEFAULT_TIMEOUT,
    backend,
    check_joined,
    comm_device,
    initialize_comms,
    is_initialized,
    join_others,
    manual_seed,
    rank,
    shutdown,
    world_size,
)
from sar.comm.turns import TurnGroup

__all__ = [
    "DEFAULT_TIMEOUT",
    "Counters",
    "Group",
    "LocalGroup",
    "ProcessGroup",
    "SeedStream",
    "ThreadGroup",
    "TurnGroup",
    "all_reduce",
    "all_to_all",
    "backend",
    "check_joined",
    "comm_device",
    "current_group",
    "exchange_counts",
    "exchange_single_tensor",
    "exchange_tensors",
    "has_group",
    "initialize_comms",
    "is_initialized",
    "join_others",
    "manual_seed",
    "nfs_ip_init",
    "rank",
    "set_process_group",
    "serve_store",
    "shutdown",
    "tell_failure",
    "use_group",
    "world_size",
]


def __getattr__(name: str) -> Any:
    """Two functions that the original keeps here, and that need more than communication."""
    if name not in ("gather_grads", "sync_params"):
        raise AttributeError(f"module 'sar.comm' has no attribute {name!r}")
    return getattr(importlib.import_module("sar.nn"), name)
