"""How loops over nodes and edges are compiled: kept on disk, other threads run meanwhile.

They own no memory: counting who refers to an array costs more than what is done with one
edge. Where they need room, the caller passes it. Ids are not checked: `GraphArrays.validate` did.
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
