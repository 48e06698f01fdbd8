"""Compiled code, loaded before anything is measured: neither activation memory nor time."""

from __future__ import annotations

import torch

from sar import Policy
from sar.comm import LocalGroup
from sar.edges import build_relation
from sar.kernels import add_rows, compress, norm, spmm
from sar.kernels.attention import Scores, add_projected_grads
from sar.kernels.attention_loops import ADDITIVE, MIXED
from sar.ops.attention import Attention, attention

try:
    from sar.kernels import relu  # of earlier checkouts, which run beside this one
except ImportError:
    from sar.kernels import nonzero as relu

_HEADS, _WIDTH, _ROWS = 2, 128, 64  # numbers enough that no other code is chosen


def load_kernels() -> None:
    """Run each kernel of sums, attention, relu and norms once, both passes, in float32."""
    ring = torch.arange(_ROWS, dtype=torch.int32)
    rows = torch.ones(_ROWS, _HEADS * _WIDTH, requires_grad=True)
    add_rows(rows.detach().clone(), ring, rows.detach())
    spmm(compress(ring, ring.flip(0), _ROWS, compact=False, order=False), rows.detach())
    relu.mask(rows.detach().clone(), relu.rectify(rows.detach().clone()))
    mean, m2, _ = norm.moments(rows.detach())
    done = norm.Norm(mean, m2, mean)
    y = norm.normalize(rows.detach(), done)
    norm.gradient_sums(rows.detach(), y, done)
    norm.input_gradient(rows.detach(), y, done, mean, mean, y)
    sizes, keys = ([0, _ROWS], _ROWS, _ROWS), lambda: ring.long()
    relation = build_relation(LocalGroup(), ring, ring.flip(0), ring, *sizes, keys)
    for kind, width in ((ADDITIVE, _HEADS), (MIXED, _HEADS * _WIDTH)):
        ends = torch.ones(_ROWS, width, requires_grad=True)
        spec = Attention(relation, Policy(), Scores(kind, _HEADS, _WIDTH))
        attention(spec, rows, ends, ends, torch.ones(_HEADS * _WIDTH)).sum().backward()
    of_scores, vector = torch.ones(_ROWS, _HEADS), torch.ones(_HEADS * _WIDTH)
    add_projected_grads(rows.detach().clone(), rows.detach(), [of_scores], [vector])
