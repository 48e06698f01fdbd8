"""Reading foreign binary files in a process of their own.

DGL's compiled readers end the process, or worse, where a file is damaged. So they run in a child,
which hands the arrays back in a file that holds nothing but tensors.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import torch

from sar import errors
from sar.errors import SarError
from sar.files import scratch_folder
from sar.partition.arrays import GraphArrays
from sar.partition.sources import is_foreign, open_source

_ARRAYS, _ERROR = "arrays.pt", "error.json"
_KINDS = (ValueError, FileNotFoundError, OSError, errors.MissingDependencyError, SarError)


def open_apart(text: str) -> GraphArrays:
    """What :func:`open_source` gives, read by a child where compiled code of others reads it.

    Raises as :func:`open_source`, and ``ValueError`` when the child dies.
    """
    if not is_foreign(text):
        return open_source(text)
    with scratch_folder() as folder:
        command = [sys.executable, "-m", "sar.partition.apart", text, str(folder)]
        status = subprocess.run(command, check=False).returncode
        if (folder / _ERROR).exists():
            kind, message = json.loads((folder / _ERROR).read_text(encoding="utf-8"))
            raise next(one for one in _KINDS if one.__name__ == kind)(message)
        if status:
            name = signal.Signals(-status).name if status < 0 else f"status {status}"
            raise ValueError(f"{text}: its reader died with {name}; is it damaged?")
        # The map stays when the folder goes.
        content = torch.load(folder / _ARRAYS, mmap=True, weights_only=True)
    return GraphArrays(**content)


def main(text: str, folder: str) -> int:
    """The child: leave arrays, or an error."""
    try:
        graph = open_source(text)
        torch.save(vars(graph), Path(folder) / _ARRAYS)
    except Exception as error:  # noqa: BLE001 - handed to the parent
        known = next((one.__name__ for one in _KINDS if isinstance(error, one)), None)
        message = str(error) if known else f"{text}: {type(error).__name__}: {error}"
        report = json.dumps([known or SarError.__name__, message])
        (Path(folder) / _ERROR).write_text(report, encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
