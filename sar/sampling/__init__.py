"""Mini-batches by neighbor sampling from the partitions that full-batch training uses."""

from sar.sampling.batch import SampledBatch
from sar.sampling.cache import CacheStats
from sar.sampling.features import FeatureTables
from sar.sampling.link_inputs import Links
from sar.sampling.loaders import LinkNeighborLoader, NeighborLoader, SubgraphLoader
from sar.sampling.negatives import NegativeSampling
from sar.sampling.options import LoaderOptions
from sar.sampling.remote import RemoteLoader, Servers, connect
from sar.sampling.sampler import Draws, Edges, NeighborSampler, Sample, Seeds, Trees
from sar.sampling.serve import serve

__all__ = [
    "CacheStats",
    "Draws",
    "Edges",
    "FeatureTables",
    "LinkNeighborLoader",
    "Links",
    "LoaderOptions",
    "NegativeSampling",
    "NeighborLoader",
    "NeighborSampler",
    "RemoteLoader",
    "Sample",
    "SampledBatch",
    "Seeds",
    "Servers",
    "SubgraphLoader",
    "Trees",
    "connect",
    "serve",
]
