"""Learned rows of nodes in a run's checkpoint: shards beside the file, which names them.

``checkpoint.<type>.<set>.<rank>.pt`` holds the rows of one rank. The sets that ``checkpoint.pt``
names are on the disk before it is, and the others are removed after that: a process that is killed
at any moment leaves rows and parameters of the same step.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sar.comm import Group
from sar.errors import NotSupportedError
from sar.nn import ShardedEmbedding, ShardedParameter
from sar.train.embedding import load_shards, remove_shards, write_shards

_STEM = "checkpoint"


def tables_of(model: nn.Module) -> dict[str, ShardedEmbedding]:
    """The tables of a model by their names.

    Raises ``NotSupportedError`` for rows on all ranks that are in no table.
    """
    found = {n: one for n, one in model.named_modules() if isinstance(one, ShardedEmbedding)}
    known = {id(one.weight) for one in found.values()}
    for name, param in model.named_parameters():
        if isinstance(param, ShardedParameter) and id(param) not in known:
            raise NotSupportedError(
                f"checkpoint: got a folder and the model with {name!r}, whose rows lie on all "
                "ranks and which is in no ShardedEmbedding, expected None"
            )
    return found


def shared_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without rows of tables: what is equal on all ranks."""
    left_out = set(_weights(model))
    return {name: value for name, value in model.state_dict().items() if name not in left_out}


def shared_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The same of an optimizer."""
    state = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    kept = {i for i, param in enumerate(params) if not isinstance(param, ShardedParameter)}
    return state | {"state": {i: one for i, one in state["state"].items() if i in kept}}


def with_own_rows(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What :func:`shared_state` gave, whole again, with the rows that the model has now."""
    return state | {name: one.weight for name, one in _weights(model).items()}


def _weights(model: nn.Module) -> dict[str, ShardedEmbedding]:
    return {f"{name}.weight".lstrip("."): one for name, one in tables_of(model).items()}


def save_tables(
    folder: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group
) -> dict[str, Any]:
    """Write all tables and what the optimizer keeps for each row; collective.

    Returns what ``checkpoint.pt`` has to hold to find them.
    """
    return {
        name: write_shards(Path(folder), f"{_STEM}.{one.ntype}", one, optimizer, group)
        for name, one in tables_of(model).items()
    }


def remove_old_tables(folder: str | os.PathLike, heads: dict[str, Any], group: Group) -> None:
    """Remove what the checkpoint does not name any more."""
    if group.rank == 0:
        remove_shards(Path(folder), rf"{_STEM}\..+", {head["set"] for head in heads.values()})


def load_tables(
    folder: str | os.PathLike,
    heads: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    group: Group,
) -> None:
    """Take this rank's rows from a disk that all ranks see; collective.

    Raises ``ValueError`` on every rank where the checkpoint is of another model, or of another
    graph, or is damaged.
    """
    tables = tables_of(model)
    if set(tables) != set(heads):
        raise ValueError(
            f"the checkpoint is of another model: it has learned rows {sorted(heads)}, the model "
            f"{sorted(tables)}"
        )
    for name, one in tables.items():
        stem, head = f"{_STEM}.{one.ntype}", partial(heads.__getitem__, name)
        load_shards(Path(folder), stem, head, one, optimizer, group)
