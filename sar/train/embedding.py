"""Learned rows of nodes on the disk: rows by original id, for any number of ranks.

``save_embedding(folder, embedding)`` leaves ``<ntype>.pt``, which names one set of shards, and a
shard ``<ntype>.<set>.<rank>.pt`` for each rank; a run's are ``checkpoint.<type>.<set>.<rank>.pt``,
named by ``checkpoint.pt``. The file that names a set is replaced in one step after its shards are
on the disk, and shards of other sets are removed after that: a process that is killed at any moment
leaves rows and parameters of the same step.
"""

from __future__ import annotations

import copy
import glob
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sar.comm import Group, current_group
from sar.errors import NotSupportedError
from sar.files import PARTIAL, remove_left_over
from sar.nn import ShardedEmbedding, ShardedParameter
from sar.train.sealed import check_file, load_archive, write_sealed

FORMAT = 1
_SET_BYTES = 8
_STEM = "checkpoint"  # of a run's shards
Columns = dict[str, Tensor]


def save_embedding(
    folder: str | os.PathLike,
    embedding: ShardedEmbedding,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: Group | None = None,
) -> None:
    """Write the rows of all ranks, each rank its own; collective.

    A process that is killed at any moment leaves the old checkpoint or the new one.

    Args:
        folder: on a disk that all ranks see; made if need be.
        optimizer: also write what it keeps for each row (Adam's moments).

    Raises:
        OSError: on every rank, when one of them could not write.
    """
    group = group or current_group()
    where, ntype = Path(folder), embedding.ntype
    head = write_shards(where, ntype, embedding, optimizer, group)
    with group.agreed():
        if group.rank == 0:
            write_sealed(where / f"{ntype}.pt", head)
    if group.rank == 0:
        remove_shards(where, re.escape(ntype), {head["set"]})


def write_shards(
    folder: Path,
    stem: str,
    embedding: ShardedEmbedding,
    optimizer: torch.optim.Optimizer | None,
    group: Group,
) -> dict[str, Any]:
    """Write every rank's ``<stem>.<set>.<rank>.pt``; returns the head to them; collective."""
    token = group.broadcast(torch.frombuffer(bytearray(os.urandom(_SET_BYTES)), dtype=torch.uint8))
    name = bytes(token.tolist()).hex()
    weight = embedding.weight
    rows, other = {"weight": weight.detach().cpu()}, {}  # one for each node, and what there is once
    for key, value in (optimizer.state.get(weight, {}) if optimizer else {}).items():
        if isinstance(value, Tensor) and value.shape == weight.shape:
            rows[key] = value.cpu()
        else:
            other[key] = value
    shard = {"format": FORMAT, "ids": embedding.ids, "rows": rows, "other": other}
    with group.agreed():
        write_sealed(folder / f"{stem}.{name}.{group.rank}.pt", shard)
    return {
        "format": FORMAT, "set": name, "num_shards": group.size, "numbering": embedding.numbering,
        "num_nodes": embedding.num_nodes, "dim": embedding.dim,
    }  # fmt: skip


def remove_shards(folder: Path, stem: str, kept: Collection[str]) -> None:
    """Remove shards of sets not ``kept``, and what a killed writer left; ``stem``: a pattern."""
    for old in folder.iterdir():
        found = re.fullmatch(rf"({stem}\.([0-9a-f]+)\.\d+\.pt)({PARTIAL})?", old.name)
        if found and found[3]:
            remove_left_over(folder, [glob.escape(found[1])])
        elif found and found[2] not in kept:
            old.unlink(missing_ok=True)


def load_embedding(
    folder: str | os.PathLike,
    embedding: ShardedEmbedding,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: Group | None = None,
) -> None:
    """Take this rank's rows out of the shards that any number of ranks wrote; collective.

    Shards are mapped one after the other; only the rows that are needed are read.

    Args:
        optimizer: also restore what it keeps for each row; its options stay as they are.

    Raises:
        ValueError: on every rank, when there is no checkpoint, it is damaged, or it is of another
            graph, width or numbering, or cannot be read for another reason. Nothing is changed
            then.
    """
    group = group or current_group()
    ntype, where = embedding.ntype, Path(folder)
    load_shards(where, ntype, lambda: _read(where / f"{ntype}.pt"), embedding, optimizer, group)


def load_shards(
    folder: Path,
    stem: str,
    read_head: Callable[[], dict[str, Any]],
    embedding: ShardedEmbedding,
    optimizer: torch.optim.Optimizer | None,
    group: Group,
) -> None:
    """Read rows of :func:`write_shards`; collective, raises as :func:`load_embedding`."""
    with group.agreed():
        try:
            shards = _shards(folder, stem, read_head(), embedding, group)
            rows, other = _collect(folder, shards, embedding)
        except ValueError:
            raise
        except Exception as problem:  # any that a damaged file leads to, or too little memory
            text = f"{type(problem).__name__}: {problem}"
            what = f"could not take rows of {embedding.ntype!r}"
            raise ValueError(f"{folder}: {what}: {text}") from problem
    weight = embedding.weight
    with torch.no_grad():
        weight.copy_(rows.pop("weight"))
    if optimizer is not None:
        moved = {name: value.to(weight.device) for name, value in rows.items()}
        optimizer.state[weight] = {**other, **moved}


def _collect(
    folder: Path, shards: Iterable[dict[str, Any]], embedding: ShardedEmbedding
) -> tuple[Columns, dict[str, Any]]:
    """Rows of the embedding's ids from all shards, and what was saved once."""
    found: Columns = {}
    other: dict[str, Any] = {}
    missing = torch.ones(len(embedding.ids), dtype=torch.bool)
    for shard in shards:
        other = other or copy.deepcopy(shard["other"])  # not a map of the file
        shapes = {name: tuple(part.shape) for name, part in shard["rows"].items()}
        wanted = (len(shard["ids"]), embedding.dim)
        if "weight" not in shapes or set(shapes.values()) != {wanted}:
            raise ValueError(f"{folder}: damaged: got rows {shapes}, expected weight {wanted}")
        mine, theirs = _common(embedding.ids, shard["ids"])
        missing[mine] = False
        for name, part in shard["rows"].items():
            if name not in found:
                found[name] = part.new_zeros((len(missing), *part.shape[1:]))
            found[name][mine] = part[theirs]
    if missing.any():
        first = int(embedding.ids[missing][0])
        raise ValueError(f"{folder}: no row for {int(missing.sum())} nodes, such as {first}")
    return found, other


def _shards(
    folder: Path, stem: str, head: dict[str, Any], embedding: ShardedEmbedding, group: Group
) -> Iterator[dict[str, Any]]:
    """The shards of each rank, one after the other; every one is verified, whole, on some rank."""
    path = folder / f"{stem}.pt"
    for key in ("num_nodes", "dim", "numbering"):
        if head.get(key) != getattr(embedding, key):
            raise ValueError(
                f"{path}: got {key} {head.get(key)!r}, expected {getattr(embedding, key)!r}"
            )
    for rank in range(head["num_shards"]):
        shard = folder / f"{stem}.{head['set']}.{rank}.pt"
        yield _read(shard, verify=rank % group.size == group.rank)


def _read(path: Path, verify: bool = True) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: no checkpoint of an embedding")
    if verify:
        check_file(path)
    return load_archive(path, path, FORMAT)


def _common(mine: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in ``mine`` and in ``theirs`` of the ids that both hold."""
    order = torch.argsort(theirs)
    ascending = theirs[order]
    place = torch.searchsorted(ascending, mine).clamp(max=max(0, len(theirs) - 1))
    hits = ascending[place] == mine if len(theirs) else torch.zeros(len(mine), dtype=torch.bool)
    positions = hits.nonzero().view(-1)
    return positions, order[place[positions]]


def tables_of(model: nn.Module) -> dict[str, ShardedEmbedding]:
    """A model's tables by name; ``NotSupportedError`` for sharded rows that are in none."""
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
    """An optimizer's state dict without states of sharded parameters."""
    state = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    kept = {i for i, param in enumerate(params) if not isinstance(param, ShardedParameter)}
    return state | {"state": {i: one for i, one in state["state"].items() if i in kept}}


def with_own_rows(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the model's own rows of tables to a state dict of :func:`shared_state`."""
    return state | {name: one.weight for name, one in _weights(model).items()}


def _weights(model: nn.Module) -> dict[str, ShardedEmbedding]:
    return {f"{name}.weight".lstrip("."): one for name, one in tables_of(model).items()}


def save_tables(
    folder: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group
) -> dict[str, Any]:
    """Write all tables, with optimizer states; returns heads for ``checkpoint.pt``; collective."""
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
    """Take this rank's rows from a disk that all ranks see; collective. Raises ``ValueError`` on
    every rank where the checkpoint is damaged, or of another model or graph."""
    tables = tables_of(model)
    if set(tables) != set(heads):
        raise ValueError(
            f"the checkpoint is of another model: it has learned rows {sorted(heads)}, the model "
            f"{sorted(tables)}"
        )
    for name, one in tables.items():
        stem, head = f"{_STEM}.{one.ntype}", partial(heads.__getitem__, name)
        load_shards(Path(folder), stem, head, one, optimizer, group)
