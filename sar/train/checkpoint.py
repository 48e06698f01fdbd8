"""Checkpoints: one file that is always whole, written by rank 0 and read without unpickling."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sar.comm import Group
from sar.errors import SarError
from sar.train.callbacks import Record
from sar.train.embedding import shared_state, with_own_rows
from sar.train.sealed import check_seal, load_archive, write_sealed
from sar.words import MODELS

FILE_NAME = "checkpoint.pt"
FORMAT = 1


# What a run's checkpoint holds, and the type of each; see :meth:`sar.train.Trainer.save`.
FIELDS: dict[str, type] = {
    "epoch": int,
    "num_ranks": int,
    "random": Tensor,
    "dropout_seeds": tuple,
    "noise": Tensor,
    "model": dict,
    "optimizer": dict,
    "scheduler": dict,
    "history": list,
    "config": dict,
    "graph": dict,
    "begun": dict,
    "tables": dict,
    "plateau": dict,
    "best": dict,
}
_BEGUN = ("step", "loss", "seeds")  # of an epoch that was saved half-way
_GRAPH = ["cut", "graph", "num_parts"]
_BEST = ["epoch", "model"]
_NEW = ("noise", "graph", "begun", "tables", "plateau", "best")  # not in every file


def save_checkpoint(folder: str | os.PathLike, content: dict[str, Any], group: Group) -> None:
    """Write ``content`` on rank 0; collective, so that a full disk is every rank's error. A process
    that is killed at any moment leaves the old file or the new one, never a part."""
    with group.agreed():
        if group.rank == 0:
            write_sealed(Path(folder) / FILE_NAME, content)


def load_checkpoint(folder: str | os.PathLike, group: Group) -> dict[str, Any]:
    """Read the file on rank 0 and send it to all, so no shared file system is needed; collective.
    Tensors come back on the CPU. Raises ``ValueError`` on every rank when there is no checkpoint, a
    byte of it is not as it was written, or it is of another program."""
    blob = torch.empty(0, dtype=torch.uint8)
    with group.agreed():
        if group.rank == 0:
            blob = _read(Path(folder) / FILE_NAME)
    size = int(group.broadcast(torch.tensor([len(blob)])))
    if group.rank != 0:
        blob = torch.empty(size, dtype=torch.uint8)
    return _parse(group.broadcast(blob).numpy().tobytes(), folder)


def saved_until(folder: str | os.PathLike) -> str | None:
    """How far a run is saved, such as "epoch 3"; ``None``: not at all. Reads no tensor."""
    try:
        path = os.fspath(Path(folder) / FILE_NAME)
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        step = content.get("begun", {}).get("step")
        return f"epoch {content['epoch']}" + (f" and step {step} of the next" if step else "")
    except Exception:  # torch raises many kinds; whoever resumes is told of a damaged file
        return None


def _read(path: Path) -> torch.Tensor:
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise ValueError(f"{path}: no checkpoint to read: {problem.strerror}") from problem
    check_seal(data, path)
    _parse(data, path.parent)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _parse(data: bytes, folder: str | os.PathLike) -> dict[str, Any]:
    return load_archive(data, Path(folder) / FILE_NAME, FORMAT)


def check_fields(content: dict[str, Any]) -> None:
    """Raise ``ValueError`` naming a field that is missing, or of another type or size."""
    for name, kind in FIELDS.items():
        if name not in content and name in _NEW:
            continue
        value = content.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            got = type(value).__name__ if name in content else "nothing"
            raise _wrong(name, got, kind.__name__)
    epoch, history, ranks = content["epoch"], content["history"], content["num_ranks"]
    are_records = all(isinstance(record, dict) and "val_acc" in record for record in history)
    if len(history) != epoch or not are_records:
        raise _wrong("history", f"{len(history)} entries", f"a record for each of {epoch} epochs")
    for value in (value for record in history for value in record.values()):
        if not isinstance(value, int | float | None):
            raise _wrong("history", type(value).__name__, "numbers")
    if not _is_plain(content["config"]):
        raise _wrong("config", "tensors", "plain values")
    for name in ("random", "noise"):
        states = content.get(name)
        if states is None:
            continue
        if states.dtype != torch.uint8 or states.dim() != 2 or len(states) != ranks:
            got = f"{states.dtype} {tuple(states.shape)}"
            raise _wrong(name, got, f"torch.uint8 with a row for each of {ranks} ranks")
        if name == "noise":  # of files that an earlier release wrote
            _check_noise(states)
    if set(content.get("graph") or _GRAPH) != set(_GRAPH):
        raise _wrong("graph", repr(sorted(content["graph"])), repr(_GRAPH))
    begun = content.get("begun") or dict.fromkeys(_BEGUN, 0)
    if set(begun) != set(_BEGUN) or not all(isinstance(v, int | float) for v in begun.values()):
        raise _wrong("begun", repr(begun), f"numbers for {sorted(_BEGUN)}")
    best = content.get("best") or {"epoch": 1, "model": {}}
    if sorted(best) != _BEST or not isinstance(best["model"], dict):
        raise _wrong("best", repr(sorted(best)), repr(_BEST))
    if type(best["epoch"]) is not int:
        raise _wrong("best", f"an epoch that is a {type(best['epoch']).__name__}", "an int")
    seeds = content["dropout_seeds"]
    if len(seeds) != 2 or not all(isinstance(seed, int) for seed in seeds):
        raise _wrong("dropout_seeds", repr(seeds), "two integers")


def _is_plain(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        return all(map(_is_plain, inside))
    return not isinstance(value, Tensor)


def _wrong(field: str, got: str, expected: str) -> ValueError:
    return ValueError(f"the checkpoint's {field!r}: got {got}, expected {expected}")


def load_model(model: nn.Module, content: dict[str, Any], which: str = "last") -> int:
    """Load the parameters of the ``last`` epoch or the ``best``; returns which epoch that was.
    Raises ``ValueError`` where they do not fit, or there are none of the best."""
    kept = content if which == "last" else content.get("best")
    if not kept:
        raise ValueError(
            "which: got 'best', and the checkpoint holds none: its run has no validation nodes, or "
            "learns rows of nodes, or is of an older version; expected 'last'"
        )
    try:
        state = _by_new_names(model, content["config"], kept["model"])
        model.load_state_dict(with_own_rows(model, state))
    except (RuntimeError, KeyError, TypeError) as problem:
        raise ValueError(f"the checkpoint is of another model: {problem}") from problem
    return int(kept["epoch"])


def _by_new_names(
    model: nn.Module, config: dict[str, Any], state: dict[str, Tensor]
) -> dict[str, Tensor]:
    """A built-in model's tensors by its names: older files have other names in the same order."""
    own = shared_state(model)
    shapes = [getattr(one, "shape", None) for one in state.values()]
    is_like = [value.shape for value in own.values()] == shapes
    if config.get("model") not in MODELS or not is_like:
        return state
    return dict(zip(own, state.values(), strict=True))


def load_optimizer(
    optimizer: torch.optim.Optimizer, scheduler: Any, content: dict[str, Any], plateau: Any = None
) -> None:
    """Load a checkpoint's states; ``ValueError`` where they do not fit."""
    fields = {"optimizer": optimizer, "scheduler": scheduler}
    for field, one in (fields | ({"plateau": plateau} if plateau else {})).items():
        try:
            one.load_state_dict(content[field])
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as problem:
            text = f"{type(problem).__name__}: {problem}"
            raise ValueError(f"the checkpoint's {field!r} is of another one: {text}") from problem
    for param, state in optimizer.state.items():
        if not isinstance(param, Tensor) or not isinstance(state, dict):
            raise _wrong("optimizer", "states that no parameter has", "its parameters' states")
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != param.shape:
                got, expected = list(value.shape), list(param.shape)
                raise _wrong("optimizer", f"{name} of shape {got}", f"{expected}, its parameter's")


def random_states(group: Group) -> torch.Tensor:
    """uint8 [P, bytes]: the state of torch's generators on every rank; collective."""
    return torch.stack(group.all_gather(_own_random_state()))


def restore_random_state(states: torch.Tensor, group: Group) -> None:
    """Set torch's generators from :func:`random_states`; ``SarError`` on another kind of device."""
    mine = states[group.rank]
    size = len(torch.get_rng_state())
    if len(mine) != len(_own_random_state()):
        raise SarError("random state: saved on another kind of device; resume on the same kind")
    try:
        torch.set_rng_state(mine[:size].clone())
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(mine[size:].clone())
    except RuntimeError as problem:
        raise _wrong("random", str(problem), "a state of torch's generator") from problem


def _check_noise(states: torch.Tensor) -> None:
    """Raise ``ValueError`` where a run rounded rows on the wire: it cannot go on as it began."""
    for state in states:
        rounding, unused = torch.Generator(), torch.Generator()
        try:
            rounding.set_state(state.clone())
        except RuntimeError as problem:
            raise _wrong("noise", str(problem), "a state of torch's generator") from problem
        if not torch.equal(unused.manual_seed(rounding.initial_seed()).get_state(), state):
            raise _wrong("noise", "a run with --lossy-wire, which is gone", "an exact one")


def _own_random_state() -> torch.Tensor:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


class Best:
    """The best epoch so far, of equals the first; every metric grows as the model gets better.
    ``record`` is ``None`` before there is a validation metric, ``model`` where it is not kept."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self.model: dict[str, Tensor] | None = None

    def see(self, record: Record) -> bool:
        """Whether this epoch is better than all before it."""
        value = record["val_acc"]
        if value is None or (self.record is not None and value <= self.record["val_acc"]):
            return False
        self.record, self.model = record, None
        return True

    def keep(self, model: nn.Module) -> None:
        self.model = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def restore(self, history: list[Record], saved: dict[str, Any] | None) -> None:
        """Continue from the ``history`` of a resumed run, and from what :meth:`content` saved."""
        self.record = None
        for record in history:
            self.see(record)
        is_same = saved and self.record is not None and saved["epoch"] == self.record["epoch"]
        self.model = saved["model"] if saved and is_same else None

    def content(self) -> dict[str, Any] | None:
        """What a checkpoint holds of it; ``None`` where there is no model."""
        if self.record is None or self.model is None:
            return None
        return {"epoch": self.record["epoch"], "model": self.model}
