""":func:`launch`: a user's function on several ranks of this machine."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sar import expect
from sar.cli.call_files import first_error, read_result, write_call
from sar.cli.fork_server import REPORT, ForkServer
from sar.cli.rank_environment import TRAINING, worker_environment
from sar.cli.ranks import run_ranks
from sar.comm import DEFAULT_TIMEOUT
from sar.errors import SarError
from sar.files import remove_left_over, scratch_folder
from sar.words import ALLOCATORS

_IMPORTED = "sar._public", "sar.cli.call_files", *TRAINING


def launch(
    main: Callable[..., Any],
    nproc: int,
    args: Sequence[Any] = (),
    *,
    threads: int | None = None,
    allocator: str = "system",
    timeout: float = DEFAULT_TIMEOUT,
) -> Any:
    """Call ``main(*args)`` in ``nproc`` new processes of this machine; returns rank 0's result.

    Each finds in its environment what ``torchrun`` would put there, so ``main`` is what a script
    runs under ``torchrun``: it begins with :func:`sar.initialize_comms`.

    Args:
        main: a function at the top level of a module or of the script, which every process
            imports. So a script calls ``launch`` under ``if __name__ == "__main__":``, and a
            notebook imports ``main`` from a file.
        nproc: ranks, one for each part of the graph.
        args: of ``main``, the same for all; pickled, as the result is.
        threads: of each rank; by default its share of the cores.
        allocator: of each rank, see ``sar train --allocator``.
        timeout: seconds in which ranks end after the first that has.

    Raises:
        TypeError, ValueError: an argument is none of these, before a process starts.
        SarError: a rank was killed, or did not end. Otherwise the error of the rank that failed
            first, with that rank's traceback as its cause. A rank that calls ``sys.exit`` has
            failed unless the status is 0; its result is ``None`` then. No rank runs any more after
            an error or an interrupt.
    """
    _check(main, nproc, args, threads, allocator, timeout)
    remove_left_over(Path(tempfile.gettempdir()))
    with scratch_folder() as folder:
        write_call(folder, main, tuple(args))
        environment = worker_environment(nproc, threads, allocator)
        server = ForkServer(nproc, environment, _IMPORTED)
        try:
            run_ranks(["sar.cli.worker", "function", str(folder)], server, timeout)
        except SarError as failure:
            error = first_error(folder)
            if error is None:
                raise
            raise error from (error.__cause__ or failure)
        return read_result(folder)


def _check(main: Any, nproc: Any, args: Any, threads: Any, allocator: str, timeout: Any) -> None:
    if REPORT in os.environ:
        raise SarError(
            "launch: called inside of a rank, perhaps by the script that the ranks import; put the "
            'call under if __name__ == "__main__":'
        )
    if not callable(main):
        raise expect.wrong_type(main, "main", "a function")
    if expect.integer(nproc, "nproc") < 1:
        raise ValueError(f"nproc: got {nproc}, expected 1 or more")
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise expect.wrong_type(args, "args", "a tuple of main's arguments")
    expect.one_of(allocator, "allocator", ALLOCATORS)
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int)):
        raise expect.wrong_type(threads, "threads", "an int or None")
    if threads is not None and threads < 1:
        raise ValueError(f"threads: got {threads}, expected 1 or more")
    if not isinstance(timeout, (int, float)):
        raise expect.wrong_type(timeout, "timeout", "seconds")
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout: got {timeout}, expected seconds, more than 0")
