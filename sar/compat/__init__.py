"""The names of IntelLabs SAR: at the top level, and in modules named like the original's.

These modules are no files but a table: each name is one that the library has, or stands in a file
here that says what takes its place. docs/differences.md lists where the meaning differs.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from sar.partition.require import require_dgl

_GRAPHS = {
    name: f"sar.compat.graphs:{name}"
    for name in ("DistributedBlock", "GraphShardManager", "HeteroGraphShardManager")
}
_SAMPLING = {name: f"sar.compat.sampling:{name}" for name in ("DataLoader", "DistNeighborSampler")}
_MESSAGES = {"message_has_parameters": "sar.compat.graphs:message_has_parameters"}
_SOFTMAX = "dgl.nn.functional:edge_softmax"

# By module of the original, where each of its names is.
MODULES: dict[str, dict[str, str]] = {
    "common_tuples": {
        "PartitionData": "sar.partition.load:PartitionData",
        "ShardEdgesAndFeatures": "sar.partition.load:PartEdges",
    },
    "construct_shard_manager": {
        "construct_full_graph": "sar.frontends.dgl:construct_full_graph",
        "construct_mfgs": "sar.frontends.dgl:construct_mfgs",
        "convert_dist_graph": "sar.compat.dist_graph:convert_dist_graph",
    },
    "core": {**_GRAPHS, **_SAMPLING, **_MESSAGES},
    "core.full_partition_block": _GRAPHS,
    "core.graphshard": _GRAPHS,
    "core.sampling": _SAMPLING,
    "core.sar_aggregation": _MESSAGES,
    "data_loading": {
        "load_dgl_partition_data": "sar.compat.data_loading:load_dgl_partition_data",
        "suffix_key_lookup": "sar.compat.data_loading:suffix_key_lookup",
    },
    "distributed_bn": {
        "DistributedBN1D": "sar.nn:DistributedBN1D",
        **{
            name: f"sar.compat.distributed_bn:{name}"
            for name in ("MeanOp", "VarOp", "mean_op", "var_op")
        },
    },
    "edge_softmax": {"edge_softmax": _SOFTMAX},
    "logging_setup": {
        "logger": "sar.compat.logging_setup:logger",
        "logging_setup": "sar.compat.logging_setup:logging_setup",
    },
    "patch_dgl": {
        "patch_dgl": "sar.compat.graphs:patch_dgl",
        "patched_edge_softmax": _SOFTMAX,
        "RelGraphConv": "dgl.nn:RelGraphConv",
    },
}

# Top-level names that are DGL's own: looked up at their first use, so that importing sar does not
# import dgl.
LAZY_NAMES = {
    name: place
    for names in MODULES.values()
    for name, place in names.items()
    if place.startswith("dgl.")
}


class _Later(ModuleType):
    """A module of the original's name, whose names are looked up when they are read."""

    def __getattr__(self, name: str) -> Any:
        places = MODULES[self.__name__.partition(".")[2]]
        if name not in places:  # the import system asks, too
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return _found(places[name])


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def install_modules(package: ModuleType) -> None:
    """Make the original's modules importable below ``package``.

    A name that the package has already keeps its meaning: ``sar.logging_setup`` is the function,
    ``from sar.logging_setup import logger`` reads the module.
    """
    for name in MODULES:
        module = _Later(f"{package.__name__}.{name}")
        sys.modules.setdefault(module.__name__, module)
        if "." in name:
            parent, _, last = module.__name__.rpartition(".")
            vars(sys.modules[parent]).setdefault(last, module)
        elif name not in (*LAZY_NAMES, *package.__all__):
            vars(package).setdefault(name, module)


def lazy_name(name: str) -> Any:
    """A top-level name that is DGL's; raises ``AttributeError`` for any other, and without dgl
    ``MissingDependencyError``."""
    if name not in LAZY_NAMES:
        raise AttributeError(f"module 'sar' has no attribute {name!r}")
    require_dgl(f"sar.{name}")
    return _found(LAZY_NAMES[name])
