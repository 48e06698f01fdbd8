"""Checkpoints: one file that is always whole, written by rank 0 and read without unpickling."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sar.comm import Group
from sar.errors import SarError

FILE_NAME = "checkpoint.pt"
FORMAT = 1


def save_checkpoint(folder: str | os.PathLike, content: dict[str, Any], group: Group) -> None:
    """Rank 0 writes ``content``; collective, so that a full disk is every rank's error.

    A process that is killed at any moment leaves the old file or the new one, never a part.
    """
    error: Exception | None = None
    if group.rank == 0:
        try:
            write_file(Path(folder) / FILE_NAME, content)
        except Exception as problem:  # torch reports a full disk as RuntimeError
            error = OSError(f"{folder}: could not write the checkpoint: {problem}")
    group.agree(error)


def write_file(path: Path, content: dict[str, Any]) -> None:
    """Write, flush to the disk, then take the place of the old file in one step.

    The folder is made where there is none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name survives a power cut as well
    finally:
        os.close(folder)


def load_checkpoint(folder: str | os.PathLike, group: Group) -> dict[str, Any]:
    """Rank 0 reads the file and sends it to all, so no shared file system is needed; collective.

    Tensors come back on the CPU. Raises ``ValueError`` on every rank when there is no checkpoint
    or it is damaged or of another program.
    """
    blob, error = torch.empty(0, dtype=torch.uint8), None
    if group.rank == 0:
        try:
            blob = _read(Path(folder) / FILE_NAME)
        except Exception as problem:  # any, too little memory as well: the others would wait
            error = problem
    group.agree(error)
    size = int(group.broadcast(torch.tensor([len(blob)])))
    if group.rank != 0:
        blob = torch.empty(size, dtype=torch.uint8)
    return _parse(group.broadcast(blob).numpy().tobytes(), folder)


def _read(path: Path) -> torch.Tensor:
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise ValueError(f"{path}: no checkpoint to read: {problem.strerror}") from problem
    _parse(data, path.parent)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _parse(data: bytes, folder: str | os.PathLike) -> dict[str, Any]:
    where = Path(folder) / FILE_NAME
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as problem:  # torch raises many kinds for a damaged or foreign file
        raise ValueError(f"{where}: damaged, or not a checkpoint: {problem}") from problem
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{where}: expected a checkpoint of format {FORMAT}")
    return content


def load_model(model: nn.Module, content: dict[str, Any]) -> None:
    """Put a checkpoint's parameters in ``model``; ``ValueError`` where they do not fit."""
    try:
        model.load_state_dict(content["model"])
    except RuntimeError as problem:
        raise ValueError(f"the checkpoint is of another model: {problem}") from problem


def random_states(group: Group) -> torch.Tensor:
    """uint8 [P, bytes]: the state of torch's generators on every rank; collective."""
    return torch.stack(group.all_gather(_own_random_state()))


def restore_random_state(states: torch.Tensor, group: Group) -> None:
    """Set torch's generators as :func:`random_states` saw them on as many ranks of equal kind."""
    mine = states[group.rank]
    size = len(torch.get_rng_state())
    if len(mine) != len(_own_random_state()):
        raise SarError("random state: saved on another kind of device; resume on the same kind")
    torch.set_rng_state(mine[:size].clone())
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(mine[size:].clone())


def noise_states(group: Group) -> torch.Tensor:
    """uint8 [P, bytes]: the state of what rounds rows on a lossy wire on every rank; collective."""
    return torch.stack(group.all_gather(group.seeds.noise(group.rank).get_state()))


def restore_noise(states: torch.Tensor, group: Group) -> None:
    """Set what :func:`noise_states` saw on as many ranks."""
    group.seeds.noise(group.rank).set_state(states[group.rank].clone())


def _own_random_state() -> torch.Tensor:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)
