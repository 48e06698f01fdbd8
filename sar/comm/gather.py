"""Bytes of every rank on rank 0, without counting as traffic of rows: for reports."""

from __future__ import annotations

import json
from typing import Any

import torch

from sar.comm.group import Group


def gather_json(value: Any, group: Group) -> list[Any]:
    """What every rank passed, in rank order, on rank 0, and nothing on others; collective.

    Args:
        value: numbers, strings, lists and dictionaries of them.
    """
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    if group.size == 1:
        return [value]
    sizes = [int(size) for size in group.all_gather(torch.tensor(len(mine)))]
    first = group.rank == 0
    recv_counts = sizes if first else [0] * group.size
    send_counts = [len(mine)] + [0] * (group.size - 1)
    recv = torch.empty(sum(recv_counts), dtype=torch.uint8, device=group.device)
    group._exchange(recv, mine.to(group.device), recv_counts, send_counts).wait()
    if not first:
        return []
    return [json.loads(bytes(part.cpu().numpy())) for part in recv.split(sizes)]
