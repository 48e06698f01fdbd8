"""Checkpoints: whole or old, never executed, and a resumed run is the uninterrupted one."""

from __future__ import annotations

import io
import os
import random
import signal
import textwrap
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from harness.commands import case_command
from harness.nursery import Nursery
from table_files import Trap
from torch import Tensor, nn

import sar
from sar.__main__ import read_words
from sar.comm import Group, LocalGroup, ThreadGroup, use_group
from sar.nn import DistributedBN1D, Dropout
from sar.train import NodeData, Trainer, TrainOptions, sealed
from sar.train.checkpoint import FILE_NAME, load_checkpoint, save_checkpoint
from sar.train.sealed import write_sealed


class Model(nn.Module):
    """Needs no graph; dropout and running statistics make resuming harder."""

    def __init__(self, dropout: float, rank: int, keyed: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), DistributedBN1D(8), nn.Linear(8, 2)
        self.drop = Dropout(dropout) if keyed else nn.Dropout(dropout)
        self.ids = {"rows": torch.arange(20) + 20 * rank} if keyed else {}

    def forward(self, graph: None, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x)), **self.ids))


def trainer(
    group: Group,
    folder: Path | None,
    epochs: int,
    dropout: float,
    keyed: bool = False,
    **config: Any,
) -> Trainer:
    generator = torch.Generator().manual_seed(group.rank)
    idx = torch.arange(20)
    data = NodeData(
        torch.randn(20, 3, generator=generator),
        torch.randint(0, 2, (20,), generator=generator),
        {"train": idx[:10], "val": idx[10:15], "test": idx[15:]}, 2, False,
    )  # fmt: skip
    options = TrainOptions(epochs=epochs, checkpoint_every=4)
    model = Model(dropout, group.rank, keyed)
    with torch.no_grad():  # threads share torch's generator
        for i, param in enumerate(model.parameters()):
            param.normal_(generator=torch.Generator().manual_seed(i))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    steps = {"optimizer": optimizer, "scheduler": scheduler}
    return Trainer(model, None, data, options, checkpoint=folder, config=config, **steps)


def outcome(one: Trainer) -> tuple[list[dict], list[Tensor]]:
    history = [{k: v for k, v in record.items() if k != "seconds"} for record in one.history]
    return history, [value.clone() for value in one.model.state_dict().values()]


@pytest.mark.parametrize(
    ("ranks", "dropout", "keyed"), [(1, 0.5, False), (2, 0.0, False), (2, 0.5, True)]
)
def test_a_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, ranks: int, dropout: float, keyed: bool
) -> None:
    """Bit for bit. torch's dropout on one rank only: threads share torch's generator; the command
    line's test has both."""

    def straight(group: Group) -> tuple:
        one = trainer(group, None, 9, dropout, keyed)
        one.fit()
        return outcome(one)

    def interrupted(group: Group) -> tuple:
        trainer(group, tmp_path, 5, dropout, keyed).fit()
        torch.rand(3)
        group.seeds.draw(group)
        one = trainer(group, tmp_path, 9, dropout, keyed)
        assert one.resume() == 5
        one.fit()
        return outcome(one)

    expected, got = ThreadGroup.run(ranks, straight), ThreadGroup.run(ranks, interrupted)
    for (history, state), (other, other_state) in zip(expected, got, strict=True):
        assert other == history and len(history) == 9
        assert all(torch.equal(a, b) for a, b in zip(state, other_state, strict=True))


def test_another_number_of_ranks_goes_on_with_the_same_dropout(tmp_path: Path) -> None:
    def case(group: Group) -> tuple[int, int] | None:
        trainer(group, tmp_path, 4, 0.5, keyed=True).fit()
        return group.seeds.state()

    saved = ThreadGroup.run(2, case)
    group = LocalGroup()
    with use_group(group):
        one = trainer(group, tmp_path, 6, 0.5, keyed=True)
        words = "written by 2 ranks and is resumed by 1: .* but not bit for bit"
        with pytest.warns(UserWarning, match=words):
            assert one.resume() == 4
        assert saved == [group.seeds.state()] * 2 and saved[0] == (0, 4)
        assert len(one.fit()) == 6


def test_every_ranks_random_state_is_kept(tmp_path: Path) -> None:
    one = trainer(LocalGroup(), tmp_path, 4, 0.5)
    one.fit()
    expected = torch.rand(4)
    torch.manual_seed(0)
    two = trainer(LocalGroup(), tmp_path, 4, 0.5)
    two.resume()
    assert torch.equal(torch.rand(4), expected)
    content = torch.load(tmp_path / FILE_NAME, weights_only=True)
    assert len(content["random"]) == content["num_ranks"] == 1
    assert content["epoch"] == 4 and set(content) >= {"model", "optimizer", "scheduler", "config"}


def test_earlier_checkpoints_say_how_rows_were_rounded(tmp_path: Path) -> None:
    """Those of exact runs go on; others rounded rows on the wire, which this release does not."""
    trainer(LocalGroup(), tmp_path, 4, 0.0).fit()
    content = torch.load(tmp_path / FILE_NAME, weights_only=True)
    noise = torch.Generator().manual_seed(5)
    write_sealed(tmp_path / FILE_NAME, {**content, "noise": noise.get_state()[None]})
    assert trainer(LocalGroup(), tmp_path, 8, 0.0).resume() == 4
    torch.rand(3, generator=noise)
    write_sealed(tmp_path / FILE_NAME, {**content, "noise": noise.get_state()[None]})
    with pytest.raises(ValueError, match="'noise': got a run with --lossy-wire, which is gone"):
        trainer(LocalGroup(), tmp_path, 8, 0.0).resume()


def test_other_options_or_another_model_are_an_error(tmp_path: Path) -> None:
    one = trainer(LocalGroup(), tmp_path, 4, 0.0, hidden=8, lr=0.1)
    one.fit()
    with pytest.raises(ValueError, match="hidden 8, now 16.*Give the same"):
        trainer(LocalGroup(), tmp_path, 4, 0.0, hidden=16, lr=0.1).resume()
    one.model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="of another model"):
        one.resume()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no checkpoint to read"),
        (b"", "damaged, or not a checkpoint"),
        (b"\x80\x02 this is no archive", "damaged, or not a checkpoint"),
        ({"format": 99}, "format 1"),
        ([1, 2], "format 1"),
        (Trap(), "damaged, or not a checkpoint"),
    ],
    ids=["missing", "empty", "noise", "format", "list", "code"],
)
def test_bad_checkpoints_are_every_ranks_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / FILE_NAME
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, Trap):
        torch.save(content, path)
    elif content is not None:
        write_sealed(path, content)  # type: ignore[arg-type]

    def case(group: Group) -> str:
        with pytest.raises(ValueError, match=words) as caught:
            load_checkpoint(tmp_path, group)
        return str(caught.value)

    messages = ThreadGroup.run(2, case)
    assert messages[0] == messages[1] and messages[0].startswith("rank 0: ")
    assert not (tmp_path / "trapped").exists()


def test_a_failed_write_is_every_ranks_error_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sealed(tmp_path / FILE_NAME, {"format": 1, "epoch": 1})

    def full(content: object, file: object) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)

    def case(group: Group) -> str:
        with pytest.raises(OSError, match="rank 0: .*No space left") as caught:
            save_checkpoint(tmp_path, {"format": 1, "epoch": 2}, group)
        return str(caught.value)

    assert len(set(ThreadGroup.run(3, case))) == 1
    assert load_checkpoint(tmp_path, LocalGroup())["epoch"] == 1
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_a_signal_in_the_middle_leaves_the_old_one(tmp_path: Path, nursery: Nursery) -> None:
    """The process ends itself when half of the new file is written and on the disk."""
    path, script = tmp_path / "run" / FILE_NAME, tmp_path / "script.py"
    path.parent.mkdir()
    write_sealed(path, {"format": 1, "epoch": 1})
    code = f"""
        import os, torch
        from pathlib import Path
        from sar.train.sealed import write_sealed
        def half(content, file):
            file.write(b"half of it"); file.flush(); os.fsync(file.fileno())
            os.kill(os.getpid(), {int(signal.SIGKILL)})
        torch.save = half
        write_sealed(Path({str(path)!r}), {{"format": 1, "epoch": 2}})
    """
    script.write_text(textwrap.dedent(code))
    assert nursery.start([str(script)], dict(os.environ)).wait(60) == -signal.SIGKILL
    assert load_checkpoint(path.parent, LocalGroup())["epoch"] == 1
    write_sealed(path, {"format": 1, "epoch": 3})  # what was left does not disturb
    assert load_checkpoint(path.parent, LocalGroup())["epoch"] == 3
    assert os.listdir(path.parent) == [FILE_NAME]


# ---------------------------------------------------------------- damage


def filled(folder: Path) -> bytes:
    trainer(LocalGroup(), folder, 4, 0.0).fit()
    return (folder / FILE_NAME).read_bytes()


def test_no_flipped_bit_is_used(tmp_path: Path) -> None:
    good, draw = filled(tmp_path), random.Random(0)
    for number in range(60):
        data = bytearray(good)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (tmp_path / FILE_NAME).write_bytes(data if number else data[:-100])
        with pytest.raises(ValueError, match="damaged.*(entry|directory)"):
            load_checkpoint(tmp_path, LocalGroup())
    (tmp_path / FILE_NAME).write_bytes(good)
    assert load_checkpoint(tmp_path, LocalGroup())["epoch"] == 4


def test_older_files_are_verified_as_far_as_they_can_be(tmp_path: Path) -> None:
    """They hold no digest: their entries have checksums, and the one that is damaged is named."""
    filled(tmp_path)
    content = torch.load(tmp_path / FILE_NAME, weights_only=True)
    torch.save(content, tmp_path / FILE_NAME)
    with pytest.warns(UserWarning, match="holds no digest"):
        assert load_checkpoint(tmp_path, LocalGroup())["epoch"] == 4
    data = bytearray((tmp_path / FILE_NAME).read_bytes())
    data[data.index(b"exp_avg") + 2] ^= 4
    (tmp_path / FILE_NAME).write_bytes(data)
    with pytest.raises(ValueError, match="entry .*data.pkl is not as written"):
        load_checkpoint(tmp_path, LocalGroup())


WRONG = {
    "epoch": ["4", None, True, 7],
    "num_ranks": [None, 3],
    "history": [{}, [], [1, 2, 3, 4]],
    "random": [None, torch.zeros(1, 4), torch.zeros(3, 5, dtype=torch.uint8)],
    "noise": [5, torch.zeros(1, 4)],
    "dropout_seeds": [None, (1,), ("a", "b")],
    "model": [None, {}, {"first.weight": 3}],
    "optimizer": [None, {}, {"state": {}, "param_groups": []}],
    "scheduler": [3],
    "config": ["x"],
}


def moments_of_another_shape(content: dict) -> dict:
    state = content["optimizer"]["state"]
    wrong = {**state[0], "exp_avg": torch.zeros(2, 2)}
    return {**content["optimizer"], "state": {**state, 0: wrong}}


@pytest.mark.parametrize("field", WRONG)
def test_wrong_fields_are_named(tmp_path: Path, field: str) -> None:
    filled(tmp_path)
    content = torch.load(tmp_path / FILE_NAME, weights_only=True)
    for value in [*WRONG[field], *([moments_of_another_shape(content)] * (field == "optimizer"))]:
        write_sealed(tmp_path / FILE_NAME, {**content, field: value})
        one = trainer(LocalGroup(), tmp_path, 8, 0.0)
        with pytest.raises(ValueError, match="checkpoint.*another model|checkpoint's '") as caught:
            one.resume()
        words = {"model": "model", "epoch": "", "num_ranks": ""}.get(field, f"'{field}'")
        assert words in str(caught.value)
    content.pop(field, None)
    write_sealed(tmp_path / FILE_NAME, content)
    if field != "noise":  # which older files do not have
        with pytest.raises(ValueError, match=f"checkpoint's '{field}': got nothing"):
            trainer(LocalGroup(), tmp_path, 8, 0.0).resume()


# ---------------------------------------------------------------- forged, with a right digest


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


@pytest.mark.parametrize("name", ["layers", "hidden", "heads"])
def test_no_larger_model_than_the_files_is_built(tmp_path: Path, name: str) -> None:
    source = "synthetic:nodes=60,edges=300,seed=1,classes=3,features=4"
    parts = sar.partition_graph(source, tmp_path / "parts", 1)
    words = ["--hidden", "8", "--epochs", "1", "--checkpoint", str(tmp_path / "run")]
    command("train", parts, *words)
    content = torch.load(tmp_path / "run" / FILE_NAME, weights_only=True)
    content["config"][name] = 2**60
    write_sealed(tmp_path / "run" / FILE_NAME, content)
    words = ["--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path)]
    with pytest.raises(ValueError, match=f"the checkpoint's '{name}': got 1152921504606846976, "):
        command("evaluate", parts, *words)


def command(*words: str) -> None:
    case_command(LocalGroup(), words[0], vars(read_words(words)))
