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


class _Later(ModuleType):
    """A module of the original's name, imported when something is read from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        real = importlib.import_module(self.__name__.replace("sar", __name__, 1))
        return getattr(real, name)


def install_modules(package: ModuleType) -> None:
    """Make the original's modules importable below ``package``.

    A name that the package has already keeps its meaning: ``sar.logging_setup`` is the function,
    ``from sar.logging_setup import logger`` reads the module.
    """
    for name in MODULES:
        module = _Later(f"{package.__name__}.{name}")
        sys.modules.setdefault(module.__name__, module)
        if "." not in name and name not in (*LAZY_NAMES, *package.__all__):
            vars(package).setdefault(name, module)


def lazy_name(name: str) -> Any:
    """A top-level name that is DGL's; raises ``AttributeError`` for any other name.

    Raises ``MissingDependencyError`` without dgl.
    """
    if name not in LAZY_NAMES:
        raise AttributeError(f"module 'sar' has no attribute {name!r}")
    require_dgl(f"sar.{name}")
    return getattr(importlib.import_module(f"{__name__}.{LAZY_NAMES[name]}"), name)
