"""Pure functions on compressed edges; no autograd, no network."""

from sar.kernels.csc import INT32_EDGES, Csc, compress, transpose
from sar.kernels.rows import add_rows
from sar.kernels.segment import ExtremeReducer, add_to_winners, winners_only
from sar.kernels.spmm import Factors, spmm, spmm_add, spmm_into, wide_dtype

__all__ = [
    "INT32_EDGES",
    "Csc",
    "ExtremeReducer",
    "Factors",
    "add_rows",
    "add_to_winners",
    "compress",
    "spmm",
    "spmm_add",
    "spmm_into",
    "transpose",
    "wide_dtype",
    "winners_only",
]
