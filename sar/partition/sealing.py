"""Digests of partitions on disk: compared with their files, or added to those that have none."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sar.errors import PartitionError
from sar.files import write_whole
from sar.partition.book import PartitionBook, without_digests
from sar.partition.book_file import read_book
from sar.partition.dgl_format import read_tensor_dict
from sar.partition.digest import ArraySeal, FileSeal, Seals, file_digest, relative, seal
from sar.partition.load import load_partition, verify_file
from sar.partition.mapped import MappedFile
from sar.partition.progress import Progress, silent


def differing(
    path: str | os.PathLike, watch: Callable[[Iterable[int]], Iterable[int]] = iter
) -> tuple[list[str], int]:
    """What is not as it was written, in words that begin with the file's name; and how many files
    there are.

    Args:
        watch: gets the numbers of the parts and gives them out again, such as a progress bar.

    Raises ``PartitionError`` for a JSON that is not there, and for one without digests.
    """
    try:
        book = read_book(path)
    except PartitionError as error:
        if not os.path.isfile(path):
            raise
        return [str(error)], 1
    if book.seals is None:
        raise PartitionError(without_digests(book))
    found = []
    for part in watch(range(book.num_parts)):
        for key in book.files[part]:
            try:
                verify_file(book, part, key)
            except PartitionError as error:
                found.append(str(error))
    return found, sum(map(len, book.files))


def add_digests(path: str | os.PathLike, progress: Progress = silent) -> int:
    """Write digests into the JSON of partitions that have none; returns of how many files.

    All parts are loaded before, so that damage that is there is not taken for what was written.

    Raises ``PartitionError`` for what does not load, has digests, or has no place for them;
    ``OSError`` that names the JSON where it cannot be written.
    """
    book = read_book(path)
    if book.is_foreign:
        raise PartitionError(without_digests(book))
    if book.seals is not None:
        raise PartitionError(f"{path}: holds digests; sar inspect {path} --check compares them")
    files: dict[str, FileSeal] = {}
    for part in range(book.num_parts):
        progress("reading parts", part, book.num_parts)
        files |= _seals(book, part)
    content = json.loads(Path(path).read_bytes())
    text = json.dumps(seal(content, Seals(None, files)), indent=4) + "\n"
    write_whole(Path(path).resolve(), lambda file: file.write(text.encode()), durable=True)
    return len(files)


def _seals(book: PartitionBook, part: int) -> Iterator[tuple[str, FileSeal]]:
    with warnings.catch_warnings():  # that there are none is known
        warnings.simplefilter("ignore")
        load_partition(book.json_path, part)
    folder = os.path.realpath(os.path.dirname(book.json_path))
    for key, path in book.files[part].items():
        file = MappedFile(path)
        if key == "part_graph":
            yield relative(path, folder), FileSeal(file.size, file_digest(file))
            continue
        arrays = {
            name: ArraySeal(str(one.dtype).removeprefix("torch."), list(one.shape), one.digest())
            for name, one in read_tensor_dict(path).items()
        }
        yield relative(path, folder), FileSeal(file.size, arrays=arrays)
