"""Partitions and checkpoints with damage: whether any of it is ever used."""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from sar.comm import LocalGroup
from sar.errors import PartitionError
from sar.partition.load import load_partition
from sar.partition.sources.generate import bibliography_graph, community_graph
from sar.partition.write import write_partitions
from sar.train.checkpoint import FILE_NAME, check_fields, load_checkpoint

REJECTED, SAME, USED, OTHER = "rejected", "same content", "used", "another error"
CRASH = "the process ended"
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


def campaign(num: int, seed: int, folder: Path) -> dict[str, int]:
    """:func:`partitions` in a process of its own: a change that ends the process is counted too."""
    context, counts, done = multiprocessing.get_context("spawn"), Counter[str](), 0
    while done < num:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_tell, args=(sender, range(done, num), seed, folder))
        child.start()
        sender.close()
        told = Counter[str](_received(receiver))
        child.join()
        if child.exitcode:
            if child.exitcode > 0:
                raise RuntimeError(f"the campaign ended with status {child.exitcode}")
            told[CRASH] += 1
        counts += told
        done += told.total()
    return dict(counts)


def _tell(sender: Connection, numbers: range, seed: int, folder: Path) -> None:
    for outcome in _of_partitions(numbers, seed, folder):
        sender.send(outcome)


def _received(receiver: Connection) -> Iterator[str]:
    with receiver:
        while True:
            try:
                yield receiver.recv()
            except EOFError:  # the child has ended
                return


def partitions(num: int, seed: int, folder: Path) -> dict[str, int]:
    """What became of ``num`` changes to a file of partitions, all loaded after each."""
    return dict(Counter(_of_partitions(range(num), seed, folder)))


def _of_partitions(numbers: range, seed: int, folder: Path) -> Iterator[str]:
    """Outcomes of the changes with these numbers, each of which depends on its number alone."""
    graphs = (community_graph(60, 300, 2, classes=3, features=5), bibliography_graph(papers=40))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        cuts = []
        for name, graph in enumerate(graphs):
            home = torch.arange(graph.total_nodes) % _PARTS
            path = Path(write_partitions(graph, home, Path(scratch, str(name)), "g"))
            files = sorted(one for one in path.parent.rglob("*") if one.is_file())
            cuts.append((path, [*files, path], _content(path)))  # the JSON twice as often
        for number in numbers:
            draw = random.Random(f"{seed} {number}")
            path, files, want = cuts[number % len(cuts)]
            read = partial(_content, path)
            yield _outcome(draw.choice(files), draw, read, want, PartitionError)


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
