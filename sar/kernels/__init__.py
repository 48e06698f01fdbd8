"""Pure functions on compressed edges; no autograd, no network.

Modules that file an implementation are all imported here, so that :func:`has` knows them.
"""

from sar.kernels import attention, keyed, nonzero, norm, sddmm
from sar.kernels.csc import INT32_EDGES, Csc, compress, transpose
from sar.kernels.device import has, implements
from sar.kernels.jit import wide_dtype
from sar.kernels.segment import ExtremeReducer, add_to_winners, winners_only
from sar.kernels.spmm import Factors, add_rows, spmm, spmm_add, spmm_into

__all__ = [
    "INT32_EDGES",
    "Csc",
    "ExtremeReducer",
    "Factors",
    "add_rows",
    "add_to_winners",
    "attention",
    "compress",
    "has",
    "implements",
    "keyed",
    "nonzero",
    "norm",
    "sddmm",
    "spmm",
    "spmm_add",
    "spmm_into",
    "transpose",
    "wide_dtype",
    "winners_only",
]
