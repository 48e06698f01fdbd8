"""Training a graph of many parts in one process, part after part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from sar import expect
from sar.comm import Group, has_group
from sar.comm.environment import memory_left
from sar.comm.turns import TurnGroup
from sar.config import parse_bytes
from sar.errors import SarError
from sar.graph import load_partition_data
from sar.log import say
from sar.memory.spill import Spill
from sar.partition.load import read_book

_MOST_MAKERS = 8  # lines of a report
_MANY = 1 << 50  # where the system does not say how much memory is left


def run_parts(
    path: str | os.PathLike,
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    directory: str | os.PathLike | None = None,
    memory: int | str | None = None,
) -> list[Any]:
    """Call ``function(partition, *args)`` for each part of a graph, in turns, in this process.

    Each part is a rank, and ``function`` is what a script does on a rank behind
    :func:`sar.load_partition_data`: it makes the graph of the part, the model, and trains. The
    ranks are threads of which one computes at a time; it hands over where it meets a collective.
    Losses, gradients and results are those of ranks that compute side by side, bit for bit, but for
    sums over edges: they are read from one table of all rows in memory, in one pass over a row's
    edges, and are those of other runs to rounding. Random numbers of torch, numpy and Python that
    ``function`` draws are as in a process of its own, and begin for each part where the caller's
    are.

    Tensors that live from one turn to the next stay in memory while there is room, else they lie in
    a file. Those from 256 KiB on do so, whatever holds them: autograd, an optimizer, a variable.
    They are the same tensors with the same addresses all the time.

    Args:
        path: of the partitions, as :func:`sar.load_partition_data` takes it.
        function: of the part, a ``PartitionData``, and ``args``.
        directory: where that file goes, on a disk; made if need be. It has no name, so nothing is
            left of a run that was killed. By default there is none, and all stays in memory.
        memory: bytes, or text like "20GiB", that the process may take beside what files back, that
            table too; by default half of what is free, and what it takes already.

    Returns what ``function`` returned, by part, in memory. Logs what was read and written at the
    end, and what lived from turn to turn.

    Raises:
        TypeError, ValueError, PartitionError: an argument, or the partitions, are wrong, as a
            ``directory`` in memory (tmpfs) is.
        SarError: this process is a rank already, another run has the ``directory``, its disk is
            full, or ``memory`` is too little, with what was needed where it stopped.
        NotSupportedError: another system than Linux, another allocator than glibc's.
        Exception: otherwise, that of the part that failed first.
    """
    _check(function, args, directory, memory)
    size = read_book(path).num_parts
    most = None if memory is None else parse_bytes(memory, "memory")
    with nullcontext() if directory is None else Spill(directory, most) as spill:

        def rank(group: Group) -> Any:
            with nullcontext() if spill is None else spill.following(group), _naming(group.rank):
                return function(load_partition_data(path), *args)

        if spill is None:
            return TurnGroup.run(size, rank, table=int(min(memory_left(), _MANY)) // 2)
        results = TurnGroup.run(size, rank, between=[spill], table=spill)
        say(summary_text(spill.summary()))
        return results


def summary_text(summary: dict[str, Any]) -> str:
    """What :meth:`Spill.summary` tells, for people."""
    read, written, kept = (summary[f"{name}_bytes"] / 1e6 for name in ("read", "written", "kept"))
    largest = [*summary["kept"].items()][:_MOST_MAKERS]
    return "\n".join(
        [
            f"file in {summary['directory']}: {read:,.0f} MB read, {written:,.0f} MB written; "
            f"at most {kept:,.0f} MB lived from turn to turn" + ":" * bool(largest),
            *(f"  {size / 1e6:>9,.1f} MB of {maker}" for maker, size in largest),
        ]
    )


@contextmanager
def _naming(part: int) -> Iterator[None]:
    """An error's traceback ends with the part that it comes from (since Python 3.11)."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(f"in part {part}")
        raise


def _check(function: Any, args: Any, directory: Any, memory: Any) -> None:
    if not callable(function):
        raise expect.wrong_type(function, "function", "a function of one part")
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise expect.wrong_type(args, "args", "a tuple of the function's further arguments")
    if directory is None and memory is not None:
        raise ValueError("memory: got some, expected a directory as well")
    if directory is not None and not isinstance(directory, (str, os.PathLike)):
        raise expect.wrong_type(directory, "directory", "a path or None")
    if has_group():
        raise SarError(
            "run_parts: called where there is a group of ranks already; expected a process that "
            "has not called initialize_comms"
        )
