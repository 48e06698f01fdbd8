"""`sar.manual_seed`: the seed of a run, the same on all ranks."""

from __future__ import annotations

import torch

from sar import expect
from sar.comm.current import current_group
from sar.comm.group import Group
from sar.comm.seeds import signed

_LOWEST, _HIGHEST = -(2**63), 2**64 - 1  # what torch.manual_seed takes


def manual_seed(seed: int, *, group: Group | None = None) -> None:
    """Seed torch's generators and restart the group's stream of dropout seeds; collective.

    Args:
        seed: int, the same on every rank.

    Raises:
        TypeError, ValueError: on every rank, when a seed is no int, out of torch's range
            [-2**63, 2**64) or not the one of the other ranks.
    """
    group = group or current_group()
    with group.agreed("manual_seed"):
        expect.integer(seed, "seed", at_least=_LOWEST, at_most=_HIGHEST)
    seeds = [int(one) for one in group.all_gather(torch.tensor(signed(seed)))]
    other = next((rank for rank, one in enumerate(seeds) if one != seeds[0]), None)
    if other is not None:
        raise ValueError(
            f"seed: rank 0 gave {seeds[0]}, rank {other} {seeds[other]}; expected the same on all "
            "ranks"
        )
    torch.manual_seed(seed)
    group.seeds.restart(signed(seed))
