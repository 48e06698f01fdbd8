"""Partitions and checkpoints with damage: whether any of it is ever used."""

from __future__ import annotations

import hashlib
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sar.comm import LocalGroup
from sar.errors import PartitionError
from sar.partition.generate import bibliography_graph, community_graph
from sar.partition.load import load_partition
from sar.partition.write import write_partitions
from sar.train.checkpoint import FILE_NAME, check_fields, load_checkpoint

REJECTED, SAME, USED, OTHER = "rejected", "same content", "used", "another error"
_PARTS = 2
_LONGEST = 64  # bytes of a damaged piece


def flip(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def clear(data: bytearray, draw: random.Random) -> None:
    low = draw.randrange(len(data))
    high = min(len(data), low + draw.randint(1, _LONGEST))
    data[low:high] = bytes(high - low)


def insert(data: bytearray, draw: random.Random) -> None:
    low = draw.randrange(len(data))
    data[low:low] = draw.randbytes(draw.randint(1, _LONGEST))


def remove(data: bytearray, draw: random.Random) -> None:
    low = draw.randrange(len(data))
    del data[low : low + draw.randint(1, _LONGEST)]


def swap(data: bytearray, draw: random.Random) -> None:
    size = draw.randint(1, min(_LONGEST, len(data) // 2))
    one, two = (draw.randrange(len(data) - size) for _ in range(2))
    first, second = data[one : one + size], data[two : two + size]
    data[one : one + size], data[two : two + size] = second, first


CHANGES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip, flip, flip, cut, clear, insert, remove, swap,
)  # fmt: skip


def partitions(num: int, seed: int, folder: Path) -> dict[str, int]:
    """What became of ``num`` changes to a file of partitions, all loaded after each."""
    draw, counts = random.Random(seed), Counter[str]()
    graphs = {
        "plain": community_graph(60, 300, 2, classes=3, features=5),
        "typed": bibliography_graph(papers=40),
    }
    for name, graph in graphs.items():
        home = torch.arange(graph.total_nodes) % _PARTS
        path = Path(write_partitions(graph, home, folder / name, "g"))
        want = _content(path)
        files = sorted(one for one in path.parent.rglob("*") if one.is_file())
        for _ in range(num // len(graphs)):
            file = draw.choice([*files, path])
            counts[_outcome(file, draw, lambda p=path: _content(p), want, PartitionError)] += 1
        shutil.rmtree(path.parent)
    return dict(counts)


def checkpoints(num: int, seed: int, path: Path) -> dict[str, int]:
    """What became of ``num`` flipped bits of a checkpoint."""
    draw = random.Random(seed)

    def content() -> str:
        found = load_checkpoint(path.parent, LocalGroup())
        check_fields(found)
        return _digest(found)

    if path.name != FILE_NAME:
        raise ValueError(f"path: got {path}, expected a file {FILE_NAME}")
    want = content()
    found = (_outcome(path, draw, content, want, ValueError, (flip,)) for _ in range(num))
    return dict(Counter(found))


def _outcome(
    file: Path,
    draw: random.Random,
    read: Callable[[], str],
    want: str,
    refusal: type[Exception],
    changes: tuple = CHANGES,
) -> str:
    """Change a file, read all, and put the file back."""
    good = file.read_bytes()
    data = bytearray(good)
    draw.choice(changes)(data, draw)
    file.write_bytes(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return SAME if read() == want else USED
    except refusal:
        return REJECTED
    except Exception as error:  # noqa: BLE001 - it is counted
        return f"{OTHER}: {type(error).__name__}"
    finally:
        file.write_bytes(good)


def _content(path: Path) -> str:
    """A digest of all that a program sees of the partitions."""
    seen: list[Any] = []
    for part in range(_PARTS):
        data = load_partition(path, part, verify=True)
        book = data.book
        seen += [book.graph_name, book.num_parts, book.ntypes, book.canonical_etypes]
        seen += [book.part_method, book.halo_hops, book.part_ranges]
        seen += [(name, ranges.tolist()) for name, ranges in book.edge_ranges.items()]
        for etype, shard in data.edges.items():
            seen += [etype, shard.src, shard.dst, shard.eid, shard.offsets]
        for store in (data.node_features, data.edge_features):
            seen += [(name, store[name]) for name in sorted(store)]
    return _digest(seen)


def _digest(value: Any) -> str:
    """Of plain values and tensors, every bit of them."""
    found = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            found.update(f"{one.dtype} {tuple(one.shape)}".encode())
            found.update(one.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(one, dict):
            add(list(one.items()))
        elif isinstance(one, (list, tuple)):
            found.update(f"{type(one).__name__} {len(one)}".encode())
            for part in one:
                add(part)
        else:
            found.update(repr(one).encode())

    add(value)
    return found.hexdigest()
