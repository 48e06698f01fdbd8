"""Fused layers: a whole layer of another library as one function of autograd over a relation.

:mod:`sar.layers.table` says which class each stands for, :mod:`sar.layers.choice` whether it does
at a call, and why not. To add one, see :mod:`sar.layers.entry` and docs/extending.md.
"""

from sar.layers.choice import Choice, choose
from sar.layers.entry import FusedLayer, LayerOptions, options_of
from sar.layers.explain import Explanation, LayerRow, explain, parts_of_fused
from sar.layers.optimize import optimize
from sar.layers.prepare import prepare
from sar.layers.said import layers_logged
from sar.layers.table import entries, entry_of, reduction_of, register

__all__ = [
    "Choice",
    "Explanation",
    "FusedLayer",
    "LayerOptions",
    "LayerRow",
    "choose",
    "entries",
    "entry_of",
    "explain",
    "layers_logged",
    "optimize",
    "options_of",
    "parts_of_fused",
    "prepare",
    "reduction_of",
    "register",
]
