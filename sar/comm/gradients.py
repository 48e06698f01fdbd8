"""Collectives move numbers, not gradients: a tensor that asks for one would lose it silently."""

from __future__ import annotations

import torch
from torch import Tensor


def refuse_gradients(call: str, *tensors: Tensor) -> None:
    """Raise, before anything is sent, where autograd records what is done with a tensor."""
    for tensor in tensors:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{call}: got a tensor that asks for a gradient, which does not flow to other "
                "ranks; use sar.global_mean or sar.global_sum for a loss, sar.sync_params and "
                "sar.gather_grads for parameters, and tensor.detach().clone() for its numbers alone"
            )
