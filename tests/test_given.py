"""Parts that somebody made before: from arrays and files, whole or damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from harness.graphs import GraphArrays
from harness.parts import assign

from sar.partition.methods.base import Given

PARTS = np.arange(20) * 3 % 4


def two_types() -> GraphArrays:
    ends = torch.arange(8), torch.arange(8)
    return GraphArrays("t", {"a": 8, "b": 12}, {("a", "to", "b"): ends})


@pytest.mark.parametrize("dtype", ["<i4", ">i8", "u1"])
@pytest.mark.parametrize("form", ["array", "tensor", "list", "npy", "txt", "npys", "txts"])
def test_given_parts(tmp_path, form, dtype):
    parts = PARTS.astype(dtype)
    sides = {"a": parts[:8], "b": parts[8:]}
    source = tmp_path / f"parts.{form}" if form in ("npy", "txt") else tmp_path
    if form in ("array", "tensor", "list"):
        source = {"array": parts, "tensor": torch.from_numpy(PARTS), "list": PARTS.tolist()}[form]
    elif form == "npy":
        np.save(source, parts)
    elif form == "txt":
        np.savetxt(source, parts, fmt="%d")
    for ntype, side in sides.items():
        if form == "npys":
            np.save(tmp_path / f"{ntype}.npy", side)
        if form == "txts":
            np.savetxt(tmp_path / f"{ntype}.txt", side, fmt="%d")
    found = assign(two_types(), 4, Given(source))
    np.testing.assert_array_equal(found, PARTS)
    assert found.dtype == np.int32 and found is not source


TEXT = "\n".join(map(str, PARTS.tolist())) + "\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT[:-2], "has 19 rows, expected 20"),
        (TEXT + "1\n", "has 21 rows, expected 20"),
        ("", "has 0 rows, expected 20"),
        (TEXT + "\n", "row 20 is ''"),
        (TEXT.replace("3", "-1", 1), "row 1 is '-1', expected a part from 0 to 3"),
        (TEXT.replace("3", "4", 1), "row 1 is part 4, expected 0 to 3"),
        (TEXT.replace("3", "1.0", 1), "row 1 is '1.0'"),
        (TEXT.replace("3", "1_0", 1), "row 1 is '1_0'"),
        (TEXT.replace("3", "three", 1), "row 1 is 'three'"),
        (TEXT.replace("3", "9" * 30, 1), "row 1 is '99999"),
        (TEXT.replace("3", "\u0663", 1), "row 1 is "),
    ],
)
def test_text_that_is_no_parts(tmp_path, text, said):
    path = tmp_path / "parts.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="parts.txt: ") as caught:
        assign(two_types(), 4, Given(path))
    assert said in str(caught.value) and len(str(caught.value)) < 300


def broken_npy(path: Path, parts: np.ndarray) -> None:
    np.save(path, parts)
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: np.save(path, PARTS[:19]), "of shape (19,), expected 20 integers"),
        (lambda path: np.save(path, PARTS[:, None]), "of shape (20, 1), expected 20"),
        (lambda path: np.save(path, PARTS.astype(float)), "got float64"),
        (lambda path: np.save(path, PARTS > 1), "got bool"),
        (lambda path: np.save(path, PARTS - 1), "row 0 is part -1, expected 0 to 3"),
        (lambda path: np.save(path, PARTS + 2**40), f"row 0 is part {2**40}"),
        (lambda path: np.save(path, PARTS.astype(object)), "not an array of numbers"),
        (lambda path: broken_npy(path, PARTS), "not an array of numbers"),
        (lambda path: path.write_bytes(b"\x00" * 300), "not an array of numbers"),
    ],
)
def test_arrays_that_are_no_parts(tmp_path, write, said):
    write(tmp_path / "parts.npy")
    with pytest.raises(ValueError, match="parts.npy: ") as caught:
        assign(two_types(), 4, Given(tmp_path / "parts.npy"))
    assert said in str(caught.value)


def test_given_parts_are_looked_at_for_one_part_too():
    with pytest.raises(ValueError, match="row 1 is part 3, expected 0 to 0"):
        assign(two_types(), 1, Given(PARTS))


def test_files_that_are_not_there(tmp_path):
    for path in (tmp_path / "none.npy", tmp_path / "none.txt"):
        with pytest.raises(FileNotFoundError, match="none"):
            assign(two_types(), 4, Given(path))
    np.save(tmp_path / "a.npy", PARTS[:8])
    with pytest.raises(FileNotFoundError, match=r"holds no b\.npy and no b\.txt"):
        assign(two_types(), 4, Given(tmp_path))
