"""What a training step needs beside the graph: normalization, loss, parameters and gradients."""

from sar.nn.batch_norm import DistributedBN1D, convert_batch_norm
from sar.nn.embedding import ShardedEmbedding
from sar.nn.loss import global_mean
from sar.nn.params import ShardedParameter, clip_grad_norm_, gather_grads, sync_params

__all__ = [
    "DistributedBN1D",
    "ShardedEmbedding",
    "ShardedParameter",
    "clip_grad_norm_",
    "convert_batch_norm",
    "gather_grads",
    "global_mean",
    "sync_params",
]
