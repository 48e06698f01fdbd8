"""Reading the partition book, whoever wrote the partitions."""

from __future__ import annotations

import os

from sar.partition.book import PartitionBook
from sar.partition.book_json import parse_book
from sar.partition.foreign import read_foreign_book


def read_book(json_path: str | os.PathLike) -> PartitionBook:
    """Reads and validates a partition's JSON, or a folder that PyG or GraphLearn wrote.

    Ranges must tile the id space in (part, type) order without gap or overlap and agree with the
    JSON's counts; file paths must stay below the JSON's folder. Raises PartitionError, which
    names the file, what came and what was expected. Of a JSON's partition files none is opened.
    """
    if os.path.isdir(json_path):
        return read_foreign_book(json_path)
    return parse_book(os.fspath(json_path))
