"""The environment in which ranks start: which allocator serves their tensors, and how."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

from sar import expect
from sar.errors import MissingDependencyError, NotSupportedError
from sar.words import ALLOCATORS, SOFT_LIMITS_GONE

__all__ = [
    "PRELOAD",
    "allocator_environment",
    "is_preloaded",
    "set_soft_limit",
]

# Note [Allocators]
# Layers allocate and free large buffers in changing order. glibc keeps those below 32 MiB in heaps
# that fragment, unless it is told to map each, which returns all memory, but the kernel clears
# every page again: a fifth of the processor time of GraphSAGE on many ranks. oneTBB's allocator
# keeps freed buffers of up to 64 MiB, each for requests of its own size. Where all layers make
# buffers of a few sizes that takes no more memory; where sizes differ, as in attention, a half.

PRELOAD = "LD_PRELOAD"
# glibc gives buffers of 1 MiB and more back when they are freed; torch asks for huge pages.
_SYSTEM = {"MALLOC_MMAP_THRESHOLD_": "1048576", "THP_MEM_ALLOC_ENABLE": "1"}
_LIBRARIES = ("libtbbmalloc.so.2", "libtbbmalloc_proxy.so.2")  # the second needs the first


def allocator_environment(name: str = "system") -> dict[str, str]:
    """Variables to set before a rank's Python starts, for one of :data:`ALLOCATORS`; see Note
    [Allocators]. Raises ``ValueError`` for another name, ``MissingDependencyError`` where ``"tbb"``
    is not installed."""
    if expect.one_of(name, "allocator", ALLOCATORS) == "system":
        return dict(_SYSTEM)
    return {**_SYSTEM, PRELOAD: ":".join(_tbb_libraries())}


def is_preloaded(name: str) -> bool:
    """Whether this process' children start with the libraries of that allocator. Raises as
    :func:`allocator_environment`, and ``ValueError`` where they start with others."""
    wanted = allocator_environment(name).get(PRELOAD, "")
    present = os.environ.get(PRELOAD, "")
    if set(wanted.split(":")) <= {"", *re.split(r"[\s:]+", present)}:
        return True
    if present:
        raise ValueError(f"allocator: got {name!r}, but {PRELOAD} is {present!r} already")
    return False


def set_soft_limit(size: int) -> None:
    raise NotSupportedError(f"soft_limit: got {size}, but {SOFT_LIMITS_GONE}")


def _tbb_libraries() -> list[str]:
    try:
        files = metadata.files("tbb") or []
    except metadata.PackageNotFoundError:
        files = []
    places = {file.name: Path(str(file.locate())).resolve() for file in files}
    found = [places[name] for name in _LIBRARIES if name in places and places[name].exists()]
    if len(found) < len(_LIBRARIES):
        raise MissingDependencyError(
            f"allocator: got 'tbb', which needs {' and '.join(_LIBRARIES)}: pip install "
            "'sar-gnn[tbb]' (Linux on x86-64)"
        )
    paths = [str(path) for path in found]
    if re.search(r"[\s:]", "".join(paths)):
        raise ValueError(f"allocator: {PRELOAD} cannot name {paths[0]!r}: a space or colon in it")
    return paths
