"""Files that are whole or absent, and what killed processes leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sar import files
from sar.files import exchange, locked_folder, remove_left_over, scratch_folder, staged, write_whole

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

    for write, reason in ((full, "No space left on the disk of"), (torchs, "PytorchStreamWriter")):
        with pytest.raises(OSError, match=f"out.json: could not be written: {reason}"):
            write_whole(path, write)
    assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["out.json"]


@pytest.mark.parametrize("how", ["link", "link to nothing", "second name", "pipe"])
def test_what_is_planted_in_the_place_of_a_partial_file_is_not_written(
    how: str, tmp_path: Path
) -> None:
    """By whoever may write in the folder: the file that it leads to stays as it is."""
    mine, partial = tmp_path / "mine", tmp_path / "out.partial"
    mine.write_bytes(b"mine")
    plant = {
        "link": lambda: partial.symlink_to(mine),
        "link to nothing": lambda: partial.symlink_to(tmp_path / "new"),
        "second name": lambda: partial.hardlink_to(mine),
        "pipe": lambda: os.mkfifo(partial),
    }
    plant[how]()
    with pytest.raises(OSError, match="out: could not be written: .*out.partial is .*, expected"):
        write_whole(tmp_path / "out", lambda file: file.write(b"new"))
    assert mine.read_bytes() == b"mine" and sorted(os.listdir(tmp_path)) == ["mine", "out.partial"]
    assert partial.is_symlink() == how.startswith("link")


def test_links_in_the_place_of_the_file_and_of_a_locked_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out").symlink_to(tmp_path / "mine")
    write_whole(tmp_path / "out", lambda file: file.write(b"new"))
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "out").is_symlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kept").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="kept: could not be written: Not a directory"):
        with locked_folder(tmp_path / "kept"):
            pass
    assert (tmp_path / "elsewhere").is_dir()


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


def test_scratch_of_makers_that_were_killed_early_or_late(tmp_path: Path) -> None:
    """Before the lock was there, or when nothing but the lock was left; not what others made."""
    (tmp_path / "sar-ab_12xyz").mkdir()
    (tmp_path / "sar-0a0b0c0d").mkdir()
    (tmp_path / "sar-0a0b0c0d" / "lock").write_text("")
    (tmp_path / "sar-somebody").mkdir()
    (tmp_path / "sar-somebody" / "mine").write_text("mine")
    (tmp_path / "sar-short").mkdir()
    remove_left_over(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["sar-short", "sar-somebody"]


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "by three names"])
def test_two_folders_are_exchanged(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        monkeypatch.setattr(files, "_EXCHANGE", 1 << 20)  # no flag of the system
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").is_file() and (tmp_path / "b" / "a").is_file()
    with pytest.raises(OSError):
        exchange(tmp_path / "none", tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promise is Linux'")
def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    """Which is killed, and so cannot see to it."""
    (tmp_path / "child.py").write_text(
        "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    )
    parent = f"""
import runpy, subprocess
command = runpy.run_path({str(ROOT / "sar" / "partition" / "child.py")!r})["command"]
subprocess.run(command({str(tmp_path / "child.py")!r}))
"""
    maker = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    child = int(maker.stdout.readline())
    maker.kill()
    assert maker.stdout.read() == "", "its end of the pipe is closed: it has ended"
    maker.wait()
    maker.stdout.close()
    with pytest.raises(ProcessLookupError):
        for _ in range(500):  # somebody else has to wait for it
            os.kill(child, 0)
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                raise ProcessLookupError
            time.sleep(0.01)
