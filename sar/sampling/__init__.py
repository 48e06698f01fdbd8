"""Mini-batches by neighbor sampling from the partitions that full-batch training uses."""

from sar.sampling.batch import SampledBatch
from sar.sampling.features import FeatureTables
from sar.sampling.loader import NeighborLoader
from sar.sampling.sampler import Draws, Edges, NeighborSampler, Sample, Seeds, Trees

__all__ = [
    "Draws",
    "Edges",
    "FeatureTables",
    "NeighborLoader",
    "NeighborSampler",
    "Sample",
    "SampledBatch",
    "Seeds",
    "Trees",
]
