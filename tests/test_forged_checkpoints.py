"""Checkpoints that were changed and have a right digest, or none: read with limits, or refused."""

from __future__ import annotations

import io
import random
import re
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from test_checkpoint import trainer
from torch import Tensor

from benchmarks.tasks import mutations
from sar.__main__ import read_words
from sar.cli import evaluate, train
from sar.comm import LocalGroup
from sar.errors import SarError
from sar.partition.sources.generate import community_graph
from sar.partition.write import write_partitions
from sar.train import sealed
from sar.train.checkpoint import FILE_NAME, check_fields, load_checkpoint
from sar.train.sealed import write_sealed


def write_forged(path: Path, archive: bytes) -> None:
    """With a digest that is right."""
    digest = xxhash.xxh3_128(archive).digest()
    path.write_bytes(archive + sealed._MARK + digest)


def packed(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def repacked(
    archive: bytes, pickled: bytes | None = None, how: int = zipfile.ZIP_STORED, times: int = 1
) -> bytes:
    """With another pickle, compressed, or with entries that are there several times."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(stream, "w", how) as new:
        for entry in old.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            new.writestr(entry.filename, pickled if pickled and is_pickle else old.read(entry))
        new.filelist += [one for one in new.filelist if "/data/" in one.filename] * (times - 1)
    return stream.getvalue()


def nested(depth: int) -> list:
    """A few hundred bytes that are 2 ** depth values."""
    value: list = [1]
    for _ in range(depth):
        value = [value, value]
    return value


def call(module: str, name: str) -> bytes:
    """A pickle that calls it with 3 * 2 ** 28."""
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"J\0\0\0\x30\x85R."


ZEROS = packed({"format": 1, "rows": torch.zeros(1 << 26)})
FORGED: dict[str, Callable[[], bytes]] = {
    "compressed": lambda: repacked(ZEROS, how=zipfile.ZIP_DEFLATED),
    "twice": lambda: repacked(packed({"rows": torch.zeros(9999)}), times=50),
    "a buffer": lambda: repacked(packed({}), call("builtins", "bytearray")),
    "no numbers": lambda: packed({"format": 1, "rows": torch.zeros(1).expand(1 << 40)}),
    "a nest": lambda: packed({"format": 1, "rows": nested(40)}),
    "a tensor": lambda: repacked(packed({}), call("torch", "FloatTensor")),
}


@pytest.mark.parametrize("how", FORGED)
def test_nothing_larger_than_the_file_is_made(tmp_path: Path, how: str) -> None:
    write_forged(tmp_path / FILE_NAME, FORGED[how]())
    begin = time.monotonic()
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"{FILE_NAME}: damaged, or not a checkpoint: .*"):
        load_checkpoint(tmp_path, LocalGroup())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20 and time.monotonic() - begin < 20


# ---------------------------------------------------------------- fields


def places(value: Any, place: tuple = ()) -> list[tuple]:
    found = [place] if place else []
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    for key, one in value.items() if isinstance(value, dict) else ():
        found += places(one, (*place, key))
    return found


def changed(value: Any, place: tuple, make: Callable[[Any], Any]) -> Any:
    if not place:
        return make(value)
    key, rest = place[0], place[1:]
    if isinstance(value, dict):
        return {**value, key: changed(value[key], rest, make)}
    items = list(value)
    items[key] = changed(items[key], rest, make)
    return type(value)(items)


VALUES: list[Callable[[Any], Any]] = [
    lambda old: None, lambda old: -1, lambda old: 2**62, lambda old: 2**200, lambda old: "x",
    lambda old: [], lambda old: {}, lambda old: float("nan"), lambda old: torch.zeros(3),
    lambda old: torch.zeros(1).expand(1 << 40), lambda old: nested(40), lambda old: (1, 2, 3),
    lambda old: torch.full_like(old, 7) if isinstance(old, Tensor) else torch.zeros(0),
    lambda old: old[..., :1] if isinstance(old, Tensor) and old.dim() else True,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
def test_any_value_in_any_place_is_taken_or_named(tmp_path: Path, seed: int) -> None:
    trainer(LocalGroup(), tmp_path, 4, 0.0, hidden=8).fit()
    content = torch.load(tmp_path / FILE_NAME, weights_only=True)
    draw, everywhere, refused = random.Random(seed), places(content), 0
    for _ in range(90):
        place, make = draw.choice(everywhere), draw.choice(VALUES)
        write_sealed(tmp_path / FILE_NAME, changed(content, place, make))
        begin = time.monotonic()
        try:
            trainer(LocalGroup(), tmp_path, 8, 0.0, hidden=8).resume()
        except (ValueError, SarError) as error:
            refused += 1
            said = str(error)
            assert re.search("checkpoint|random state", said) and len(said) < 2000, (place, said)
        except Exception as error:
            raise AssertionError(f"{place}: {type(error).__name__}") from error
        assert time.monotonic() - begin < 20, place
    assert refused > 30


@pytest.mark.parametrize("name", ["layers", "hidden", "heads"])
def test_no_larger_model_than_the_files_is_built(tmp_path: Path, name: str) -> None:
    graph = community_graph(60, 300, 1, classes=3, features=4)
    parts = write_partitions(graph, torch.zeros(60).long(), tmp_path / "parts")
    words = ["--hidden", "8", "--epochs", "1", "--checkpoint", str(tmp_path / "run")]
    command(train, "train", parts, *words)
    content = torch.load(tmp_path / "run" / FILE_NAME, weights_only=True)
    content["config"][name] = 2**60
    write_sealed(tmp_path / "run" / FILE_NAME, content)
    words = ["--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path)]
    with pytest.raises(ValueError, match=f"the checkpoint's '{name}': got 1152921504606846976, "):
        command(evaluate, "evaluate", parts, *words)


def command(module: Any, *words: str) -> None:
    module.work(read_words(words), LocalGroup(), torch.device("cpu"))


# ---------------------------------------------------------------- without a digest


@pytest.mark.filterwarnings("ignore:.*holds no digest")
def test_no_changed_number_is_used_without_a_digest(tmp_path: Path) -> None:
    """Checksums tell those; what is taken differs in padding, or dates, or names of the archive."""
    trainer(LocalGroup(), tmp_path, 4, 0.0).fit()
    path = tmp_path / FILE_NAME
    good = path.read_bytes()[: -sealed._SEAL_BYTES]

    def read() -> str:
        content = load_checkpoint(tmp_path, LocalGroup())
        check_fields(content)
        return mutations._digest(content)

    path.write_bytes(good)
    want, draw, taken = read(), random.Random(0), 0
    for _ in range(200):
        data = bytearray(good)
        draw.choice(mutations.CHANGES)(data, draw)
        path.write_bytes(data)
        try:
            found = read()
        except ValueError as error:
            assert "damaged" in str(error)
            continue
        assert found == want
        taken += data != good
    assert taken, "some changes are to bytes that hold nothing"
