"""The measured process: makes one task object and calls its methods as the driver asks.

Started as ``python -m benchmarks.worker MODULE:CLASS`` by :class:`benchmarks.cluster.Cluster`.
Requests come as lines of JSON on the standard input, answers leave the same way on the standard
output; whatever a library prints goes to the standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any, TextIO


def main() -> int:
    # A checkout that is measured beside this package must win over the current folder.
    sys.path[:0] = [path for path in os.environ.get("BENCH_FIRST", "").split(os.pathsep) if path]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    module, name = sys.argv[1].split(":")
    task: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if task is None:
                task = getattr(importlib.import_module(module), name)(**request["arguments"])
                _answer(answers, result=None)
            else:
                _answer(answers, result=getattr(task, request["method"])(**request["arguments"]))
        except Exception:  # the driver shows it and ends the other ranks
            _answer(answers, error=traceback.format_exc())
            return 1
    return 0


def _answer(stream: TextIO, **content: Any) -> None:
    stream.write(json.dumps(content) + "\n")
    stream.flush()


if __name__ == "__main__":
    # Skips the interpreter's teardown: a thread of the transport may still be blocked.
    code = main()
    sys.stderr.flush()
    os._exit(code)
