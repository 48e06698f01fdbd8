"""Files that are whole or not there at all, and what killed processes left of theirs."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
SCRATCH = "sar-"
_LOCK = "lock"

# Note [Whose file]
# A file or folder that is being made is locked by its maker (`flock`) for as long as it lives, and
# by nobody after that, however the maker ended. So what is left over can be told from what is in
# use, also by a process that started long after.


def write_whole(path: Path, write: Callable[[BinaryIO], object], *, durable: bool = False) -> None:
    """Call ``write`` on a new file that takes ``path``'s place when it is complete.

    A process that is killed at any moment leaves the old file or the new one, never a part. The
    folder is made where there is none.

    Args:
        durable: the new file is on the disk when this returns, and survives a power cut.

    Raises ``OSError`` that names ``path`` and the reason, for a full disk in whatever form it came.
    """
    with naming(path), staged(path, write, durable) as partial:
        os.replace(partial, path)
        if durable:
            _flush(path.parent)


@contextmanager
def staged(
    path: Path, write: Callable[[BinaryIO], object], durable: bool = False
) -> Iterator[Path]:
    """The complete file under its temporary name; removed at the end if it is still there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    partial = path.with_name(path.name + PARTIAL)
    with open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "wb") as file:
        _lock(file)  # before it is changed: it may be another's
        try:
            file.truncate()
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            yield partial
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system inside name ``path``; torch's and zip's of a full disk become such."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno or 0, f"{path}: could not be written: {reason}") from error
    except RuntimeError as error:  # torch's writer
        raise OSError(f"{path}: could not be written: {error}") from error


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A private folder below ``parent`` (the system's for temporary files), gone at the end.

    Raises ``OSError`` that names ``parent``.
    """
    where = Path(tempfile.gettempdir() if parent is None else parent)
    with naming(where):
        folder = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=where))
    try:
        with open(folder / _LOCK, "wb") as lock:
            _lock(lock)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_left_over(folder: Path, names: Iterable[str] = ()) -> None:
    """Remove what killed processes of this user left in ``folder``.

    These are folders of :func:`scratch_folder`, and the partial files of ``names``, that nobody has
    locked.
    """
    partial = {name + PARTIAL for name in names}
    with suppress(OSError):  # no such folder, or not ours to read: then nothing of ours is there
        for entry in list(os.scandir(folder)):
            is_folder = entry.is_dir(follow_symlinks=False) and entry.name.startswith(SCRATCH)
            if is_folder and _is_left(Path(entry.path, _LOCK)):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name in partial and _is_left(Path(entry.path)):
                os.unlink(entry.path)


def _lock(file: BinaryIO) -> None:
    """For as long as it is open. Raises ``BlockingIOError``: another process makes it, too."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some shared file systems have no locks: what is left there stays
        pass


def _is_left(lock: Path) -> bool:
    """Whether it is this user's, and locked by no living process."""
    try:
        number = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(number).st_uid == os.geteuid()
    except OSError:  # somebody holds it
        return False
    finally:
        os.close(number)


def _flush(folder: Path) -> None:
    """The names in it survive a power cut as well."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
