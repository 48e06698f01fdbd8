"""Fused layers: a whole layer of another library as one function of autograd over a relation.

:mod:`sar.layers.table` says which class each stands for, :mod:`sar.layers.choice` whether it does
at a call, and why not. To add one, see :mod:`sar.layers.entry`.
"""

from sar.layers.choice import Choice, choose
from sar.layers.entry import FusedLayer, LayerOptions, options_of
from sar.layers.optimize import optimize
from sar.layers.table import entries, entry_of, register

__all__ = [
    "Choice",
    "FusedLayer",
    "LayerOptions",
    "choose",
    "entries",
    "entry_of",
    "optimize",
    "options_of",
    "register",
]
