"""The names of IntelLabs SAR: at the top level, and in modules named like the original's.

Each module here stands for the one of its name in the original's package: ``sar.data_loading`` is
``sar.compat.data_loading``. They only give other names to what the library has, or say what takes
the place of what it has not; docs/differences.md lists where the meaning differs.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from sar.partition.require import require_dgl

MODULES = (
    "common_tuples",
    "construct_shard_manager",
    "core",
    "core.full_partition_block",
    "core.graphshard",
    "core.sampling",
    "core.sar_aggregation",
    "data_loading",
    "distributed_bn",
    "edge_softmax",
    "logging_setup",
    "patch_dgl",
)

# Top-level names that are DGL's own: looked up at their first use, so that importing sar does not
# import dgl.
LAZY_NAMES = {
    "RelGraphConv": "patch_dgl",
    "edge_softmax": "edge_softmax",
    "patched_edge_softmax": "patch_dgl",
}


def install_modules(package: ModuleType) -> None:
    """Make the original's modules importable below ``package``.

    A name that the package has already keeps its meaning: ``sar.logging_setup`` is the function,
    ``from sar.logging_setup import logger`` reads the module.
    """
    for name in MODULES:
        module = importlib.import_module(f"{__name__}.{name}")
        sys.modules.setdefault(f"{package.__name__}.{name}", module)
        if "." not in name and name not in LAZY_NAMES:
            vars(package).setdefault(name, module)
    _complete_comm()


def lazy_name(name: str) -> Any:
    """A top-level name that is DGL's; raises ``AttributeError`` for any other name.

    Raises ``MissingDependencyError`` without dgl.
    """
    if name not in LAZY_NAMES:
        raise AttributeError(f"module 'sar' has no attribute {name!r}")
    require_dgl(f"sar.{name}")
    return getattr(importlib.import_module(f"{__name__}.{LAZY_NAMES[name]}"), name)


def _complete_comm() -> None:
    """The original keeps two functions in ``sar.comm`` that need more than communication."""
    from sar import comm, nn

    for name in ("gather_grads", "sync_params"):
        vars(comm).setdefault(name, getattr(nn, name))
