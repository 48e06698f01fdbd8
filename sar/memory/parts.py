"""Training a graph of many parts in one process, part after part."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from sar import expect
from sar.comm import Group, has_group
from sar.comm.turns import TurnGroup
from sar.errors import SarError
from sar.graph import load_partition_data
from sar.partition.load import read_book


def run_parts(
    path: str | os.PathLike, function: Callable[..., Any], args: Sequence[Any] = ()
) -> list[Any]:
    """Call ``function(partition, *args)`` for each part of a graph, in turns, in this process.

    Each part is a rank, and ``function`` is what a script does on a rank behind
    :func:`sar.load_partition_data`: it makes the graph of the part, the model, and trains. The
    ranks are threads of which one computes at a time; it hands over where it meets a collective.
    Losses, gradients and results are those of ranks that compute side by side, bit for bit. Random
    numbers of torch, numpy and Python that ``function`` draws are as in a process of its own, and
    begin for each part where the caller's are.

    Args:
        path: of the partitions, as :func:`sar.load_partition_data` takes it.
        function: of the part, a ``PartitionData``, and ``args``.

    Returns what ``function`` returned, by part.

    Raises:
        TypeError, PartitionError: an argument, or the partitions, are wrong.
        SarError: this process is a rank already.
        Otherwise the error of the part that failed first.
    """
    if not callable(function):
        raise expect.wrong_type(function, "function", "a function of one part")
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise expect.wrong_type(args, "args", "a tuple of the function's further arguments")
    if has_group():
        raise SarError(
            "run_parts: called where there is a group of ranks already; expected a process that "
            "has not called initialize_comms"
        )

    def rank(group: Group) -> Any:
        return function(load_partition_data(path), *args)

    return TurnGroup.run(read_book(path).num_parts, rank)
