"""Files in a launcher's folder through which it and its ranks hand each other calls and results.

Only the user may look into the folder, so what is unpickled was written by the same launch. Nothing
else in the package unpickles.
"""

from __future__ import annotations

import json
import pickle
import runpy
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sar.errors import CommError, SarError

_PLACE, _CALL, _RESULT = "place.json", "call", "result"
_MAIN = b"__main__"  # is in what is pickled by reference to the script


def write_call(folder: Path, main: Callable[..., Any], args: tuple) -> None:
    """Store a call for :func:`read_call`. Raises ``TypeError`` for what another process cannot
    import or unpickle."""
    for name, value in (("main", main), ("args", args)):
        try:
            content = pickle.dumps(value)
        except Exception as error:  # what pickle raises is not its own class alone
            raise TypeError(
                f"{name}: got what cannot be handed to a process ({error}); expected a function "
                "of a module's top level, and arguments that pickle takes"
            ) from error
        if _MAIN in content and not _script():
            raise TypeError(
                f"{name}: got what a notebook or an interactive session defines, which the ranks' "
                "processes cannot import; write it into a file beside the notebook (%%writefile "
                "job.py in the first line of the cell) and import it from there"
            )
    script = _script() if _MAIN in pickle.dumps((main, args)) else {}
    place = {"path": sys.path, "argv": sys.argv, "script": script}
    (folder / _PLACE).write_text(json.dumps(place))
    (folder / _CALL).write_bytes(pickle.dumps((main, args)))


def read_call(folder: Path) -> tuple[Callable[..., Any], tuple]:
    """The function and its arguments; imports what they need of the launcher's script."""
    place = json.loads((folder / _PLACE).read_text())
    sys.path[:], sys.argv[:] = place["path"], place["argv"]
    script = place["script"]
    if script:
        name = "__mp_main__"  # as multiprocessing calls it, so that `if __name__ ==` keeps out
        if "name" in script:
            found = runpy.run_module(script["name"], run_name=name, alter_sys=True)
        else:
            found = runpy.run_path(script["path"], run_name=name)
        module = types.ModuleType(name)
        vars(module).update(found)
        sys.modules["__main__"] = sys.modules[name] = module
    try:
        called: tuple[Callable[..., Any], tuple] = pickle.loads((folder / _CALL).read_bytes())
    except AttributeError as error:
        raise TypeError(
            f"main, args: got what a rank does not find ({error}); expected names that importing "
            'their file defines, not those under if __name__ == "__main__":'
        ) from error
    return called


def _script() -> dict[str, str]:
    """The module or file that Python was started with; empty for a notebook."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return {"name": spec.name}
    return {"path": str(Path(path).absolute())} if path and Path(path).is_file() else {}


def write_result(folder: Path, result: Any) -> None:
    """Store what rank 0 returned. Raises ``TypeError`` for what cannot be pickled."""
    try:
        (folder / _RESULT).write_bytes(pickle.dumps(result))
    except Exception as error:
        raise TypeError(
            f"main: returned a {type(result).__name__} that cannot be handed to the launcher "
            f"({error}); expected what pickle takes, or None"
        ) from error


def read_result(folder: Path) -> Any:
    """What rank 0 returned; raises ``SarError`` where it ended without a word."""
    file = folder / _RESULT
    if not file.exists():
        raise SarError("rank 0: ended before main returned, with status 0; did it call os._exit?")
    return pickle.loads(file.read_bytes())


def write_error(folder: Path, rank: int, error: BaseException) -> None:
    """Store an error with its traceback, as text where it cannot be pickled."""
    trace = "".join(traceback.format_exception(error))
    try:
        content = pickle.dumps(error)
        pickle.loads(content)  # classes with arguments of their own often cannot be made again
    except Exception:
        content = pickle.dumps(SarError(f"{type(error).__name__}: {error}"))
    written = {"rank": rank, "when": time.time(), "trace": trace, "error": content}
    (folder / f"error-{rank}").write_bytes(pickle.dumps(written))


def first_error(folder: Path) -> BaseException | None:
    """The error of the rank that failed first by itself, its traceback as the cause; ``None`` where
    ranks failed only because another had gone."""
    found = []
    for file in folder.glob("error-*"):
        written = pickle.loads(file.read_bytes())
        written["error"] = pickle.loads(written["error"])
        if not isinstance(written["error"], CommError):
            found.append(written)
    if not found:
        return None
    first = min(found, key=lambda one: one["when"])
    first["error"].__cause__ = SarError(f"rank {first['rank']}:\n{first['trace']}")
    error: BaseException = first["error"]
    return error
