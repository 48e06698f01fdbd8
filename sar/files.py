"""Writes files whole or not at all, locks folders, and removes what killed processes left."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import resource
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

PARTIAL = ".partial"
SCRATCH = "sar-"
_LOCK = "lock"
_MOST_OPEN = 4096  # files of one writer
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE

# A file or folder that is being made is locked by its maker (`flock`) for as long as it lives, and
# by nobody after that, however the maker ended. So what is left over can be told from what is in
# use, also by a process that started long after.


def write_whole(path: Path, write: Callable[[BinaryIO], object], *, durable: bool = False) -> None:
    """Call ``write`` on a new file that takes ``path``'s place when it is complete.

    A process killed at any moment leaves the old file or the new one, never a part. Makes the
    folder. A ``durable`` file survives a power cut once this has returned. Raises ``OSError``
    naming ``path`` and the reason, for a full disk in whatever form it came.
    """
    with naming(path), staged(path, write, durable) as partial:
        os.replace(partial, path)
        if durable:
            number = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(number)  # the name survives a power cut as well
            finally:
                os.close(number)


@contextmanager
def staged(
    path: Path, write: Callable[[BinaryIO], object], durable: bool = False
) -> Iterator[Path]:
    """Yield the complete file under its temporary name, removed at the end if it is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    partial = path.with_name(path.name + PARTIAL)
    with open(open_own(partial), "wb") as file:
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


def open_own(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open a file that the library alone writes, where others may have planted something. Raises
    ``OSError`` for a link, a second name of another file, and what is no file."""
    what = "no plain file, or another one's second name"
    try:
        number = os.open(path, flags | os.O_NOFOLLOW, 0o666)
        state = os.fstat(number)
        if stat.S_ISREG(state.st_mode) and state.st_nlink <= 1:
            return number
        os.close(number)
    except OSError:
        if not path.is_symlink():
            raise
        what = "a link"
    raise OSError(errno.EEXIST, f"{path} is {what}, expected a file of its own or nothing")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system inside name ``path``, and the disk where that is full. torch's writer
    puts them in words of its own, and has them as context."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise OSError(f"{path}: could not be written: {error}") from error
        number, reason = cause.errno or 0, cause.strerror or str(cause)
        if "requested and" in reason:  # numpy's, of a write that was cut short
            number = errno.ENOSPC
        if number == errno.ENOSPC:
            folder = next(one for one in (path, *path.parents) if one.is_dir())
            state = os.statvfs(folder)
            free = state.f_bavail * state.f_frsize
            reason = f"No space left on the disk of {folder}, which has {free:,} bytes free"
        raise OSError(number, f"{path}: could not be written: {reason}") from error


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A private folder below ``parent`` (the system's for temporary files), gone at the end. Raises
    ``OSError`` that names ``parent``."""
    where = Path(tempfile.gettempdir() if parent is None else parent)
    with ExitStack() as locked, ExitStack() as made:
        with naming(where):
            folder = _make_scratch(where, locked, made)
        yield folder


def _make_scratch(where: Path, locked: ExitStack, made: ExitStack) -> Path:
    """Make the folder, again where a process that tidies up took it for a left one. ``made``
    removes it whenever an interrupt comes: its name is known before it is there."""
    while True:
        folder = where / f"{SCRATCH}{secrets.token_hex(4)}"
        with suppress(FileExistsError):
            made.callback(_remove, folder)
            folder.mkdir(mode=0o700)
            with suppress(FileNotFoundError, BlockingIOError):
                lock = locked.enter_context(open(folder / _LOCK, "xb"))
                _lock(lock)
                if _is_at(lock.fileno(), folder / _LOCK):
                    return folder
        made.pop_all()  # another's


def _remove(folder: Path) -> None:
    """Remove a scratch folder, the lock last: by that the rest is told if the process is killed
    meanwhile. An interrupt comes through when that is done."""
    try:
        with suppress(OSError):
            for entry in list(os.scandir(folder)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif entry.name != _LOCK:
                    os.unlink(entry.path)
            Path(folder, _LOCK).unlink(missing_ok=True)
            folder.rmdir()
    except BaseException:
        _remove(folder)
        raise


def remove_left_over(folder: Path, names: Iterable[str] = ()) -> None:
    """Remove what killed processes of this user left in ``folder``, as nobody has it locked:
    scratch folders, and partial files of ``names`` (patterns as of the shell)."""
    partial = [name + PARTIAL for name in names]
    with suppress(OSError):  # no such folder, or not ours to read: then nothing of ours is there
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False) and entry.name.startswith(SCRATCH):
                with _left(Path(entry.path, _LOCK)) as is_left:
                    if is_left or _is_bare(entry):
                        _remove(Path(entry.path))
            elif any(fnmatchcase(entry.name, one) for one in partial):
                with _left(Path(entry.path)) as is_left:
                    if is_left:
                        os.unlink(entry.path)


def _is_bare(entry: os.DirEntry[str]) -> bool:
    """Whether a scratch folder's maker was killed before it was locked, or in unlocking it."""
    is_named = re.fullmatch(SCRATCH + "[a-z0-9_]{8}", entry.name)
    is_own = entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    return is_named is not None and is_own and not os.listdir(entry.path)


@contextmanager
def locked_folder(path: Path) -> Iterator[Path]:
    """A folder that one process at a time has: made here, and gone at the end where it is empty.
    Raises ``BlockingIOError`` that names it while another process has it, ``OSError``."""
    with naming(path):
        number = _open_folder(path)
    try:
        yield path
    finally:
        with suppress(OSError):
            path.rmdir()
        os.close(number)


@contextmanager
def parents_of(path: Path) -> Iterator[None]:
    """Make the folders above ``path``; after an error those that were made here are gone."""
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        with naming(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with suppress(OSError):  # others may have put something in
            for folder in made:
                folder.rmdir()
        raise


def exchange(one: Path, other: Path) -> None:
    """Swap the names of two folders of one file system, at once where the system can; else
    ``other`` is ``<other>.old`` for a moment, and stays so if the process is killed then. Raises
    ``OSError``."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = [os.fsencode(path.absolute()) for path in (one, other)]
    if rename and rename(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0:
        return
    old = other.with_name(other.name + ".old")
    other.rename(old)
    try:
        one.rename(other)
    except OSError:
        old.rename(other)
        raise
    old.rename(one)


def _open_folder(path: Path) -> int:
    while True:
        with suppress(FileExistsError):
            path.mkdir()
        with suppress(FileNotFoundError):  # another one ended just now
            number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                _lock(number)
                if _is_at(number, path):
                    return number
            except BlockingIOError:
                os.close(number)
                raise
            os.close(number)


def _is_at(number: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), os.stat(path))
    except FileNotFoundError:
        return False


def _lock(file: BinaryIO | int) -> None:
    """Lock a file while it is open. Raises ``BlockingIOError`` where another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some shared file systems have no locks: what is left there stays
        pass


@contextmanager
def _left(lock: Path) -> Iterator[bool]:
    """Whether a lock is this user's and no living process has it; nobody takes it meanwhile."""
    with ExitStack() as opened:
        try:
            number = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
            opened.callback(os.close, number)
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_left = os.fstat(number).st_uid == os.geteuid()
        except OSError:  # there is none, or somebody holds it
            is_left = False
        yield is_left


class OutFiles:
    """New files below ``folder``, by relative name; errors name them in ``shown``, their later
    folder.

    As many as half of the system's limit stay open; each of the others is opened for every write.
    Raises ``OSError`` that names the file, for a full disk among others.
    """

    def __init__(self, folder: Path, shown: Path) -> None:
        self._folder, self._shown = folder, shown
        self._numbers: dict[str, int] = {}
        self._closing = ExitStack()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._room = _MOST_OPEN if soft == resource.RLIM_INFINITY else min(_MOST_OPEN, soft // 2)

    def __enter__(self) -> OutFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()  # all of them; an error that only closing tells of is not lost

    def _close(self, name: str, number: int) -> None:
        with naming(self._shown / name):
            os.close(number)

    @contextmanager
    def placed(self, name: str) -> Iterator[Path]:
        """A path for somebody else to write a file; its folder is there, and errors name it."""
        with naming(self._shown / name):
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            yield path

    def write(self, name: str, at: int, data: Any) -> None:
        """Write all bytes of a contiguous buffer, from position ``at`` on."""
        with naming(self._shown / name), self._open(name) as number:
            left = _buffer(data)
            while left:
                done = os.pwrite(number, left, at)
                at, left = at + done, left[done:]

    def read(self, name: str, at: int, out: Any) -> None:
        """Fill a contiguous array with what was written at position ``at``."""
        with naming(self._shown / name), self._open(name) as number:
            left = _buffer(out)
            while left:
                done = os.preadv(number, [left], at)
                if not done:
                    raise OSError(0, "it was cut short while it was written")
                at, left = at + done, left[done:]

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        if name in self._numbers:
            yield self._numbers[name]
            return
        number = os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o666)
        if len(self._numbers) < self._room:
            self._numbers[name] = number
            self._closing.callback(self._close, name, number)
            yield number
            return
        try:
            yield number
        finally:
            os.close(number)


def _buffer(data: Any) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")
