"""Reading foreign binary files in a process of their own.

DGL's compiled readers end the process, or worse, where a file is damaged. So they run in a child,
which hands the arrays back in a file that holds nothing but tensors.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch

from sar import errors
from sar.errors import SarError
from sar.files import scratch_folder
from sar.partition import child
from sar.partition.arrays import GraphArrays
from sar.partition.require import require_dgl
from sar.partition.sources.open import is_foreign, open_source

_SPARE_BYTES, _COPIES = 4 << 30, 8
_SPARE_SECONDS, _BYTES_PER_SECOND = 120, 10_000_000
_ARRAYS, _ERROR = "arrays.pt", "error.json"
_KINDS = (ValueError, FileNotFoundError, OSError, errors.MissingDependencyError, SarError)


def open_apart(text: str) -> GraphArrays:
    """What :func:`open_source` gives, read by a child where compiled code of others reads it.

    Raises as :func:`open_source`, and ``ValueError`` when the child dies.
    """
    if not is_foreign(text):
        return open_source(text)
    with scratch_folder() as folder:
        command = child.command(__file__, text, folder)
        # Compiled code writes much when it aborts; loaders of data sets tell of their downloads.
        pipe = subprocess.PIPE if os.path.isfile(text) else None
        done = subprocess.run(command, check=False, stderr=pipe, text=True, errors="replace")
        if (folder / _ERROR).exists():
            kind, message = json.loads((folder / _ERROR).read_text(encoding="utf-8"))
            raise next(one for one in _KINDS if one.__name__ == kind)(message)
        if done.returncode:
            raise ValueError(f"{text}: its reader ended, {_death(done)}; is it damaged?")
        # The map stays when the folder goes.
        content = torch.load(folder / _ARRAYS, mmap=True, weights_only=True)
    return GraphArrays(**content)


def _death(done: subprocess.CompletedProcess) -> str:
    words = (done.stderr or "").strip().splitlines()[-1:] if done.returncode > 0 else []
    return ", ".join([child.death(done.returncode), *words])


def main(text: str, folder: str) -> int:
    """The child: leave arrays, or an error."""
    try:
        if os.path.isfile(text):
            _limit(os.path.getsize(text))
        graph = open_source(text)
        torch.save(vars(graph), Path(folder) / _ARRAYS)
    except Exception as error:  # noqa: BLE001 - handed to the parent
        known = next((one.__name__ for one in _KINDS if isinstance(error, one)), None)
        message = str(error) if known else f"{text}: {type(error).__name__}: {error}"
        report = json.dumps([known or SarError.__name__, message])
        (Path(folder) / _ERROR).write_text(report, encoding="utf-8")
        return 1
    return 0


def _limit(size: int) -> None:
    """Bound memory and time of this process by what a file of ``size`` bytes can need: a damaged
    count asks for all memory of the machine, or for as many rounds."""
    with suppress(errors.MissingDependencyError):  # told when it is needed
        require_dgl("reading a file of dgl.save_graphs")  # its libraries do not count
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_AS, in_use + _SPARE_BYTES + _COPIES * size)
    _lower(resource.RLIMIT_CPU, _SPARE_SECONDS + size // _BYTES_PER_SECOND)


def _lower(limit: int, value: int) -> None:
    soft, hard = resource.getrlimit(limit)
    known = [one for one in (soft, hard, value) if one != resource.RLIM_INFINITY]
    resource.setrlimit(limit, (min(known), hard))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
