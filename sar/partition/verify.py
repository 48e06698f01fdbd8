"""Files of partitions compared with their digests, or given some where they have none."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from sar.errors import PartitionError
from sar.files import write_whole
from sar.partition.book import PartitionBook, without_digests
from sar.partition.column import MappedFile
from sar.partition.dgl_format import read_graph, read_tensor_dict
from sar.partition.digest import ArrayDigest, Digests, FileDigest, relative, with_digests
from sar.partition.load import load_partition, read_book, read_features, verify_graph
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
    if book.digests is None:
        raise PartitionError(without_digests(book))
    found = []
    for part in watch(range(book.num_parts)):
        for key in book.files[part]:
            try:
                _verify_file(book, part, key)
            except PartitionError as error:
                found.append(str(error))
    return found, sum(map(len, book.files))


def _verify_file(book: PartitionBook, part: int, key: str) -> None:
    if key == "part_graph":
        verify_graph(book, read_graph(book.files[part][key]))
        return
    for column in read_features(book, part, key).values():
        column.verify()


def add_digests(path: str | os.PathLike, progress: Progress = silent) -> int:
    """Write digests into the JSON of partitions that have none; returns of how many files.

    All parts are loaded before, so that damage that is there is not taken for what was written.

    Raises ``PartitionError`` for what does not load, has digests, or has no place for them;
    ``OSError`` that names the JSON where it cannot be written.
    """
    book = read_book(path)
    if book.is_foreign:
        raise PartitionError(without_digests(book))
    if book.digests is not None:
        raise PartitionError(f"{path}: holds digests; sar inspect {path} --check compares them")
    files: dict[str, FileDigest] = {}
    folder = os.path.realpath(os.path.dirname(book.json_path))
    for part in range(book.num_parts):
        progress("reading parts", part, book.num_parts)
        with warnings.catch_warnings():  # that there are none is known
            warnings.simplefilter("ignore")
            load_partition(book.json_path, part)
        for key, name in book.files[part].items():
            files[relative(name, folder)] = _digest_of(name, key == "part_graph")
    content = json.loads(Path(path).read_bytes())
    text = json.dumps(with_digests(content, Digests(None, files)), indent=4) + "\n"
    write_whole(Path(path).resolve(), lambda file: file.write(text.encode()), durable=True)
    return len(files)


def _digest_of(path: str, is_graph: bool) -> FileDigest:
    file = MappedFile(path)
    if is_graph:
        return FileDigest(file.size, file.digest())
    arrays = {
        name: ArrayDigest(str(one.dtype).removeprefix("torch."), list(one.shape), one.digest())
        for name, one in read_tensor_dict(path).items()
    }
    return FileDigest(file.size, arrays=arrays)
