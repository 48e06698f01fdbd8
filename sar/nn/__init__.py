"""What a training step needs beside the graph: normalization, losses, parameters and gradients."""

from sar.nn.batch_norm import DistributedBN1D, convert_batch_norm
from sar.nn.drift import check
from sar.nn.dropout import Dropout, convert_dropout, dropout_rows, same_dropout
from sar.nn.embedding import ShardedEmbedding
from sar.nn.gradients import clip_grad_norm_, gather_grads
from sar.nn.link import NegativeSampler, link_loss, score_edges
from sar.nn.losses import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    global_mean,
    global_sum,
    mse_loss,
)
from sar.nn.overlap import overlap_gradients, wire_first
from sar.nn.own_layers import fetch, halo, local_edges, sum_rounds
from sar.nn.params import ShardedParameter, sync_params
from sar.nn.ranking import hits_at, negative_ranks, rank_links, ranking_metrics
from sar.nn.scorers import DistMultScorer, DotScorer, LinkScorer, MLPScorer
from sar.ops.rectify import relu

__all__ = [
    "DistMultScorer",
    "DistributedBN1D",
    "DotScorer",
    "Dropout",
    "LinkScorer",
    "MLPScorer",
    "NegativeSampler",
    "ShardedEmbedding",
    "ShardedParameter",
    "binary_cross_entropy_with_logits",
    "check",
    "clip_grad_norm_",
    "convert_batch_norm",
    "convert_dropout",
    "cross_entropy",
    "dropout_rows",
    "fetch",
    "gather_grads",
    "global_mean",
    "global_sum",
    "halo",
    "hits_at",
    "link_loss",
    "local_edges",
    "mse_loss",
    "negative_ranks",
    "overlap_gradients",
    "rank_links",
    "ranking_metrics",
    "relu",
    "same_dropout",
    "score_edges",
    "sum_rounds",
    "sync_params",
    "wire_first",
]
