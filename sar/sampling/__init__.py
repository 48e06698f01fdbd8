"""Mini-batches by neighbor sampling from the partitions that full-batch training uses."""

from sar.sampling.batch import SampledBatch
from sar.sampling.features import CacheStats, FeatureTables
from sar.sampling.link_inputs import Links
from sar.sampling.loader import LinkNeighborLoader, NeighborLoader, SubgraphLoader
from sar.sampling.options import LoaderOptions, NegativeSampling
from sar.sampling.remote import RemoteLoader, Servers, connect
from sar.sampling.sample import Edges, Sample, Seeds, Trees
from sar.sampling.sampler import Draws, NeighborSampler
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
