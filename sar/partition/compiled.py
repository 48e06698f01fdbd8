"""Decorators for compiled loops over nodes and edges: kept on disk, without the GIL.

The loops own no memory, as counting references to an array costs more than the work on one edge:
the caller passes what they need. Ids are not checked: `GraphArrays.validate` did.
"""

from __future__ import annotations

from typing import Any

import numba

from sar._private import njit, without_counting
from sar.splitmix import mix as splitmix_mix

_OPTIONS: Any = {"nogil": True, "cache": True, **without_counting()}
compiled: Any = njit(**_OPTIONS)
inlined: Any = numba.njit(inline="always")
mix = inlined(splitmix_mix)
