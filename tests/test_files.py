"""Files that are whole or absent, and what killed processes leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sar.files import remove_left_over, scratch_folder, staged, write_whole

ROOT = Path(__file__).resolve().parent.parent

MAKER = """
    import os, signal, sys
    from pathlib import Path
    from sar.files import scratch_folder, staged
    folder = Path(sys.argv[1])
    with scratch_folder(folder) as scratch, staged(folder / "out", lambda file: file.write(b"a")):
        (scratch / "more").mkdir()
        print("made", flush=True)
        sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "sar-mine").mkdir()  # no lock: not made by the library
    (tmp_path / "other.partial").write_text("somebody's")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").write_text("")
    (tmp_path / "sar-link").symlink_to(elsewhere)
    maker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(MAKER), str(tmp_path)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert maker.stdout is not None and maker.stdout.readline() == "made\n"
    alive = sorted(os.listdir(tmp_path))
    assert len(alive) == 6
    remove_left_over(tmp_path, ["out"])
    assert sorted(os.listdir(tmp_path)) == alive, "its maker lives"
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    remove_left_over(tmp_path, ["out"])
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "other.partial", "sar-link", "sar-mine"]
    assert os.listdir(elsewhere) == ["lock"]


def test_an_error_names_the_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_whole(path, lambda file: file.write(b"one"))

    def full(file) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    def torchs(file) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file")

    for write, reason in ((full, "No space left on device"), (torchs, "PytorchStreamWriter")):
        with pytest.raises(OSError, match=f"out.json: could not be written: {reason}"):
            write_whole(path, write)
    assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["out.json"]


def test_two_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with staged(path, lambda file: file.write(b"one")) as partial:
        with pytest.raises(OSError, match="out: could not be written: Resource temporarily"):
            write_whole(path, lambda file: file.write(b"two"))
        assert partial.name == "out.partial" and partial.read_bytes() == b"one"


def test_a_scratch_folder_is_private_and_goes(tmp_path: Path) -> None:
    with pytest.raises(KeyError), scratch_folder(tmp_path) as folder:
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o77 == 0
        raise KeyError
    assert os.listdir(tmp_path) == []
    with pytest.raises(OSError, match=f"{tmp_path}/none: could not be written: No such file"):
        with scratch_folder(tmp_path / "none"):
            pass
