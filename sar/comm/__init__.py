"""Process group, portable collectives, halo plan and the rotation of rounds."""

from sar.comm.group import Counters, Group, LocalGroup, current_group, set_process_group, use_group
from sar.comm.halo import HaloPlan, Round, build_halo_plan, exchange_counts, join_plans
from sar.comm.legacy import all_reduce, all_to_all, exchange_single_tensor, exchange_tensors
from sar.comm.meeting import serve_store, tell_failure
from sar.comm.network import nfs_ip_init
from sar.comm.process import ProcessGroup
from sar.comm.rotation import WINDOW, GradientReturn, Stream, fetch
from sar.comm.seeding import manual_seed
from sar.comm.seeds import SeedStream
from sar.comm.setup import (
    DEFAULT_TIMEOUT,
    backend,
    comm_device,
    initialize_comms,
    is_initialized,
    join_others,
    rank,
    shutdown,
    world_size,
)
from sar.comm.threads import ThreadGroup

__all__ = [
    "DEFAULT_TIMEOUT",
    "WINDOW",
    "Counters",
    "GradientReturn",
    "Group",
    "HaloPlan",
    "LocalGroup",
    "ProcessGroup",
    "Round",
    "SeedStream",
    "Stream",
    "ThreadGroup",
    "all_reduce",
    "all_to_all",
    "backend",
    "build_halo_plan",
    "comm_device",
    "current_group",
    "exchange_counts",
    "exchange_single_tensor",
    "exchange_tensors",
    "fetch",
    "initialize_comms",
    "is_initialized",
    "join_others",
    "join_plans",
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
