"""What a rank holds of its part, under the original's names."""

from sar.partition.load import PartEdges as ShardEdgesAndFeatures
from sar.partition.load import PartitionData

__all__ = ["PartitionData", "ShardEdgesAndFeatures"]
