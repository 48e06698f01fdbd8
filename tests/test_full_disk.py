"""A full disk is told as that, with the disk's folder, by whatever writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import run_threads

from sar.comm import Group, LocalGroup
from sar.files import write_whole
from sar.train.checkpoint import FILE_NAME, load_checkpoint, save_checkpoint

SmallDisk = Callable[[int], Path]
KIB = 64


def content(numbers: int) -> dict:
    best = {"epoch": 1, "model": {"weight": torch.ones(numbers)}}
    return {"format": 1, "model": {"weight": torch.ones(numbers)}, "best": best}


def told(disk: Path, name: str) -> str:
    free = r"which has \d{1,3}(,\d{3})* bytes free"
    return f"{disk}/{name}: could not be written: No space left on the disk of {disk}, {free}"


@pytest.mark.parametrize("numbers", [7_500, 9_000, 200_000])
def test_a_checkpoint_for_which_there_is_no_room(small_disk: SmallDisk, numbers: int) -> None:
    """All ranks get the words, and the old file stays."""
    disk = small_disk(KIB)
    save_checkpoint(disk, content(10), LocalGroup())

    def case(group: Group) -> str:
        with pytest.raises(OSError, match=told(disk, FILE_NAME)) as caught:
            save_checkpoint(disk, content(numbers), group)
        return str(caught.value)

    (words,) = set(run_threads(2, case))
    assert "inline_container" not in words and "PytorchStream" not in words
    assert len(load_checkpoint(disk, LocalGroup())["model"]["weight"]) == 10
    assert os.listdir(disk) == [FILE_NAME]


@pytest.mark.parametrize("size", [40_000, 4_000_000])
@pytest.mark.parametrize(
    "write",
    [
        lambda file, size: file.write(bytes(size)),
        lambda file, size: np.savez(file, rows=np.zeros(size, np.uint8)),
        lambda file, size: torch.save({"rows": torch.zeros(size, dtype=torch.uint8)}, file),
    ],
    ids=["bytes", "numpy", "torch"],
)
def test_files_of_any_kind(small_disk: SmallDisk, write: Callable, size: int) -> None:
    disk = small_disk(KIB)
    (disk / "more").write_bytes(bytes(30_000))
    with pytest.raises(OSError, match=told(disk, "out") + r"$"):
        write_whole(disk / "out", lambda file: write(file, size))
    assert os.listdir(disk) == ["more"]
